"""Plans of two legs: booked on both ranks, moved to another, or not pd_fleet."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from balancer.connectors.available import connectors
from balancer.core.errors import NoInstanceError, OverloadedError, PrefillFailedError
from balancer.core.fleet.snapshot import Fleet
from balancer.core.request import GenerateRequest, PromptView
from balancer.core.routing.plan import Reason
from balancer.core.settings.routing import PdSettings, RoutingSettings
from indexer.core.types import RankId

RankOf = Callable[[str], RankId]
Ask = Callable[..., GenerateRequest]
View = Callable[..., PromptView]

PD_ALLOWED = PdSettings(allow_local_on_failure=True)


async def test_full_prefill_ranks_refuse_only_who_needs_them(
    bench: Any, ask: Ask, view: View, pd_fleet: Fleet
) -> None:
    """A short prompt is still served by the decode instance."""
    router = bench.build(RoutingSettings(max_requests_per_rank=2))
    held = [await router.route(pd_fleet, ask(), view(first=n * 10_000)) for n in (1, 2)]
    for route in held:  # the decode rank has room again, prefill legs still run
        route.decode_guard.__exit__(None, None, None)
    more = [await router.route(pd_fleet, ask(), view(first=n * 10_000)) for n in (3, 4)]
    for route in more:
        route.decode_guard.__exit__(None, None, None)

    short = await router.route(pd_fleet, ask(), view(100))
    assert short.plan.reason is Reason.SHORT_PROMPT
    with pytest.raises(OverloadedError):
        await router.route(pd_fleet, ask(), view(first=50_000))


async def test_a_pair_is_booked_on_both_ranks(
    bench: Any, rank: RankOf, ask: Ask, view: View, pd_fleet: Fleet
) -> None:
    """The prompt queues where it is prefilled; decode counts a request."""
    route = await bench.build().route(pd_fleet, ask(), view())
    assert route.plan.prefill is not None
    source = bench.ledger.load(route.plan.prefill.candidate.rank)
    target = bench.ledger.load(rank("d0"))

    assert route.plan.reason is Reason.REMOTE_PREFILL
    assert (source.requests, source.queued_tokens) == (1, 4000)
    assert (target.requests, target.queued_tokens) == (1, 0)


async def test_a_finished_prefill_leg_keeps_its_prediction(
    bench: Any, ask: Ask, view: View, pd_fleet: Fleet
) -> None:
    """Even if the decode leg fails afterwards."""
    router = bench.build()
    route = await router.route(pd_fleet, ask(), view())
    assert route.prefill_guard is not None
    route.prefill_guard.first_token()
    route.prefill_guard.__exit__(None, None, None)
    with pytest.raises(RuntimeError), route:
        raise RuntimeError

    again = await router.explain(pd_fleet, ask(), view())
    assert route.plan.prefill is not None
    assert again.prefill is not None
    assert again.prefill.candidate.rank == route.plan.prefill.candidate.rank
    assert again.prefill.candidate.predicted_tokens == 3984


async def test_a_failed_prefill_leg_moves_to_another_rank(
    bench: Any, rank: RankOf, ask: Ask, view: View, pd_fleet: Fleet
) -> None:
    """Once: attempts are limited to two, and the failed one's prediction is withdrawn."""
    router = bench.build(pd=PdSettings(prefill_attempts=2))
    with await router.route(pd_fleet, ask(), view()) as route:
        assert route.plan.prefill is not None
        first = route.plan.prefill.candidate.rank
        moved = router.replace_prefill(pd_fleet, route, RuntimeError())
        second = route.plan.prefill.candidate.rank
        loads = bench.ledger.load(first).requests, bench.ledger.load(second).requests
        moved_again = router.replace_prefill(pd_fleet, route, RuntimeError())

    assert moved
    assert {first, second} == {rank("p0"), rank("p1")}
    assert loads == (0, 1)
    assert bench.ledger.load(rank("d0")).requests == 0
    assert not moved_again
    assert bench.ledger.predicted_blocks(first, view().prompts[0].keys(16), 0) == 0


async def test_there_may_be_no_other_prefill_rank(
    bench: Any, rank: RankOf, ask: Ask, view: View, pair: Fleet, pd_fleet: Fleet
) -> None:
    """All others were tried, or the plan had no prefill leg to begin with."""
    router = bench.build(pd=PdSettings(prefill_attempts=9))
    route = await router.route(pd_fleet, ask(), view())
    whole = await router.route(pair, ask(), view())

    both = frozenset({rank("p0"), rank("p1")})
    assert not router.replace_prefill(pd_fleet, route, RuntimeError(), both)
    assert not router.replace_prefill(pair, whole, RuntimeError())


