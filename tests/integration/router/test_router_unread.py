"""Requests whose prompts nobody reads."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from balancer.core.errors import NoInstanceError
from balancer.core.fleet.snapshot import Fleet, Instance
from balancer.core.request import GenerateRequest
from balancer.core.routing.policies import named_policy
from balancer.core.routing.unread import UNREAD
from balancer.core.settings.routing import PdSettings, RoutingSettings
from indexer.core.types import InstanceId, RankId

RankOf = Callable[[str], RankId]
Ask = Callable[..., GenerateRequest]


class HoldsBack:
    """A vetting that always leaves one instance out."""

    def __init__(self, alias: str) -> None:
        self._alias = alias

    def usable(
        self,
        instances: Sequence[Instance],
        exclude: frozenset[RankId],  # noqa: ARG002 - the contract's signature
    ) -> Sequence[Instance]:
        return [each for each in instances if each.alias != self._alias]

    def reason(self, instance: InstanceId) -> str | None:  # noqa: ARG002 - likewise
        return "timeouts"


async def test_a_prompt_that_nobody_reads_is_neither_looked_up_nor_predicted(
    bench: Any, rank: RankOf, ask: Ask, pair: Fleet
) -> None:
    """Round robin takes turns and books the request; the index isn't asked."""
    router = bench.build(RoutingSettings(observe_share=0.0), policy="round_robin")
    assert not router.reads_prompt(pair, "m")

    routes = [await router.route(pair, ask(), UNREAD) for _ in range(4)]

    aliases = [each.plan.decode.candidate.instance.alias for each in routes]
    assert aliases[:2] == aliases[2:] != aliases[1:3]
    assert bench.lookups == []
    assert [bench.ledger.load(rank(each)).requests for each in "ab"] == [2, 2]
    assert routes[0].forecast("decode", loads=False) is None


async def test_prompts_are_read_for_who_depends_on_them(
    bench: Any, pair: Fleet, pd_fleet: Fleet
) -> None:
    """A policy that goes by the cache, two legs, and the share that is observed."""
    unobserved = RoutingSettings(observe_share=0.0)
    assert bench.build(unobserved).reads_prompt(pair, "m")
    assert bench.build(unobserved, policy="least_loaded").reads_prompt(pd_fleet, "m")
    assert not bench.build(unobserved, policy="least_loaded").reads_prompt(pair, "m")

    router = bench.build(RoutingSettings(observe_share=0.5), policy="round_robin")

    assert [router.reads_prompt(pair, "m") for _ in range(4)] == [False, True, False, True]


async def test_unread_request_passes_over_who_failed_it_and_who_is_held_back(
    bench: Any, rank: RankOf, ask: Ask, pair: Fleet
) -> None:
    """Exclusion and breakers hold without the prompt; the plan says who was held back."""
    router = bench.build(policy="round_robin", vetting=HoldsBack("a"))

    routes = [await router.route(pair, ask(), UNREAD) for _ in range(2)]

    assert [each.plan.decode.candidate.instance.alias for each in routes] == ["b", "b"]
    assert routes[0].plan.held_back == {"a": "timeouts"}
    with pytest.raises(NoInstanceError):
        await router.route(pair, ask(), UNREAD, exclude=frozenset({rank("b")}))


async def test_unread_request_that_meets_another_fleet_goes_by_what_is_known(
    bench: Any, ask: Ask, pair: Fleet, pd_fleet: Fleet
) -> None:
    """A retry may see prefill and decode instances where there were none, or another policy."""
    router = bench.build(RoutingSettings(observe_share=0.0), policy="round_robin")

    split = await router.route(pd_fleet, ask(), UNREAD)
    router.set_settings(RoutingSettings(), PdSettings(), named_policy("kvlb"))
    scored = await router.route(pair, ask(), UNREAD)

    assert split.plan.decode.candidate.instance.alias == "d0"
    assert scored.plan.decode.terms
