"""What a rank was sent is believed to be there: for how long, and what ends it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from balancer.core.fleet.snapshot import Fleet, Instance
from balancer.core.load.local_ledger import LocalLedger
from balancer.core.request import GenerateRequest, PromptView
from balancer.core.routing.policies import named_policy
from balancer.core.settings.routing import RoutingSettings
from balancer.routing.router import Router
from indexer.core.types import RankId, Trust

RankOf = Callable[[str], RankId]
InstanceOf = Callable[..., Instance]
Ask = Callable[..., GenerateRequest]
View = Callable[..., PromptView]


@pytest.mark.parametrize(
    ("capacity_tokens", "others", "still_tokens"), [(8000, 1, 0), (8000, 0, 3984), (None, 9, 3984)]
)
async def test_half_a_cache_of_new_prompts_ends_what_was_predicted(
    bench: Any,
    capacity_tokens: int | None,
    others: int,
    still_tokens: int,
    rank: RankOf,
    instance: InstanceOf,
    ask: Ask,
    view: View,
) -> None:
    """A prompt that went to a small rank may have been computed, told of, and pushed out again."""
    bench.index.held_tokens = {rank("a"): 0}
    tight = replace(instance("a"), rank_cache_tokens=capacity_tokens)
    fleet, router = Fleet(instances=(tight,)), bench.build()
    for number in range(1 + others):
        with await router.route(fleet, ask(), view(first=10_000 * number)):
            pass

    plan = await router.explain(fleet, ask(), view())

    assert plan.decode.candidate.predicted_tokens == still_tokens


async def test_an_exception_withdraws_the_prediction(
    bench: Any, ask: Ask, view: View, pair: Fleet
) -> None:
    """Nobody holds what a failed leg was to compute (F19)."""
    router = bench.build()
    route = await router.route(pair, ask(), view())
    with pytest.raises(RuntimeError), route:
        raise RuntimeError

    plan = await router.explain(pair, ask(), view())
    assert [each.candidate.predicted_tokens for each in plan.considered] == [0, 0]


@pytest.mark.parametrize(
    ("trust", "held_later"),
    [(Trust.EXACT, False), (Trust.APPROXIMATE, True)],
    ids=["events-tell", "no-events"],
)
async def test_belief_depends_on_events(
    bench: Any,
    trust: Trust,
    held_later: bool,
    rank: RankOf,
    instance: InstanceOf,
    ask: Ask,
    view: View,
) -> None:
    """Where events come, a prediction they don't confirm is soon dropped."""
    now_s = [0.0]
    ledger = LocalLedger(lambda: now_s[0])
    bench.index.trust = trust
    bench.index.held_tokens = {rank("a"): 0}
    router = Router(
        index=bench.index,
        ledger=ledger,
        policy=named_policy("kvlb"),
        settings=RoutingSettings(confirm_s=2, approximate_ttl_s=30),
        random=lambda: 0.5,
        clock=lambda: now_s[0],
    )
    alone = Fleet(instances=(instance("a"),))
    with await router.route(alone, ask(), view()):
        pass
    now_s[0] += 5

    plan = await router.explain(alone, ask(), view())
    assert (plan.decode.candidate.predicted_tokens > 0) is held_later


async def test_restarted_rank_loses_its_predictions_at_once(
    bench: Any, rank: RankOf, instance: InstanceOf, ask: Ask, view: View
) -> None:
    """Its cache is empty; what it was sent before counts for nothing, but is still in flight."""
    bench.index.held_tokens = {rank("a"): 0, rank("b"): 0}
    alone = Fleet(instances=(instance("a"),))
    router = bench.build()
    with await router.route(alone, ask(), view()):
        before = await router.explain(alone, ask(), view())
        bench.index.epochs[rank("a")] = 2
        after = await router.explain(alone, ask(), view())
        in_flight = bench.ledger.load(rank("a")).requests

    assert before.decode.candidate.predicted_tokens > 0
    assert after.decode.candidate.predicted_tokens == 0
    assert in_flight == 1


async def test_same_epoch_keeps_predictions(
    bench: Any, rank: RankOf, instance: InstanceOf, ask: Ask, view: View
) -> None:
    """A lookup that tells nothing new changes nothing."""
    bench.index.held_tokens = {rank("a"): 0}
    alone = Fleet(instances=(instance("a"),))
    router = bench.build()
    with await router.route(alone, ask(), view()):
        await router.explain(alone, ask(), view())
        plan = await router.explain(alone, ask(), view())

    assert plan.decode.candidate.predicted_tokens > 0


@pytest.mark.parametrize(
    ("fault", "told"),
    [("nothing-stored", Trust.EXACT), ("lookup-fails", Trust.LOAD_ONLY)],
)
async def test_rank_with_events_is_believed_for_no_longer_than_one(
    bench: Any,
    fault: str,
    told: Trust,
    rank: RankOf,
    instance: InstanceOf,
    ask: Ask,
    view: View,
) -> None:
    """It has no block size yet, or this one lookup failed: its events still come."""
    now_s = [0.0]
    ledger = LocalLedger(lambda: now_s[0])
    bench.index.held_tokens = {rank("a"): 0}
    alone = Fleet(instances=(instance("a"),))
    router = bench.build(RoutingSettings(confirm_s=2, approximate_ttl_s=30), ledger=ledger)
    if fault == "nothing-stored":
        bench.index.block_size = None
    else:
        await router.explain(alone, ask(), view())
        bench.index.error = OSError()
    with await router.route(alone, ask(), view()) as route:
        trust = route.plan.decode.candidate.trust
    now_s[0] += 5

    plan = await router.explain(alone, ask(), view())
    assert trust is told
    assert plan.decode.candidate.predicted_tokens == 0
