"""Lookups of the index: slow, failing, many at once, or none at all."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any

import pytest
from structlog.testing import capture_logs

from balancer.core.fleet.snapshot import Fleet, Instance
from balancer.core.request import GenerateRequest, PromptView
from balancer.core.routing.policies import named_policy
from balancer.core.settings.routing import RoutingSettings
from balancer.routing.router import Router
from indexer.core.index import IndexUnavailableError, PrefixMatch, Prompt
from indexer.core.types import RankId, Trust

RankOf = Callable[[str], RankId]
InstanceOf = Callable[..., Instance]
Ask = Callable[..., GenerateRequest]
View = Callable[..., PromptView]


async def test_a_slow_index_costs_the_overlap_not_the_request(
    bench: Any, rank: RankOf, ask: Ask, view: View, pair: Fleet
) -> None:
    """Routed by load within the deadline, and counted."""
    bench.index.held_tokens = {rank("b"): 3200}
    bench.index.delay_s = 30
    started_s = monotonic()

    route = await bench.build().route(pair, ask(), view())

    assert monotonic() - started_s < 5
    assert route.plan.decode.candidate.overlap_tokens == 0
    assert bench.lookups == ["timeout"]


@pytest.mark.parametrize(
    ("broken", "reason"),
    [({"delay_s": 30}, "lookup_timeout"), ({"error": OSError()}, "lookup_failed")],
    ids=["slow", "broken"],
)
async def test_nothing_is_exact_while_lookups_fail(
    bench: Any,
    broken: Mapping[str, Any],
    reason: str,
    rank: RankOf,
    ask: Ask,
    view: View,
    pair: Fleet,
) -> None:
    """Neither for the request nor in `/status`, however exact the rank was; and back by itself."""
    bench.index.held_tokens = {rank("a"): 0, rank("b"): 0}
    router = bench.build()
    await router.explain(pair, ask(), view())
    before = router.belief(rank("a"))
    for name, value in broken.items():
        setattr(bench.index, name, value)
    plan = await router.explain(pair, ask(), view())
    during = router.belief(rank("a"))
    bench.index.delay_s, bench.index.error = 0, None
    again = await router.explain(pair, ask(), view())

    assert before == router.belief(rank("a")) == (Trust.EXACT, None)
    assert during == (Trust.LOAD_ONLY, reason)
    shown = plan.decode.candidate
    assert (shown.trust, shown.trust_reason) == (Trust.LOAD_ONLY, reason)
    assert again.decode.candidate.trust is Trust.EXACT


async def test_a_failing_index_is_logged_once_per_outage(
    bench: Any, ask: Ask, view: View, pair: Fleet
) -> None:
    """Every lookup is counted; the log gets the first, with no prompt in it."""
    router = bench.build()
    bench.index.error = ValueError("a secret")
    with capture_logs() as logs:
        for _ in range(3):
            await router.route(pair, ask(), view())
        bench.index.error = None
        await router.route(pair, ask(), view())

    assert bench.lookups == ["failed", "failed", "failed", "ok"]
    assert logs == [{"event": "index_lookup_failed", "error": "ValueError", "log_level": "warning"}]


async def test_a_failing_index_is_told_in_its_own_words(
    bench: Any, ask: Ask, view: View, pair: Fleet
) -> None:
    """What it refuses, in the log and for `/status`, until a lookup goes well again."""
    router = bench.build()
    bench.index.error = IndexUnavailableError("Redis refuses (WRONGPASS): change it")
    with capture_logs() as logs:
        await router.route(pair, ask(), view())
    told = router.lookups.problem
    bench.index.error = None
    await router.route(pair, ask(), view())

    assert told == "Redis refuses (WRONGPASS): change it"
    assert [each["error"] for each in logs] == [told]
    assert router.lookups.problem is None


async def test_a_flapping_index_is_logged_now_and_then(
    bench: Any, ask: Ask, view: View, pair: Fleet
) -> None:
    """However often it comes back in between."""
    router = bench.build()
    with capture_logs() as logs:
        for _ in range(5):
            bench.index.error = IndexUnavailableError("gone")
            await router.route(pair, ask(), view())
            bench.index.error = None
            await router.route(pair, ask(), view())

    assert [each["event"] for each in logs] == ["index_lookup_failed"]


async def test_without_tokens_the_index_is_not_asked(bench: Any, ask: Ask, pair: Fleet) -> None:
    """Load decides, and the plan names no tokens."""
    bench.index.error = AssertionError("asked")
    route = await bench.build().route(pair, ask(), PromptView(unscorable="timeout"))

    assert route.plan.prompt_tokens is None
    assert bench.lookups == ["skipped"]


async def test_a_block_size_is_remembered_while_the_index_is_silent(
    bench: Any, rank: RankOf, ask: Ask, view: View, pair: Fleet
) -> None:
    """Predictions go on in the rank's own block size."""
    bench.index.held_tokens = {rank("a"): 0, rank("b"): 0}
    bench.index.block_size = 128
    router = bench.build()
    first = await router.route(pair, ask(), view(1000))
    first.decode_guard.first_token()
    bench.index.error = OSError()

    second = await router.explain(pair, ask(), view(1000))

    assert second.decode.candidate.rank == first.plan.decode.candidate.rank
    assert second.decode.candidate.predicted_tokens == 896
    assert second.decode.candidate.block_size == 128


