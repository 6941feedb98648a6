"""The router on a real event loop: who is chosen, what is booked, who is refused."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from balancer.core.errors import ModelNotFoundError, NoInstanceError, OverloadedError
from balancer.core.fleet.snapshot import Fleet
from balancer.core.load.ledger import Learning
from balancer.core.request import GenerateRequest, PromptView
from balancer.core.settings.routing import RoutingSettings
from indexer.core.types import RankId

RankOf = Callable[[str], RankId]
Ask = Callable[..., GenerateRequest]
View = Callable[..., PromptView]


async def test_the_rank_that_holds_the_prompt_is_chosen(
    bench: Any, rank: RankOf, ask: Ask, view: View, pair: Fleet
) -> None:
    """The index was asked, and its answer decided."""
    bench.index.held_tokens = {rank("a"): 0, rank("b"): 3200}

    route = await bench.build().route(pair, ask(), view())

    assert route.plan.decode.candidate.rank == rank("b")
    assert route.plan.decode.candidate.overlap_tokens == 3200
    assert bench.lookups == ["ok"]


async def test_what_the_index_promised_of_each_leg_is_told(
    bench: Any, rank: RankOf, ask: Ask, view: View, pair: Fleet
) -> None:
    """Of the rank that gets it; a leg that takes blocks of another engine says nothing of it."""
    bench.index.held_tokens = {rank("a"): 0, rank("b"): 3200}
    route = await bench.build().route(pair, ask(), view())

    own, loading = (route.forecast("whole", loads=loads) for loads in (False, True))

    assert own is not None
    assert loading is not None
    assert own.rank == rank("b")
    assert own.match is not None
    assert (own.match.tokens, own.incomparable) == (3200, None)
    assert loading.incomparable == "after_transfer"


async def test_a_route_is_booked_until_it_ends(
    bench: Any, ask: Ask, view: View, pair: Fleet
) -> None:
    """At once, before anyone enters it; afterwards only its prediction stays."""
    router = bench.build()
    route = await router.route(pair, ask(), view())
    chosen = route.plan.decode.candidate.rank
    booked = bench.ledger.load(chosen)
    with route:
        route.decode_guard.first_token()
        decoding = bench.ledger.load(chosen).decoding

    assert (booked.requests, booked.queued_tokens, decoding) == (1, 4000, 1)
    assert bench.ledger.load(chosen).requests == 0
    again = await router.explain(pair, ask(), view())
    assert again.decode.candidate.predicted_tokens == 3984


async def test_a_plan_tells_that_rates_are_unknown(
    bench: Any, ask: Ask, view: View, pd_fleet: Fleet
) -> None:
    """And how much has been seen of them: of a fleet that has just started, nothing."""
    plan = await bench.build().explain(pd_fleet, ask(), view(1000))

    assert plan.learning == Learning(prefills=0, hand_overs=0, needed=3)


async def test_explaining_books_nothing(
    bench: Any, rank: RankOf, ask: Ask, view: View, pair: Fleet
) -> None:
    """And takes no turn."""
    router = bench.build(policy="round_robin")
    explained = [await router.explain(pair, ask(), view()) for _ in range(3)]

    assert all(bench.ledger.load(rank(alias)).requests == 0 for alias in "ab")
    assert len({each.reason for each in explained}) == 1


async def test_a_cached_share_is_the_most_that_any_rank_holds(
    bench: Any, rank: RankOf, ask: Ask, view: View, pair: Fleet
) -> None:
    """By the index, or since it is on its way there. Of a prompt that nobody could read it isn't known."""
    router = bench.build()
    bench.index.held_tokens = {rank("a"): 1000, rank("b"): 0}
    held = await router.cached_share(pair, ask(), view(4000))
    await router.route(pair, ask(), view(4000))
    promised = await router.cached_share(pair, ask(), view(4000))
    unknown = await router.cached_share(pair, ask(), PromptView(unscorable="no_tokenizer"))

    assert (held, promised, unknown) == (0.25, 0.996, 0.0)


async def test_siblings_at_once_land_together(
    bench: Any, ask: Ask, view: View, pair: Fleet
) -> None:
    """Eight concurrent lookups, each answered before any prompt is computed (F19)."""
    bench.index.delay_s = 0.001
    router = bench.build(RoutingSettings(lookup_timeout_s=5))
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(router.route(pair, ask(body={"max_tokens": 1}), view()))
            for _ in range(8)
        ]

    assert len({task.result().plan.decode.candidate.rank for task in tasks}) == 1


async def test_excluded_ranks_are_not_tried_again(
    bench: Any, rank: RankOf, ask: Ask, view: View, pair: Fleet
) -> None:
    """Nobody left is an error of its own."""
    router = bench.build()
    route = await router.route(pair, ask(), view(), exclude=frozenset({rank("a")}))

    assert route.plan.decode.candidate.rank == rank("b")
    with pytest.raises(NoInstanceError):
        await router.route(pair, ask(), view(), exclude=frozenset({rank("a"), rank("b")}))


async def test_an_unknown_model_is_the_clients_fault(
    bench: Any, ask: Ask, view: View, pair: Fleet
) -> None:
    """404, not 503 (F59)."""
    with pytest.raises(ModelNotFoundError):
        await bench.build().route(pair, ask("nope"), view())


async def test_a_full_fleet_is_overloaded(bench: Any, ask: Ask, view: View, pair: Fleet) -> None:
    """Two ranks, a limit of one each: the third request is told to come back (F26)."""
    router = bench.build(RoutingSettings(max_requests_per_rank=1))
    for _ in range(2):
        await router.route(pair, ask(), view())

    with pytest.raises(OverloadedError):
        await router.route(pair, ask(), view())
