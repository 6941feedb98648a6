"""The router on a real event loop: deadlines, booking, routes, replacement of a prefill leg."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from time import monotonic
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from balancer.connectors.available import connectors
from balancer.connectors.contract import Connector
from balancer.core.errors import (
    ModelNotFoundError,
    NoInstanceError,
    OverloadedError,
    PrefillFailedError,
)
from balancer.core.fleet.snapshot import Fleet, Instance, Role
from balancer.core.load.ledger import Learning
from balancer.core.load.local_ledger import LocalLedger
from balancer.core.reliability.vetting import Vetting
from balancer.core.request import Endpoint, GenerateRequest, PromptView
from balancer.core.routing.plan import Reason
from balancer.core.routing.policies import named_policy
from balancer.core.routing.unread import UNREAD
from balancer.core.settings.routing import PdSettings, RoutingSettings
from balancer.routing.router import Router
from indexer.core.hashing import Namespace
from indexer.core.index import IndexUnavailableError, PrefixMatch, Prompt
from indexer.core.model_cards import ServedModels
from indexer.core.types import InstanceId, RankId, Tier, Trust

MODELS = ServedModels(base="m", aliases=frozenset({"m"}), adapters=frozenset(), cards=())


@dataclass(slots=True)
class ScriptedIndex:
    """Answers what it was told, as slowly or badly as it was told."""

    held_tokens: dict[RankId, int] = field(default_factory=dict)
    block_size: int | None = 16
    epochs: dict[RankId, int] = field(default_factory=dict)
    trust: Trust = Trust.EXACT
    delay_s: float = 0.0
    error: Exception | None = None

    async def match(self, prompt: Prompt) -> dict[RankId, PrefixMatch]:
        await asyncio.sleep(self.delay_s)
        if self.error:
            raise self.error
        return {
            rank: PrefixMatch(
                tokens_by_tier={Tier.GPU: min(tokens, prompt.tokens - 1)},
                block_size=self.block_size,
                trust=self.trust,
                epoch=self.epochs.get(rank, 1),
            )
            for rank, tokens in self.held_tokens.items()
        }


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


@dataclass(slots=True)
class Bench:
    """A router with its surroundings in reach."""

    index: ScriptedIndex
    ledger: LocalLedger
    lookups: list[str]
    build: Callable[..., Router]


@pytest.fixture
def bench() -> Bench:
    index, ledger, lookups = ScriptedIndex(), LocalLedger(monotonic), []

    def build(
        routing: RoutingSettings | None = None,
        pd: PdSettings | None = None,
        policy: Any = "kvlb",
        known: Mapping[str, Connector] | None = None,
        ledger: LocalLedger = ledger,
        index: ScriptedIndex = index,
        vetting: Vetting | None = None,
    ) -> Router:
        return Router(
            index=index,
            ledger=ledger,
            policy=named_policy(policy),
            settings=routing or RoutingSettings(),
            pd=pd,
            connectors=known,
            random=Random(1).random,  # noqa: S311 - a test's dice
            clock=monotonic,
            on_lookup=lambda outcome, _: lookups.append(outcome),
            vetting=vetting,
        )

    return Bench(index, ledger, lookups, build)


def instance(alias: str, role: Role = Role.MIXED) -> Instance:
    return Instance(
        id=InstanceId(f"http://{alias}:8000"),
        alias=alias,
        role=role,
        models=MODELS,
        connector="none" if role is Role.MIXED else "nixl",
        healthy=True,
    )


def rank(alias: str) -> RankId:
    return RankId(InstanceId(f"http://{alias}:8000"), 0)


PAIR = Fleet(instances=(instance("a"), instance("b")))
PD = Fleet(
    instances=(
        instance("p0", Role.PREFILL),
        instance("p1", Role.PREFILL),
        instance("d0", Role.DECODE),
    )
)
PD_ALLOWED = PdSettings(allow_local_on_failure=True)


def request(model: str = "m", body: Mapping[str, Any] | None = None) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        endpoint=Endpoint.CHAT,
        body={"stream": True, **(body or {})},
        raw_body=b"{}",
        headers=(),
        model=model,
        base_model=model,
        lora=None,
    )


def view(tokens: int = 4000, first: int = 0) -> PromptView:
    prompt = Prompt(Namespace(model="m"), range(first, first + tokens))
    return PromptView(prompts=(prompt,), source="ids")


async def test_the_rank_that_holds_the_prompt_is_chosen(bench: Bench) -> None:
    """The index was asked, and its answer decided."""
    bench.index.held_tokens = {rank("a"): 0, rank("b"): 3200}

    route = await bench.build().route(PAIR, request(), view())

    assert route.plan.decode.candidate.rank == rank("b")
    assert route.plan.decode.candidate.overlap_tokens == 3200
    assert bench.lookups == ["ok"]


async def test_what_the_index_promised_of_each_leg_is_told(bench: Bench) -> None:
    """Of the rank that gets it; a leg that takes blocks of another engine says nothing of it."""
    bench.index.held_tokens = {rank("a"): 0, rank("b"): 3200}
    route = await bench.build().route(PAIR, request(), view())

    own, loading = (route.forecast("whole", loads=loads) for loads in (False, True))

    assert own is not None
    assert loading is not None
    assert own.rank == rank("b")
    assert own.match is not None
    assert (own.match.tokens, own.incomparable) == (3200, None)
    assert loading.incomparable == "after_transfer"


@pytest.mark.parametrize(
    ("capacity_tokens", "others", "still_tokens"), [(8000, 1, 0), (8000, 0, 3984), (None, 9, 3984)]
)
async def test_half_a_cache_of_new_prompts_ends_what_was_predicted(
    bench: Bench, capacity_tokens: int | None, others: int, still_tokens: int
) -> None:
    """A prompt that went to a small rank may have been computed, told of, and pushed out again."""
    bench.index.held_tokens = {rank("a"): 0}
    tight = replace(instance("a"), rank_cache_tokens=capacity_tokens)
    fleet, router = Fleet(instances=(tight,)), bench.build()
    for number in range(1 + others):
        with await router.route(fleet, request(), view(first=10_000 * number)):
            pass

    plan = await router.explain(fleet, request(), view())

    assert plan.decode.candidate.predicted_tokens == still_tokens


async def test_a_route_is_booked_until_it_ends(bench: Bench) -> None:
    """At once, before anyone enters it; afterwards only its prediction stays."""
    router = bench.build()
    route = await router.route(PAIR, request(), view())
    chosen = route.plan.decode.candidate.rank
    booked = bench.ledger.load(chosen)
    with route:
        route.decode_guard.first_token()
        decoding = bench.ledger.load(chosen).decoding

    assert (booked.requests, booked.queued_tokens, decoding) == (1, 4000, 1)
    assert bench.ledger.load(chosen).requests == 0
    again = await router.explain(PAIR, request(), view())
    assert again.decode.candidate.predicted_tokens == 3984


async def test_an_exception_withdraws_the_prediction(bench: Bench) -> None:
    """Nobody holds what a failed leg was to compute (F19)."""
    router = bench.build()
    route = await router.route(PAIR, request(), view())
    with pytest.raises(RuntimeError), route:
        raise RuntimeError

    plan = await router.explain(PAIR, request(), view())
    assert [each.candidate.predicted_tokens for each in plan.considered] == [0, 0]


async def test_a_plan_tells_that_rates_are_unknown(bench: Bench) -> None:
    """And how much has been seen of them: of a fleet that has just started, nothing."""
    plan = await bench.build().explain(PD, request(), view(1000))

    assert plan.learning == Learning(prefills=0, hand_overs=0, needed=3)


async def test_explaining_books_nothing(bench: Bench) -> None:
    """And takes no turn."""
    router = bench.build(policy="round_robin")
    explained = [await router.explain(PAIR, request(), view()) for _ in range(3)]

    assert all(bench.ledger.load(rank(alias)).requests == 0 for alias in "ab")
    assert len({each.reason for each in explained}) == 1


async def test_siblings_at_once_land_together(bench: Bench) -> None:
    """Eight concurrent lookups, each answered before any prompt is computed (F19)."""
    bench.index.delay_s = 0.001
    router = bench.build(RoutingSettings(lookup_timeout_s=5))
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(router.route(PAIR, request(body={"max_tokens": 1}), view()))
            for _ in range(8)
        ]

    assert len({task.result().plan.decode.candidate.rank for task in tasks}) == 1


async def test_a_slow_index_costs_the_overlap_not_the_request(bench: Bench) -> None:
    """Routed by load within the deadline, and counted."""
    bench.index.held_tokens = {rank("b"): 3200}
    bench.index.delay_s = 30
    started_s = monotonic()

    route = await bench.build().route(PAIR, request(), view())

    assert monotonic() - started_s < 5
    assert route.plan.decode.candidate.overlap_tokens == 0
    assert bench.lookups == ["timeout"]


async def test_a_failing_index_is_logged_once_per_outage(bench: Bench) -> None:
    """Every lookup is counted; the log gets the first, with no prompt in it."""
    router = bench.build()
    bench.index.error = ValueError("a secret")
    with capture_logs() as logs:
        for _ in range(3):
            await router.route(PAIR, request(), view())
        bench.index.error = None
        await router.route(PAIR, request(), view())

    assert bench.lookups == ["failed", "failed", "failed", "ok"]
    assert logs == [{"event": "index_lookup_failed", "error": "ValueError", "log_level": "warning"}]


async def test_a_failing_index_is_told_in_its_own_words(bench: Bench) -> None:
    """What it refuses, in the log and for `/status`, until a lookup goes well again."""
    router = bench.build()
    bench.index.error = IndexUnavailableError("Redis refuses (WRONGPASS): change it")
    with capture_logs() as logs:
        await router.route(PAIR, request(), view())
    told = router.lookup_problem
    bench.index.error = None
    await router.route(PAIR, request(), view())

    assert told == "Redis refuses (WRONGPASS): change it"
    assert [each["error"] for each in logs] == [told]
    assert router.lookup_problem is None


async def test_a_flapping_index_is_logged_now_and_then(bench: Bench) -> None:
    """However often it comes back in between."""
    router = bench.build()
    with capture_logs() as logs:
        for _ in range(5):
            bench.index.error = IndexUnavailableError("gone")
            await router.route(PAIR, request(), view())
            bench.index.error = None
            await router.route(PAIR, request(), view())

    assert [each["event"] for each in logs] == ["index_lookup_failed"]


async def test_without_tokens_the_index_is_not_asked(bench: Bench) -> None:
    """Load decides, and the plan names no tokens."""
    bench.index.error = AssertionError("asked")
    route = await bench.build().route(PAIR, request(), PromptView(unscorable="timeout"))

    assert route.plan.prompt_tokens is None
    assert bench.lookups == ["skipped"]


async def test_a_block_size_is_remembered_while_the_index_is_silent(bench: Bench) -> None:
    """Predictions go on in the rank's own block size."""
    bench.index.held_tokens = {rank("a"): 0, rank("b"): 0}
    bench.index.block_size = 128
    router = bench.build()
    first = await router.route(PAIR, request(), view(1000))
    first.decode_guard.first_token()
    bench.index.error = OSError()

    second = await router.explain(PAIR, request(), view(1000))

    assert second.decode.candidate.rank == first.plan.decode.candidate.rank
    assert second.decode.candidate.predicted_tokens == 896
    assert second.decode.candidate.block_size == 128


