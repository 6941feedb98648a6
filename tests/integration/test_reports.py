"""Reports on their way from a balancer to the rank they are about, over every channel."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from balancer.core.record import LegRecord
from balancer.core.routing.forecast import Forecast
from balancer.routing.reporting import Reporting
from indexer.config import InstanceSource
from indexer.core.hashing import Namespace
from indexer.core.index import (
    BlockIndexError,
    IndexFullError,
    IndexUnavailableError,
    PrefixMatch,
    Prompt,
)
from indexer.core.reports import CacheReport, RankTally, Report
from indexer.core.types import BlockKey, InstanceId, RankId, Tier, Trust
from indexer.local_reports import LocalReports
from indexer.memory_index import MemoryIndex
from indexer.redis_index.connection import RedisConnection
from indexer.redis_index.keys import model_keys
from indexer.redis_index.redis_index import RedisIndex
from indexer.redis_index.reports import RedisReports
from indexer.service import IndexerService

SIZE = 4
E0 = "http://e0:8000"
R0 = RankId(InstanceId(E0), 0)
ELSEWHERE = RankId(InstanceId("http://nowhere:8000"), 0)
PROMPT = Prompt(Namespace(model="tiny"), range(100 * SIZE + 1))


def contradiction(
    block: int = 0, *, rank: RankId = R0, epoch: int = 1, age_s: float = 0.0
) -> CacheReport:
    """The engine lacked a block that was promised, and three more below it."""
    return CacheReport(
        rank=rank,
        epoch=epoch,
        age_s=age_s,
        block_size=SIZE,
        predicted_tokens=(block + 4) * SIZE,
        cached_tokens=block * SIZE,
        key=PROMPT.keys(SIZE)[block],
    )


def unseen(block: int, epoch: int) -> CacheReport:
    report = contradiction(block, epoch=epoch)
    return msgspec.structs.replace(report, predicted_tokens=0, cached_tokens=(block + 1) * SIZE)


Channel = LocalReports | RedisReports


@pytest.fixture(params=["local", "redis"])
async def channel(request: pytest.FixtureRequest, redis_server: Any) -> AsyncIterator[Channel]:
    """Both ends of each way there is."""
    if request.param == "local":
        yield LocalReports()
        return
    connection = RedisConnection(redis_server.settings())
    yield RedisReports(connection)
    await connection.aclose()


async def test_reports_come_once_in_order_and_by_model(channel: Channel) -> None:
    """Whatever kind they are of, and older by their wait."""
    sent: list[Report] = [contradiction(3), RankTally(rank=R0, epoch=5, agreed=2, age_s=1.5)]
    await channel.send("tiny", sent)
    await channel.send("tiny", [contradiction(4)])
    await channel.send("other", [contradiction(5)])
    await asyncio.sleep(0.02)

    taken = await channel.take("tiny")

    assert [msgspec.structs.replace(each, age_s=0.0) for each in taken] == [
        msgspec.structs.replace(each, age_s=0.0) for each in [*sent, contradiction(4)]
    ]
    assert 0.015 < taken[0].age_s < 5
    assert 1.515 < taken[1].age_s < 6
    assert list(await channel.take("tiny")) == []
    assert len(await channel.take("other")) == 1


async def test_waiting_ends_when_something_may_have_come(channel: Channel) -> None:
    """And after a while anyway."""
    async with asyncio.timeout(20):
        await channel.wait()
        await channel.send("tiny", [contradiction()])
        await channel.wait()


async def test_local_reports_are_bounded() -> None:
    """Those for which there is no room are lost, and whoever sends them hears of it."""
    channel = LocalReports()
    await channel.send("tiny", [contradiction()] * 4096)

    with pytest.raises(IndexFullError):
        await channel.send("tiny", [contradiction()])
    for number in range(255):
        await channel.send(f"model-{number}", [contradiction()])
    with pytest.raises(IndexFullError):
        await channel.send("one too many", [contradiction()])

    assert len(await channel.take("tiny")) == 4096


async def test_reports_in_redis_are_bounded_and_leave_by_themselves(redis_server: Any) -> None:
    """An indexer that is gone takes none; a balancer goes on."""
    settings = redis_server.settings()
    connection = RedisConnection(settings)
    channel = RedisReports(connection)
    for number in range(1100):
        await channel.send("tiny", [contradiction(number % 90)])
    key = model_keys(settings.prefix, "tiny").reports

    assert redis_server.command("LLEN", key) == "1024"
    assert 0 < int(redis_server.command("PTTL", key)) <= 10_000

    taken = await channel.take("tiny")
    assert isinstance(taken[0], CacheReport)
    assert taken[0].key == contradiction(76).key
    await connection.aclose()


async def test_what_another_version_wrote_is_passed_over(redis_server: Any) -> None:
    """One message, not those beside it."""
    settings = redis_server.settings()
    connection = RedisConnection(settings)
    channel = RedisReports(connection)
    key = model_keys(settings.prefix, "tiny").reports
    for junk in ("junk", "123 junk", ""):
        redis_server.command("RPUSH", key, junk)
    await channel.send("tiny", [contradiction()])

    assert len(await channel.take("tiny")) == 1
    await connection.aclose()


async def test_redis_that_is_down_loses_reports_and_nothing_else(own_redis: Any) -> None:
    """Both ends hear of it."""
    server = own_redis()
    connection = RedisConnection(server.settings())
    channel = RedisReports(connection)

    with pytest.raises(IndexUnavailableError):
        await channel.send("tiny", [contradiction()])
    with pytest.raises(IndexUnavailableError):
        await channel.take("tiny")
    await connection.aclose()


# The balancer's end.


@dataclass
class Sink:
    """Takes, or fails, as it was told."""

    error: Exception | None = None
    taken: list[tuple[str, Report]] = field(default_factory=list)
    attempts: int = 0

    async def send(self, model: str, reports: Any) -> None:
        self.attempts += 1
        if self.error is not None:
            raise self.error
        self.taken += [(model, report) for report in reports]


def forecast(blocks: int) -> Forecast:
    match = PrefixMatch(
        tokens_by_tier={Tier.GPU: blocks * SIZE}, block_size=SIZE, trust=Trust.EXACT, epoch=9
    )
    return Forecast(rank=R0, model="tiny", matched_s=100.0, prompt=PROMPT, match=match)


def leg(cached_tokens: int) -> LegRecord:
    return LegRecord(
        kind="decode", alias="e0", overlap_tokens=0, started_s=0.0, cached_tokens=cached_tokens
    )


@asynccontextmanager
async def reporting(
    sink: Sink | None, outcomes: list[str] | None = None
) -> AsyncIterator[Reporting]:
    told = [] if outcomes is None else outcomes
    made = Reporting(sink, clock=lambda: 103.0, on_outcome=lambda _, outcome: told.append(outcome))
    async with asyncio.TaskGroup() as group:
        running = group.create_task(made.run())
        yield made
        running.cancel()


async def test_contradiction_is_sent_soon_and_agreement_with_it(
    eventually: Callable[..., Any],
) -> None:
    """With its age; every leg's outcome is counted on the spot."""
    sink, outcomes = Sink(), list[str]()
    agreeing, contradicting = leg(4 * SIZE), leg(0)
    async with reporting(sink, outcomes) as made:
        made.on_leg_end(forecast(4), agreeing)
        made.on_leg_end(forecast(4), contradicting)
        assert outcomes == [agreeing.outcome, contradicting.outcome] == ["exact", "over"]
        await eventually(lambda: sink.taken)

    assert [model for model, _ in sink.taken] == ["tiny", "tiny"]
    assert [report.age_s for _, report in sink.taken] == [3.0, 3.0]
    assert made.lost == 0