async def test_local_prefill_after_failures_has_to_be_allowed(
    bench: Any, ask: Ask, view: View, pd_fleet: Fleet
) -> None:
    """503 by default, else a plan that says so (F36)."""
    with pytest.raises(PrefillFailedError):
        await bench.build().route(pd_fleet, ask(), view(), prefill_failed=True)
    route = await bench.build(pd=PD_ALLOWED).route(pd_fleet, ask(), view(), prefill_failed=True)

    assert route.plan.prefill is None
    assert route.plan.reason is Reason.PREFILL_FAILED


async def test_several_prompts_are_matched_each(
    bench: Any, rank: RankOf, ask: Ask, view: View, pd_fleet: Fleet
) -> None:
    """Their overlaps add up, and the request isn't split."""
    bench.index.held_tokens = {rank("d0"): 160}
    prompts = (*view(1000).prompts, *view(1000, 5000).prompts)

    route = await bench.build(pd=PD_ALLOWED).route(
        pd_fleet, ask(), PromptView(prompts=prompts, source="ids")
    )

    assert route.plan.decode.candidate.overlap_tokens == 320
    assert route.plan.reason is Reason.NOT_SPLITTABLE


async def test_several_answers_are_not_split(
    bench: Any, ask: Ask, view: View, pd_fleet: Fleet
) -> None:
    """Four choices come from decode, none from a prefill leg (X2)."""
    route = await bench.build(pd=PD_ALLOWED).route(pd_fleet, ask(body={"n": 4}), view())

    assert route.plan.prefill is None
    assert route.plan.reason is Reason.NOT_SPLITTABLE


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        pytest.param(4000, Reason.REMOTE_PREFILL, id="carried"),
        pytest.param(4001, Reason.NOT_SPLITTABLE, id="one-over-a-block"),
    ],
)
async def test_what_a_connector_cant_carry_is_not_split(
    bench: Any, tokens: int, reason: Reason, ask: Ask, view: View, pd_fleet: Fleet
) -> None:
    """Each connector is asked; shared storage can't take this length."""
    fleet = Fleet(
        instances=tuple(replace(each, connector="example") for each in pd_fleet.instances)
    )

    route = await bench.build(known=connectors()).route(fleet, ask(), view(tokens))

    assert route.plan.reason is reason


async def test_who_takes_nothing_alone_gets_a_prefill_leg(
    bench: Any, ask: Ask, view: View, pd_fleet: Fleet
) -> None:
    """However short the prompt; without prefill instances nobody can serve it."""
    fleet = Fleet(
        instances=tuple(replace(each, connector="p2p_nccl") for each in pd_fleet.instances)
    )
    router = bench.build(known=connectors())

    route = await router.route(fleet, ask(), view(20))
    alone = Fleet(instances=fleet.instances[2:])

    assert route.plan.prefill is not None
    with pytest.raises(NoInstanceError):
        await router.route(alone, ask(), view(20))


async def test_adapters_and_salts_reach_the_connector(
    bench: Any, ask: Ask, view: View, pd_fleet: Fleet
) -> None:
    """Shared storage would mix tenants up; NIXL hands over anything."""
    router = bench.build(known=connectors())
    fleet = Fleet(
        instances=tuple(replace(each, connector="example") for each in pd_fleet.instances)
    )
    adapted = msgspec.structs.replace(ask(), lora="a")

    salted = await router.route(fleet, ask(body={"cache_salt": "s"}), view())
    with_adapter = await router.route(fleet, adapted, view(first=10_000))
    over_nixl = await router.route(pd_fleet, adapted, view(first=20_000))

    reasons = [each.plan.reason for each in (salted, with_adapter, over_nixl)]
    assert reasons == [Reason.NOT_SPLITTABLE, Reason.NOT_SPLITTABLE, Reason.REMOTE_PREFILL]


async def test_paired_ranks_are_planned_and_replaced_as_pairs(
    bench: Any, ask: Ask, view: View, pd_fleet: Fleet
) -> None:
    """MoRI-IO wants one rank's number on both legs."""
    fleet = Fleet(
        instances=tuple(
            replace(each, connector="moriio", ranks=(0, 1) if each.alias != "d0" else (1,))
            for each in pd_fleet.instances
        )
    )
    route = await bench.build(known=connectors()).route(fleet, ask(), view())
    assert route.plan.prefill is not None
    first = route.plan.prefill.candidate.rank
    assert bench.build(known=connectors()).replace_prefill(fleet, route, RuntimeError())

    second = route.plan.prefill.candidate.rank
    assert (first.rank, second.rank) == (1, 1)
    assert first.instance != second.instance