async def test_ranks_the_fleet_does_not_have_are_counted_and_ignored(bench: Bench) -> None:
    """A ghost in the index gets no traffic; a rank that left is forgotten (F27)."""
    bench.index.held_tokens = {rank("ghost"): 4000, rank("a"): 16, rank("b"): 0}
    router = bench.build()
    route = await router.route(PAIR, request(), view())
    left = await router.route(Fleet(instances=(instance("b"),)), request(), view())

    assert route.plan.decode.candidate.rank == rank("a")
    assert left.plan.decode.candidate.rank == rank("b")
    assert router.unknown_ranks == 1 + 2


@pytest.mark.parametrize(
    ("trust", "held_later"),
    [(Trust.EXACT, False), (Trust.APPROXIMATE, True)],
    ids=["events-tell", "no-events"],
)
async def test_belief_depends_on_events(bench: Bench, trust: Trust, held_later: bool) -> None:
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
    with await router.route(alone, request(), view()):
        pass
    now_s[0] += 5

    plan = await router.explain(alone, request(), view())
    assert (plan.decode.candidate.predicted_tokens > 0) is held_later


async def test_restarted_rank_loses_its_predictions_at_once(bench: Bench) -> None:
    """Its cache is empty; what it was sent before counts for nothing, but is still in flight."""
    bench.index.held_tokens = {rank("a"): 0, rank("b"): 0}
    alone = Fleet(instances=(instance("a"),))
    router = bench.build()
    with await router.route(alone, request(), view()):
        before = await router.explain(alone, request(), view())
        bench.index.epochs[rank("a")] = 2
        after = await router.explain(alone, request(), view())
        in_flight = bench.ledger.load(rank("a")).requests

    assert before.decode.candidate.predicted_tokens > 0
    assert after.decode.candidate.predicted_tokens == 0
    assert in_flight == 1