async def test_agreement_alone_is_sent_too(eventually: Callable[..., Any]) -> None:
    """It has time."""
    sink = Sink()
    async with reporting(sink) as made:
        made.on_leg_end(forecast(4), leg(4 * SIZE))
        await eventually(lambda: sink.taken)

    (_, tally) = sink.taken[0]
    assert isinstance(tally, RankTally)


@pytest.mark.parametrize("error", [IndexUnavailableError("down"), RuntimeError("a bug")])
async def test_sink_that_fails_costs_reports_only(
    eventually: Callable[..., Any], error: Exception
) -> None:
    """Counted; logged once per outage."""
    sink = Sink(error=error)
    with capture_logs() as logs:
        async with reporting(sink) as made:
            for attempt in (1, 2):
                made.on_leg_end(forecast(4), leg(0))
                await eventually(lambda wanted=attempt: sink.attempts == wanted)
            sink.error = None
            made.on_leg_end(forecast(4), leg(0))
            await eventually(lambda: sink.taken)

    assert made.lost == 2
    assert [entry["event"] for entry in logs] == ["reports_not_sent"]


async def test_without_a_sink_outcomes_are_counted_all_the_same() -> None:
    """Nothing is kept for anybody."""
    outcomes = list[str]()
    async with reporting(None, outcomes) as made:
        made.on_leg_end(forecast(4), leg(0))

    assert (outcomes, made.lost) == (["over"], 0)


