"""What a balancer knows of its index without a request, over a real Redis."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from random import Random
from time import monotonic
from typing import Any

import pytest
from structlog.testing import capture_logs

from balancer.core.fleet.snapshot import Fleet, Instance, Role
from balancer.core.load.local_ledger import LocalLedger
from balancer.core.request import Endpoint, GenerateRequest, PromptView
from balancer.core.routing.policies import named_policy
from balancer.core.settings.routing import RoutingSettings
from balancer.routing.index_watch import IndexWatch
from balancer.routing.router import Router
from indexer.core.hashing import Namespace
from indexer.core.index import IndexUnavailableError, PrefixMatch, Prompt, RankUpdate
from indexer.core.model_cards import ServedModels
from indexer.core.types import InstanceId, RankId, Trust
from indexer.redis_index.connection import RedisConnection
from indexer.redis_index.reader import RedisIndexReader
from indexer.redis_index.redis_index import RedisIndex
from indexer.redis_index.settings import RedisSettings

MODELS = ServedModels(base="m", aliases=frozenset({"m"}), adapters=frozenset(), cards=())
A, B = (RankId(InstanceId(f"http://{name}:8000"), 0) for name in "ab")
FLEET = Fleet(
    instances=tuple(
        Instance(id=rank.instance, alias=name, role=Role.MIXED, models=MODELS, healthy=True)
        for rank, name in ((A, "a"), (B, "b"))
    )
)
REQUEST = GenerateRequest(
    headers=(),
    base_model="m",
    request_id="r",
    endpoint=Endpoint.CHAT,
    body={},
    raw_body=b"{}",
    model="m",
    lora=None,
)
VIEW = PromptView(prompts=(Prompt(Namespace(model="m"), range(33)),))


class Clock:
    """Holds still, or takes `step_s` between two looks at it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.step_s = 0.0

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s


class Bench:
    """A router over the reader of one Redis, and its watch; `written` is the indexer's side."""

    def __init__(self, settings: RedisSettings, lookup_timeout_s: float) -> None:
        self.connection = RedisConnection(settings)
        self.written = RedisIndex(RedisConnection(settings))
        self.clock = Clock()
        self.reader_s = 0.0
        """By the clock of who reads."""
        reader = RedisIndexReader(self.connection, lambda: self.reader_s)
        self.router = Router(
            index=reader,
            ledger=LocalLedger(monotonic),
            policy=named_policy("kvlb"),
            settings=RoutingSettings(lookup_timeout_s=lookup_timeout_s),
            random=Random(1).random,  # noqa: S311 - a test's dice
            clock=monotonic,
        )
        self.watch = IndexWatch(
            index=reader, router=self.router, fleet=lambda: FLEET, clock=self.clock
        )

    async def write(self, rank: RankId, epoch: int = 1) -> None:
        update = RankUpdate(rank=rank, model="m", epoch=epoch, seq=0, changes=())
        await self.written.apply(update)

    async def request(self) -> None:
        with await self.router.route(FLEET, REQUEST, VIEW):
            pass

    async def look_for(self, seconds: int, *, beating: Sequence[RankId] = ()) -> None:
        """A look per second, while the indexer renews these ranks."""
        for _ in range(seconds):
            self.reader_s += 1.0
            for rank in beating:
                await self.written.renew(rank)
            await self.watch.look()

    def shown(self) -> Mapping[RankId, Mapping[str, Any]]:
        return self.router.known_ranks.facts()


@pytest.fixture
async def server(own_redis: Any) -> Any:
    server = own_redis()
    server.start()
    return server


@pytest.fixture
async def bench(server: Any) -> AsyncIterator[Bench]:
    bench = Bench(server.settings(), lookup_timeout_s=5.0)
    yield bench
    await bench.connection.aclose()
    with suppress(IndexUnavailableError):
        await bench.written.aclose()


async def test_look_tells_of_every_rank_without_a_request(bench: Bench) -> None:
    """Trust and epoch are there before anybody has asked for anything."""
    await bench.write(A, epoch=3)
    await bench.written.set_trust(A, Trust.DEGRADED)
    await bench.watch.look()

    assert bench.shown() == {A: {"trust": "degraded", "epoch": 3, "block_size": None}}


async def test_rank_that_the_index_lost_is_shown_no_more(bench: Bench, server: Any) -> None:
    """Nobody writes and Redis is emptied: nothing is known, and that is no problem of its own."""
    await bench.write(A)
    await bench.write(B)
    await bench.request()
    before = bench.shown()
    server.command("FLUSHALL")
    await bench.watch.look()

    assert before.keys() == {A, B}
    assert bench.shown() == {}
    assert bench.router.lookups.problem is None


async def test_rank_that_is_written_again_is_shown_again(bench: Bench, server: Any) -> None:
    """As what it is now."""
    await bench.write(A)
    await bench.watch.look()
    server.command("FLUSHALL")
    await bench.watch.look()
    await bench.write(A, epoch=2)
    await bench.watch.look()

    assert [each["epoch"] for each in bench.shown().values()] == [2]


async def test_problem_is_known_before_the_first_request(bench: Bench, server: Any) -> None:
    """Redis was down when the balancer came."""
    server.stop()
    await bench.watch.look()

    assert "is it running" in (bench.router.lookups.problem or "")