async def test_same_epoch_keeps_predictions(bench: Bench) -> None:
    """A lookup that tells nothing new changes nothing."""
    bench.index.held_tokens = {rank("a"): 0}
    alone = Fleet(instances=(instance("a"),))
    router = bench.build()
    with await router.route(alone, request(), view()):
        await router.explain(alone, request(), view())
        plan = await router.explain(alone, request(), view())

    assert plan.decode.candidate.predicted_tokens > 0


@pytest.mark.parametrize("fault", ["nothing-stored", "lookup-fails"])
async def test_rank_with_events_is_believed_for_no_longer_than_one(
    bench: Bench, fault: str
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
        await router.explain(alone, request(), view())
        bench.index.error = OSError()
    with await router.route(alone, request(), view()) as route:
        trust = route.plan.decode.candidate.trust
    now_s[0] += 5

    plan = await router.explain(alone, request(), view())
    assert trust is Trust.EXACT
    assert plan.decode.candidate.predicted_tokens == 0


async def test_excluded_ranks_are_not_tried_again(bench: Bench) -> None:
    """Nobody left is an error of its own."""
    router = bench.build()
    route = await router.route(PAIR, request(), view(), exclude=frozenset({rank("a")}))

    assert route.plan.decode.candidate.rank == rank("b")
    with pytest.raises(NoInstanceError):
        await router.route(PAIR, request(), view(), exclude=frozenset({rank("a"), rank("b")}))


async def test_an_unknown_model_is_the_clients_fault(bench: Bench) -> None:
    """404, not 503 (F59)."""
    with pytest.raises(ModelNotFoundError):
        await bench.build().route(PAIR, request("nope"), view())


async def test_a_full_fleet_is_overloaded(bench: Bench) -> None:
    """Two ranks, a limit of one each: the third request is told to come back (F26)."""
    router = bench.build(RoutingSettings(max_requests_per_rank=1))
    for _ in range(2):
        await router.route(PAIR, request(), view())

    with pytest.raises(OverloadedError):
        await router.route(PAIR, request(), view())


async def test_full_prefill_ranks_refuse_only_who_needs_them(bench: Bench) -> None:
    """A short prompt is still served by the decode instance."""
    router = bench.build(RoutingSettings(max_requests_per_rank=2))
    held = [await router.route(PD, request(), view(first=n * 10_000)) for n in (1, 2)]
    for route in held:  # the decode rank has room again, prefill legs still run
        route.decode_guard.__exit__(None, None, None)
    more = [await router.route(PD, request(), view(first=n * 10_000)) for n in (3, 4)]
    for route in more:
        route.decode_guard.__exit__(None, None, None)

    short = await router.route(PD, request(), view(100))
    assert short.plan.reason is Reason.SHORT_PROMPT
    with pytest.raises(OverloadedError):
        await router.route(PD, request(), view(first=50_000))


async def test_a_pair_is_booked_on_both_ranks(bench: Bench) -> None:
    """The prompt queues where it is prefilled; decode counts a request."""
    route = await bench.build().route(PD, request(), view())
    assert route.plan.prefill is not None
    source = bench.ledger.load(route.plan.prefill.candidate.rank)
    target = bench.ledger.load(rank("d0"))

    assert route.plan.reason is Reason.REMOTE_PREFILL
    assert (source.requests, source.queued_tokens) == (1, 4000)
    assert (target.requests, target.queued_tokens) == (1, 0)


async def test_a_finished_prefill_leg_keeps_its_prediction(bench: Bench) -> None:
    """Even if the decode leg fails afterwards."""
    router = bench.build()
    route = await router.route(PD, request(), view())
    assert route.prefill_guard is not None
    route.prefill_guard.first_token()
    route.prefill_guard.__exit__(None, None, None)
    with pytest.raises(RuntimeError), route:
        raise RuntimeError

    again = await router.explain(PD, request(), view())
    assert route.plan.prefill is not None
    assert again.prefill is not None
    assert again.prefill.candidate.rank == route.plan.prefill.candidate.rank
    assert again.prefill.candidate.predicted_tokens == 3984


async def test_a_failed_prefill_leg_moves_to_another_rank(bench: Bench) -> None:
    """Once: attempts are limited to two, and the failed one's prediction is withdrawn."""
    router = bench.build(pd=PdSettings(prefill_attempts=2))
    with await router.route(PD, request(), view()) as route:
        assert route.plan.prefill is not None
        first = route.plan.prefill.candidate.rank
        moved = router.replace_prefill(PD, route, RuntimeError())
        second = route.plan.prefill.candidate.rank
        loads = bench.ledger.load(first).requests, bench.ledger.load(second).requests
        moved_again = router.replace_prefill(PD, route, RuntimeError())

    assert moved
    assert {first, second} == {rank("p0"), rank("p1")}
    assert loads == (0, 1)
    assert bench.ledger.load(rank("d0")).requests == 0
    assert not moved_again
    assert bench.ledger.predicted_blocks(first, view().prompts[0].keys(16), 0) == 0


async def test_there_may_be_no_other_prefill_rank(bench: Bench) -> None:
    """All others were tried, or the plan had no prefill leg to begin with."""
    router = bench.build(pd=PdSettings(prefill_attempts=9))
    route = await router.route(PD, request(), view())
    whole = await router.route(PAIR, request(), view())

    both = frozenset({rank("p0"), rank("p1")})
    assert not router.replace_prefill(PD, route, RuntimeError(), both)
    assert not router.replace_prefill(PAIR, whole, RuntimeError())


async def test_local_prefill_after_failures_has_to_be_allowed(bench: Bench) -> None:
    """503 by default, else a plan that says so (F36)."""
    with pytest.raises(PrefillFailedError):
        await bench.build().route(PD, request(), view(), prefill_failed=True)
    route = await bench.build(pd=PD_ALLOWED).route(PD, request(), view(), prefill_failed=True)

    assert route.plan.prefill is None
    assert route.plan.reason is Reason.PREFILL_FAILED


async def test_several_prompts_are_matched_each(bench: Bench) -> None:
    """Their overlaps add up, and the request isn't split."""
    bench.index.held_tokens = {rank("d0"): 160}
    prompts = (*view(1000).prompts, *view(1000, 5000).prompts)

    route = await bench.build(pd=PD_ALLOWED).route(
        PD, request(), PromptView(prompts=prompts, source="ids")
    )

    assert route.plan.decode.candidate.overlap_tokens == 320
    assert route.plan.reason is Reason.NOT_SPLITTABLE


async def test_several_answers_are_not_split(bench: Bench) -> None:
    """Four choices come from decode, none from a prefill leg (X2)."""
    route = await bench.build(pd=PD_ALLOWED).route(PD, request(body={"n": 4}), view())

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
    bench: Bench, tokens: int, reason: Reason
) -> None:
    """Each connector is asked; shared storage can't take this length."""
    fleet = Fleet(instances=tuple(replace(each, connector="example") for each in PD.instances))

    route = await bench.build(known=connectors()).route(fleet, request(), view(tokens))

    assert route.plan.reason is reason