# The indexer's end.


def stored(*hashes: int, parent: int | None = None, first: int = 0) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": list(range(first * SIZE, (first + len(hashes)) * SIZE)),
        "block_size": SIZE,
        "kv_cache_spec_kind": "full_attention",
    }


def source(publisher: Any) -> InstanceSource:
    return InstanceSource(
        url=E0, events=publisher.events, replay=publisher.replay, model="tiny", ranks=1
    )


@pytest.fixture(params=["memory", "redis"])
async def index(request: pytest.FixtureRequest, redis_server: Any) -> AsyncIterator[Any]:
    if request.param == "memory":
        yield MemoryIndex()
        return
    made = RedisIndex(RedisConnection(redis_server.settings()))
    yield made
    await made.aclose()


async def held(index: Any) -> int:
    found = await index.match(PROMPT)
    blocks: int = found[R0].tokens // SIZE
    return blocks


async def becomes(index: Any, blocks: int) -> None:
    async with asyncio.timeout(20):
        while True:
            if await held(index) == blocks:
                return
            await asyncio.sleep(0.005)


async def joined(service: IndexerService) -> int:
    """Wait until the rank is whole; return its epoch."""
    status = await service.until(R0, lambda now: now.trust is Trust.EXACT)
    return status.epoch


async def test_ghosts_leave_tables_index_and_rows(
    publishing: Any, indexing: Any, index: Any, eventually: Any
) -> None:
    """And what was computed instead stays; in Redis over a restart of the indexer, too."""
    channel = LocalReports()
    async with publishing() as engine:
        async with indexing(source(engine), index=index, reports=channel) as (service, _):
            await engine.subscribed()
            epoch = await joined(service)
            engine.publish(stored(1, 2, 3, 4), stored(3, 4, parent=2, first=2))
            await service.caught_up(R0, 0)
            await asyncio.sleep(0.15)  # longer than the time of the lookup is uncertain
            matched_s = monotonic()
            engine.publish(stored(3, parent=2, first=2))
            await service.caught_up(R0, 1)

            late_s = monotonic() - matched_s
            await channel.send("tiny", [contradiction(2, epoch=epoch, age_s=late_s)])
            status = await service.until(R0, lambda now: now.counts.contradictions["ghost"] == 1)

            await becomes(index, 3)  # Redis has it a little later than the tables
            assert status.counts.pruned_blocks == 4
            engine.publish({"type": "BlockRemoved", "block_hashes": [3], "medium": "GPU"})
            await service.caught_up(R0, 2)
            assert await held(index) == 2
        if isinstance(index, RedisIndex):
            async with indexing(source(engine), index=index) as (service, _):
                status = await service.until(R0, lambda now: now.trust is Trust.EXACT)
                assert (status.epoch_reason, await held(index)) == ("resumed", 2)


async def test_many_ghosts_leave_in_several_writes(
    publishing: Any, indexing: Any, index: Any
) -> None:
    """No write is long, and nothing else waits for all of them."""
    channel = LocalReports()
    async with (
        publishing() as engine,
        indexing(source(engine), index=index, reports=channel) as (service, _),
    ):
        await engine.subscribed()
        epoch = await joined(service)
        branches = [
            {**stored(*range(100 * each, 100 * each + 100), parent=1, first=each)}
            for each in range(1, 22)
        ]
        engine.publish(stored(1), *branches)
        await service.caught_up(R0, 0)
        await asyncio.sleep(0.15)  # longer than the time of the lookup is uncertain
        matched_s = monotonic()
        engine.publish(stored(1))
        await service.caught_up(R0, 1)

        late_s = monotonic() - matched_s
        await channel.send("tiny", [contradiction(0, epoch=epoch, age_s=late_s)])
        status = await service.until(R0, lambda now: now.counts.pruned_blocks >= 2101)

        assert (status.counts.pruned_blocks, status.held_blocks) == (2101, 1)