async def test_ranks_the_fleet_does_not_have_are_counted_and_ignored(
    bench: Any, rank: RankOf, instance: InstanceOf, ask: Ask, view: View, pair: Fleet
) -> None:
    """A ghost in the index gets no traffic; a rank that left is forgotten (F27)."""
    bench.index.held_tokens = {rank("ghost"): 4000, rank("a"): 16, rank("b"): 0}
    router = bench.build()
    route = await router.route(pair, ask(), view())
    left = await router.route(Fleet(instances=(instance("b"),)), ask(), view())

    assert route.plan.decode.candidate.rank == rank("a")
    assert left.plan.decode.candidate.rank == rank("b")
    assert router.unknown_ranks == 1 + 2


@dataclass(slots=True)
class InstantIndex:
    """Answers without ever waiting, as an index in memory does."""

    asked: int = 0

    async def match(self, prompt: Prompt) -> dict[RankId, PrefixMatch]:  # noqa: ARG002
        self.asked += 1
        return {}


@pytest.fixture
def many(view: View) -> PromptView:
    """Five prompts in one request."""
    return PromptView(prompts=view().prompts * 5, source="ids")


async def test_others_get_a_turn_between_prompts(
    bench: Any, ask: Ask, pair: Fleet, many: PromptView
) -> None:
    """One client's many prompts don't hold up everybody's streams."""
    index = InstantIndex()
    turns: list[int] = []
    asyncio.get_running_loop().call_soon(lambda: turns.append(index.asked))

    await bench.build(index=index).route(pair, ask(), many)

    assert turns == [1]
    assert index.asked == 5


async def test_deadline_ends_the_lookup_of_many_prompts(
    bench: Any, ask: Ask, pair: Fleet, many: PromptView
) -> None:
    """Even if no single lookup waits for anything."""
    index = InstantIndex()
    hurried = RoutingSettings(lookup_timeout_s=1e-9)

    await bench.build(hurried, index=index).route(pair, ask(), many)

    assert bench.lookups == ["timeout"]
    assert index.asked < 5


async def test_nobody_has_to_listen_to_lookups(
    bench: Any, ask: Ask, view: View, pair: Fleet
) -> None:
    """The callback is optional."""
    router = Router(
        index=bench.index,
        ledger=bench.ledger,
        policy=named_policy("kvlb"),
        settings=RoutingSettings(),
        random=lambda: 0.5,
        clock=monotonic,
    )

    plan = await router.explain(pair, ask(), view())
    assert plan.prompt_tokens == 4000
