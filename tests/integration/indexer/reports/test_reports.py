"""The indexer's end of reports: ghosts leave, and what proves nothing weighs nothing."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Any

import msgspec
import pytest

from indexer.config import InstanceSource
from indexer.core.index import BlockIndex, BlockIndexError, IndexUnavailableError
from indexer.core.reports import CacheReport, RankTally, Report, ReportSource
from indexer.core.types import BlockKey, InstanceId, RankId, Trust
from indexer.local_reports import LocalReports
from indexer.memory_index import MemoryIndex
from indexer.redis_index.connection import RedisConnection
from indexer.redis_index.redis_index import RedisIndex
from indexer.service import IndexerService

Contradiction = Callable[..., CacheReport]
Event = Callable[..., dict[str, Any]]
Held = Callable[..., Awaitable[int | None]]
Source = Callable[..., InstanceSource]
Reported = Callable[..., AbstractAsyncContextManager[tuple[Any, IndexerService, BlockIndex, int]]]

SIZE = 4
R0 = RankId(InstanceId("http://e0:8000"), 0)
ELSEWHERE = RankId(InstanceId("http://nowhere:8000"), 0)


@pytest.fixture
def unseen(contradiction: Contradiction) -> Contradiction:
    """The engine had a block more than was promised."""

    def report(block: int, epoch: int) -> CacheReport:
        told = contradiction(block, epoch=epoch)
        return msgspec.structs.replace(told, predicted_tokens=0, cached_tokens=(block + 1) * SIZE)

    return report


@pytest.fixture(params=["memory", "redis"])
async def index(request: pytest.FixtureRequest, redis_server: Any) -> AsyncIterator[Any]:
    if request.param == "memory":
        yield MemoryIndex()
        return
    made = RedisIndex(RedisConnection(redis_server.settings()))
    yield made
    await made.aclose()


@pytest.fixture
def reported(publishing: Any, indexing: Any, source: Source) -> Reported:
    """Run an engine and an indexer that hears reports of it, once the rank is whole.

    It comes with the index, and the epoch that reports are of.
    """

    @asynccontextmanager
    async def run(
        channel: ReportSource, index: BlockIndex | None = None
    ) -> AsyncIterator[tuple[Any, IndexerService, BlockIndex, int]]:
        async with (
            publishing() as engine,
            indexing(source(engine), index=index, reports=channel) as (service, used),
        ):
            await engine.subscribed()
            whole = await service.until(R0, lambda now: now.trust is Trust.EXACT)
            yield engine, service, used, whole.epoch

    return run


async def test_ghosts_leave_tables_index_and_rows(
    stored: Event,
    held: Held,
    source: Source,
    publishing: Any,
    indexing: Any,
    index: Any,
    contradiction: Contradiction,
) -> None:
    """And what was computed instead stays; in Redis over a restart of the indexer, too."""
    channel = LocalReports()
    async with publishing() as engine:
        async with indexing(source(engine), index=index, reports=channel) as (service, _):
            await engine.subscribed()
            epoch = (await service.until(R0, lambda now: now.trust is Trust.EXACT)).epoch
            engine.publish(stored(1, 2, 3, 4), stored(3, 4, parent=2, first=2))
            await service.caught_up(R0, 0)
            await asyncio.sleep(0.15)  # longer than the time of the lookup is uncertain
            matched_s = monotonic()
            engine.publish(stored(3, parent=2, first=2))
            await service.caught_up(R0, 1)

            late_s = monotonic() - matched_s
            await channel.send("tiny", [contradiction(2, epoch=epoch, age_s=late_s)])
            status = await service.until(R0, lambda now: now.counts.contradictions["ghost"] == 1)

            async with asyncio.timeout(20):
                while True:  # Redis has it a little later than the tables
                    if await held(index) == 3:
                        break
                    await asyncio.sleep(0.005)
            assert status.counts.pruned_blocks == 4
            engine.publish({"type": "BlockRemoved", "block_hashes": [3], "medium": "GPU"})
            await service.caught_up(R0, 2)
            assert await held(index) == 2
        if isinstance(index, RedisIndex):
            async with indexing(source(engine), index=index) as (service, _):
                status = await service.until(R0, lambda now: now.trust is Trust.EXACT)
                assert (status.epoch_reason, await held(index)) == ("resumed", 2)


async def test_many_ghosts_leave_in_several_writes(
    reported: Reported, stored: Event, index: Any, contradiction: Contradiction
) -> None:
    """No write is long, and nothing else waits for all of them."""
    channel = LocalReports()
    async with reported(channel, index) as (engine, service, _, epoch):
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
    reported: Reported, contradiction: Contradiction
) -> None:
    """The rank restarted, or was told anew, since the index was asked."""
    channel = LocalReports()
    async with reported(channel) as (_, service, _, epoch):
        await channel.send("tiny", [contradiction(epoch=epoch - 1), contradiction(rank=ELSEWHERE)])
        await channel.send("tiny", [RankTally(rank=R0, epoch=epoch - 1, agreed=50)])

        status = await service.until(R0, lambda now: now.counts.contradictions["new_epoch"] == 1)

        assert status.counts.contradictions.total() == 1
        assert service.dropped_reports == {"unknown_rank": 1}


async def test_rebuild_while_a_report_waits_makes_it_void(
    reported: Reported, stored: Event, unseen: Contradiction
) -> None:
    """Three that were never told of have the rank told anew; the fourth was of the old life."""
    channel = LocalReports()
    async with reported(channel) as (engine, service, _, epoch):
        engine.publish(stored(1))
        await service.caught_up(R0, 0)
        await channel.send("tiny", [unseen(block, epoch) for block in (5, 6, 7)])

        status = await service.until(R0, lambda now: now.epoch_reason == "rebuilt")

        assert status.counts.contradictions["unseen"] == 3
        await channel.send("tiny", [unseen(8, epoch)])
        await service.until(R0, lambda now: now.counts.contradictions["new_epoch"] == 1)


async def test_drafting_engine_is_one_block_short_and_nothing_is_pruned(
    reported: Reported, stored: Event, held: Held, contradiction: Contradiction
) -> None:
    """It computes the last block of every hit anew."""
    channel = LocalReports()
    async with reported(channel) as (engine, service, index, epoch):
        engine.publish(stored(1, 2))
        await service.caught_up(R0, 0)
        short = msgspec.structs.replace(
            contradiction(1, epoch=epoch), predicted_tokens=2 * SIZE, cached_tokens=SIZE
        )
        await channel.send("tiny", [short])

        await service.until(R0, lambda now: now.counts.contradictions["drafting_drops_block"] == 1)

        assert await held(index) == 2


async def test_too_many_reports_at_once_are_counted(
    reported: Reported, unseen: Contradiction
) -> None:
    """They would delay those of other ranks."""
    channel = LocalReports()
    async with reported(channel) as (_, service, _, epoch):
        reports = [
            msgspec.structs.replace(unseen(1, epoch), key=BlockKey(number))
            for number in range(1030)
        ]
        await channel.send("tiny", reports)

        await service.until(R0, lambda now: now.counts.contradictions["overflown"] == 6)


@dataclass
class FailingSource:
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
    reported: Reported, eventually: Any, error: Exception, reason: str
) -> None:
    """Counted."""
    channel = FailingSource([error, error])
    async with reported(channel) as (_, service, _, _):
        await eventually(lambda: channel.taken)

        assert service.dropped_reports == {reason: 2}


async def test_bug_in_reports_costs_a_pause(reported: Reported, eventually: Any) -> None:
    """The ranks are followed on."""
    channel = FailingSource([RuntimeError("a bug")])
    async with reported(channel) as (_, service, _, _):
        await eventually(lambda: channel.taken)

        assert service.dropped_reports == {"bug": 1}