async def test_report_of_another_life_is_counted_and_weighs_nothing(
    publishing: Any, indexing: Any
) -> None:
    """The rank restarted, or was told anew, since the index was asked."""
    channel = LocalReports()
    async with (
        publishing() as engine,
        indexing(source(engine), reports=channel) as (service, _),
    ):
        await engine.subscribed()
        epoch = await joined(service)
        await channel.send("tiny", [contradiction(epoch=epoch - 1), contradiction(rank=ELSEWHERE)])
        await channel.send("tiny", [RankTally(rank=R0, epoch=epoch - 1, agreed=50)])

        status = await service.until(R0, lambda now: now.counts.contradictions["new_epoch"] == 1)

        assert status.counts.contradictions.total() == 1
        assert service.dropped_reports == {"unknown_rank": 1}


async def test_rebuild_while_a_report_waits_makes_it_void(publishing: Any, indexing: Any) -> None:
    """Three that were never told of have the rank told anew; the fourth was of the old life."""
    channel = LocalReports()
    async with (
        publishing() as engine,
        indexing(source(engine), reports=channel) as (service, _),
    ):
        await engine.subscribed()
        epoch = await joined(service)
        engine.publish(stored(1))
        await service.caught_up(R0, 0)
        await channel.send("tiny", [unseen(block, epoch) for block in (5, 6, 7)])

        status = await service.until(R0, lambda now: now.epoch_reason == "rebuilt")

        assert status.counts.contradictions["unseen"] == 3
        await channel.send("tiny", [unseen(8, epoch)])
        await service.until(R0, lambda now: now.counts.contradictions["new_epoch"] == 1)


async def test_drafting_engine_is_one_block_short_and_nothing_is_pruned(
    publishing: Any, indexing: Any
) -> None:
    """It computes the last block of every hit anew."""
    channel = LocalReports()
    async with (
        publishing() as engine,
        indexing(source(engine), reports=channel) as (service, index),
    ):
        await engine.subscribed()
        epoch = await joined(service)
        engine.publish(stored(1, 2))
        await service.caught_up(R0, 0)
        short = msgspec.structs.replace(
            contradiction(1, epoch=epoch), predicted_tokens=2 * SIZE, cached_tokens=SIZE
        )
        await channel.send("tiny", [short])

        await service.until(R0, lambda now: now.counts.contradictions["drafting_drops_block"] == 1)

        assert await held(index) == 2


async def test_too_many_reports_at_once_are_counted(publishing: Any, indexing: Any) -> None:
    """They would delay those of other ranks."""
    channel = LocalReports()
    async with (
        publishing() as engine,
        indexing(source(engine), reports=channel) as (service, _),
    ):
        await engine.subscribed()
        epoch = await joined(service)
        reports = [
            msgspec.structs.replace(unseen(1, epoch), key=BlockKey(number))
            for number in range(1030)
        ]
        await channel.send("tiny", reports)

        await service.until(R0, lambda now: now.counts.contradictions["overflown"] == 6)


@dataclass
class Source:
    """Fails as it was told, then goes on."""

    errors: list[Exception]
    taken: int = 0

    async def wait(self) -> None:
        await asyncio.sleep(0.005)

    async def take(self, model: str) -> list[Report]:
        assert model == "tiny"
        if self.errors:
            raise self.errors.pop(0)
        self.taken += 1
        return []


@pytest.mark.parametrize(
    ("error", "reason"),
    [(IndexUnavailableError("down"), "unavailable"), (BlockIndexError(), "unavailable")],
)
async def test_source_that_fails_is_asked_again(
    publishing: Any, indexing: Any, eventually: Any, error: Exception, reason: str
) -> None:
    """Counted."""
    channel = Source([error, error])
    async with (
        publishing() as engine,
        indexing(source(engine), reports=channel) as (service, _),
    ):
        await engine.subscribed()
        await eventually(lambda: channel.taken)

        assert service.dropped_reports == {reason: 2}


async def test_bug_in_reports_costs_a_pause(
    publishing: Any, indexing: Any, eventually: Any
) -> None:
    """The ranks are followed on."""
    channel = Source([RuntimeError("a bug")])
    async with (
        publishing() as engine,
        indexing(source(engine), reports=channel) as (service, _),
    ):
        await engine.subscribed()
        await eventually(lambda: channel.taken)

        assert service.dropped_reports == {"bug": 1}