async def test_problem_ends_without_a_request(bench: Bench, server: Any) -> None:
    """A password was wanted for a while."""
    server.command("CONFIG", "SET", "requirepass", "secret")
    await bench.connection.aclose()
    await bench.request()
    told = bench.router.lookups.problem
    server.command("-a", "secret", "--no-auth-warning", "CONFIG", "SET", "requirepass", "")
    await bench.watch.look()

    assert "NOAUTH" in (told or "")
    assert bench.router.lookups.problem is None


async def test_problem_is_known_before_an_engine_has_told_its_model(
    bench: Bench, server: Any
) -> None:
    """There is no model to ask for, and still something to ask."""
    watch = IndexWatch(
        index=RedisIndexReader(bench.connection),
        router=bench.router,
        fleet=lambda: Fleet(instances=()),
        clock=bench.clock,
    )
    await watch.look()
    before = bench.router.lookups.problem
    server.stop()
    await watch.look()

    assert before is None
    assert bench.router.lookups.problem is not None


async def test_refusal_outlives_requests_that_heard_nothing_in_time(server: Any) -> None:
    """Their deadline passes first; what a look was told says more."""
    bench = Bench(server.settings(), lookup_timeout_s=1e-6)
    server.command("ACL", "SETUSER", "default", "-eval", "-evalsha", "-@scripting")
    with capture_logs() as logs:
        await bench.watch.look()
        await bench.request()
    await bench.connection.aclose()

    assert "NOPERM" in (bench.router.lookups.problem or "")
    assert [each["event"] for each in logs] == ["index_lookup_failed"]


async def test_late_answer_takes_no_problem_back(bench: Bench) -> None:
    """Requests would still go without."""
    await bench.watch.look()
    before = bench.router.lookups.problem
    bench.clock.step_s = 7.5
    await bench.watch.look()

    assert before is None
    assert "lookup_timeout_s" in (bench.router.lookups.problem or "")


async def test_strangers_are_not_counted_by_looks(bench: Bench) -> None:
    """The metric is of requests' lookups."""
    await bench.write(RankId(InstanceId("http://ghost:8000"), 0))
    await bench.watch.look()

    assert bench.router.unknown_ranks == 0


async def test_rank_whose_indexer_stopped_is_not_exact_and_comes_back(bench: Bench) -> None:
    """The other rank's goes on. What was written keeps its credit, marked, with the reason."""
    for rank in (A, B):
        await bench.write(rank)
    await bench.look_for(4, beating=(A, B))
    before = bench.router.belief(A), bench.router.index_problem, bench.router.silent_ranks
    await bench.look_for(4, beating=(B,))
    plan = await bench.router.explain(FLEET, REQUEST, VIEW)
    during = bench.router.belief(A), bench.router.belief(B), bench.router.silent_ranks
    problem = bench.router.index_problem
    await bench.look_for(2, beating=(A, B))

    assert before == ((Trust.EXACT, None), None, 0)
    assert during == ((Trust.DEGRADED, "indexer_silent"), (Trust.EXACT, None), 1)
    asked = {each.candidate.rank: each.candidate.trust_reason for each in plan.considered}
    assert asked == {A: "indexer_silent", B: None}
    assert "no indexer keeps what the index says of 1 rank(s) up to date" in (problem or "")
    assert bench.router.belief(A) == (Trust.EXACT, None)
    assert bench.router.index_problem is None


async def test_writes_are_signs_of_life(bench: Bench) -> None:
    """A rank with so much to tell that its heartbeat is late."""
    await bench.write(A)
    for epoch in range(2, 10):
        bench.reader_s += 1.0
        await bench.write(A, epoch)
        await bench.watch.look()

    assert bench.router.belief(A) == (Trust.EXACT, None)


async def test_rank_that_another_indexer_took_over_is_exact(bench: Bench) -> None:
    """Whoever writes it."""
    await bench.write(A)
    await bench.look_for(5)
    before = bench.router.belief(A)
    heir = RedisIndex(RedisConnection(bench.connection.settings))
    await heir.restore(A, "m")
    await heir.apply(RankUpdate(rank=A, model="m", epoch=2, seq=0, changes=()))
    await bench.look_for(1)
    await heir.aclose()

    assert before == (Trust.DEGRADED, "indexer_silent")
    assert bench.router.belief(A) == (Trust.EXACT, None)


async def test_lost_rank_is_silent_no_more(bench: Bench, server: Any) -> None:
    """Its lease ended: there is nothing left to be kept up."""
    await bench.write(A)
    await bench.look_for(5)
    before = bench.router.silent_ranks
    server.command("FLUSHALL")
    await bench.look_for(2)

    assert before == 1
    assert bench.router.silent_ranks == 0
    assert bench.router.index_problem is None


async def test_silence_is_a_problem() -> None:
    """Nothing came within the look's own deadline."""
    silent = SilentIndex()
    router = Router(
        index=silent,
        ledger=LocalLedger(monotonic),
        policy=named_policy("kvlb"),
        settings=RoutingSettings(),
        random=Random(1).random,  # noqa: S311 - a test's dice
        clock=monotonic,
    )
    await IndexWatch(index=silent, router=router, fleet=lambda: FLEET, clock=monotonic).look()

    assert router.lookups.problem == "the index doesn't answer"


class SilentIndex:
    """Its deadline has passed before it begins."""

    async def match(self, prompt: Prompt) -> dict[RankId, PrefixMatch]:  # noqa: ARG002 - as asked
        raise TimeoutError