async def test_who_takes_nothing_alone_gets_a_prefill_leg(bench: Bench) -> None:
    """However short the prompt; without prefill instances nobody can serve it."""
    fleet = Fleet(instances=tuple(replace(each, connector="p2p_nccl") for each in PD.instances))
    router = bench.build(known=connectors())

    route = await router.route(fleet, request(), view(20))
    alone = Fleet(instances=fleet.instances[2:])

    assert route.plan.prefill is not None
    with pytest.raises(NoInstanceError):
        await router.route(alone, request(), view(20))


async def test_adapters_and_salts_reach_the_connector(bench: Bench) -> None:
    """Shared storage would mix tenants up; NIXL hands over anything."""
    router = bench.build(known=connectors())
    fleet = Fleet(instances=tuple(replace(each, connector="example") for each in PD.instances))
    adapted = msgspec.structs.replace(request(), lora="a")

    salted = await router.route(fleet, request(body={"cache_salt": "s"}), view())
    with_adapter = await router.route(fleet, adapted, view(first=10_000))
    over_nixl = await router.route(PD, adapted, view(first=20_000))

    reasons = [each.plan.reason for each in (salted, with_adapter, over_nixl)]
    assert reasons == [Reason.NOT_SPLITTABLE, Reason.NOT_SPLITTABLE, Reason.REMOTE_PREFILL]


async def test_paired_ranks_are_planned_and_replaced_as_pairs(bench: Bench) -> None:
    """MoRI-IO wants one rank's number on both legs."""
    fleet = Fleet(
        instances=tuple(
            replace(each, connector="moriio", ranks=(0, 1) if each.alias != "d0" else (1,))
            for each in PD.instances
        )
    )
    route = await bench.build(known=connectors()).route(fleet, request(), view())
    assert route.plan.prefill is not None
    first = route.plan.prefill.candidate.rank
    assert bench.build(known=connectors()).replace_prefill(fleet, route, RuntimeError())

    second = route.plan.prefill.candidate.rank
    assert (first.rank, second.rank) == (1, 1)
    assert first.instance != second.instance


@dataclass(slots=True)
class InstantIndex(ScriptedIndex):
    """Answers without ever waiting, as an index in memory does."""

    asked: int = 0

    async def match(self, prompt: Prompt) -> dict[RankId, PrefixMatch]:  # noqa: ARG002
        self.asked += 1
        return {}


MANY = PromptView(prompts=view().prompts * 5, source="ids")


async def test_others_get_a_turn_between_prompts(bench: Bench) -> None:
    """One client's many prompts don't hold up everybody's streams."""
    index = InstantIndex()
    turns: list[int] = []
    asyncio.get_running_loop().call_soon(lambda: turns.append(index.asked))

    await bench.build(index=index).route(PAIR, request(), MANY)

    assert turns == [1]
    assert index.asked == 5


async def test_deadline_ends_the_lookup_of_many_prompts(bench: Bench) -> None:
    """Even if no single lookup waits for anything."""
    index = InstantIndex()
    hurried = RoutingSettings(lookup_timeout_s=1e-9)

    await bench.build(hurried, index=index).route(PAIR, request(), MANY)

    assert bench.lookups == ["timeout"]
    assert index.asked < 5


async def test_nobody_has_to_listen_to_lookups(bench: Bench) -> None:
    """The callback is optional."""
    router = Router(
        index=bench.index,
        ledger=bench.ledger,
        policy=named_policy("kvlb"),
        settings=RoutingSettings(),
        random=lambda: 0.5,
        clock=monotonic,
    )

    plan = await router.explain(PAIR, request(), view())
    assert plan.prompt_tokens == 4000


async def test_a_prompt_that_nobody_reads_is_neither_looked_up_nor_predicted(bench: Bench) -> None:
    """Round robin takes turns and books the request; the index isn't asked."""
    router = bench.build(RoutingSettings(observe_share=0.0), policy="round_robin")
    assert not router.reads_prompt(PAIR, "m")

    routes = [await router.route(PAIR, request(), UNREAD) for _ in range(4)]

    aliases = [each.plan.decode.candidate.instance.alias for each in routes]
    assert aliases[:2] == aliases[2:] != aliases[1:3]
    assert bench.lookups == []
    assert [bench.ledger.load(rank(each)).requests for each in "ab"] == [2, 2]
    assert routes[0].forecast("decode", loads=False) is None


async def test_prompts_are_read_for_who_depends_on_them(bench: Bench) -> None:
    """A policy that goes by the cache, two legs, and the share that is observed."""
    unobserved = RoutingSettings(observe_share=0.0)
    assert bench.build(unobserved).reads_prompt(PAIR, "m")
    assert bench.build(unobserved, policy="least_loaded").reads_prompt(PD, "m")
    assert not bench.build(unobserved, policy="least_loaded").reads_prompt(PAIR, "m")

    router = bench.build(RoutingSettings(observe_share=0.5), policy="round_robin")

    assert [router.reads_prompt(PAIR, "m") for _ in range(4)] == [False, True, False, True]


async def test_unread_request_passes_over_who_failed_it_and_who_is_held_back(bench: Bench) -> None:
    """Exclusion and breakers hold without the prompt; the plan says who was held back."""
    router = bench.build(policy="round_robin", vetting=HoldsBack("a"))

    routes = [await router.route(PAIR, request(), UNREAD) for _ in range(2)]

    assert [each.plan.decode.candidate.instance.alias for each in routes] == ["b", "b"]
    assert routes[0].plan.held_back == {"a": "timeouts"}
    with pytest.raises(NoInstanceError):
        await router.route(PAIR, request(), UNREAD, exclude=frozenset({rank("b")}))


async def test_unread_request_that_meets_another_fleet_goes_by_what_is_known(bench: Bench) -> None:
    """A retry may see prefill and decode instances where there were none, or another policy."""
    router = bench.build(RoutingSettings(observe_share=0.0), policy="round_robin")

    split = await router.route(PD, request(), UNREAD)
    router.set_settings(RoutingSettings(), PdSettings(), named_policy("kvlb"))
    scored = await router.route(PAIR, request(), UNREAD)

    assert split.plan.decode.candidate.instance.alias == "d0"
    assert scored.plan.decode.terms
