"""Weighs what finished legs say of one rank, prunes its tables, and tells its stream what is proved."""

import asyncio
from collections.abc import Callable, Iterable, Sequence

import structlog

from indexer.config import IndexerConfig
from indexer.core.contradictions import Cause, Weighed, weigh
from indexer.core.events import BlockRemoved
from indexer.core.rank_holdings import RankHoldings
from indexer.core.rank_status import RankCounts
from indexer.core.rebuild_schedule import RebuildSchedule
from indexer.core.reports import CacheReport, RankTally, Report
from indexer.core.throttle import Throttle
from indexer.core.witness import Evidence, Pending, RankWitness
from indexer.rank_doubts import RankDoubts
from indexer.rank_writer import RankWriter
from indexer.subscriber import RankSubscriber

_logger = structlog.get_logger(__name__)

_MOST_ROUNDS = 1000
"""For one report: a million ghosts."""
_REWRITE_S = 10.0
"""At the earliest, between two rewrites of an index that differs: it may have to be looked into."""


class RankJudge:
    """One per writer and subscriber of a rank."""

    def __init__(
        self,
        *,
        writer: RankWriter,
        subscriber: RankSubscriber,
        counts: RankCounts,
        config: IndexerConfig,
        clock: Callable[[], float],
    ) -> None:
        self._writer = writer
        self._subscriber = subscriber
        self._counts = counts
        self._silent_after_s = config.silent_after_s
        self._clock = clock
        self._throttle = Throttle(config.log_interval_s)
        self._witness = RankWitness(writer.blocks.epoch, config.silent_after_s)
        self._rewrites = RebuildSchedule(_REWRITE_S)
        self._doubts = RankDoubts(
            writer,
            clock=clock,
            is_being_told=lambda: subscriber.stream.replaying is not None,
        )

    def hear(self, report: Report) -> Iterable[Evidence]:
        """Take in one report; what it proves at once is for `tell`."""
        witness = self._present_witness()
        if report.epoch == witness.epoch:
            if isinstance(report, RankTally):
                self._doubts.present(report.agreed_keys)
            proved = witness.hear(report, self._clock())
            is_doubtful = isinstance(report, CacheReport) and self._subscriber.stream.replaying
            return [*proved, Evidence.CONTRADICTED] if is_doubtful else proved
        if isinstance(report, CacheReport):
            self._counts.contradictions[Cause.NEW_EPOCH] += 1
        return ()

    async def tell(self, proved: Iterable[Evidence]) -> None:
        """Have the stream draw its conclusions, or the index written anew."""
        for evidence in proved:
            if evidence is Evidence.INDEX_DIFFERS:
                self._doubt_index()
            else:
                if evidence is Evidence.AGREED:
                    self._doubts.end()
                await self._subscriber.on_evidence(evidence)

    def _doubt_index(self) -> None:
        now_s = self._clock()
        if not self._rewrites.wait_s(now_s):
            self._rewrites.asked(now_s)
            self._writer.keeper.doubt()

    async def tick(self) -> None:
        """Weigh what is due."""
        await self._apply_doubts()
        if not self._witness.is_waiting:
            return
        while (due := self._present_witness().take_due(self._clock())) is not None:
            await self._weigh(due)
            await asyncio.sleep(0)  # one pass over a large rank is enough for a turn
        witness = self._present_witness()
        await self.tell(witness.check_silence(self._clock(), self._writer.recent.newest_s))
        if witness.overflown:
            self._counts.contradictions["overflown"] += witness.overflown
            witness.overflown = 0

    async def _apply_doubts(self) -> None:
        if await self._doubts.apply():
            await self.tell([Evidence.DOUBTED])

    def _present_witness(self) -> RankWitness:
        epoch = self._writer.blocks.epoch
        if self._witness.epoch != epoch:
            self._witness = RankWitness(epoch, self._silent_after_s)
        return self._witness

    async def _weigh(self, due: Pending) -> None:
        witness = self._witness
        weighed = await self._prune_some(due)
        is_unwritten = self._writer.keeper.has_unwritten
        if witness.postpone(due, weighed.cause, self._clock(), is_unwritten=is_unwritten):
            return
        self._counts.contradictions[weighed.cause] += 1
        if weighed.copies and self._throttle.admits("pruned", self._clock()):
            _logger.warning("blocks_pruned", **self._writer.names(), copies=weighed.copies)
        for _ in range(_MOST_ROUNDS):
            if weighed.is_all:
                break
            await asyncio.sleep(0)
            weighed = await self._prune_some(due)
        await self._apply_doubts()
        await self.tell(witness.judge(weighed.cause))

    async def _prune_some(self, due: Pending) -> Weighed:
        """Weigh, and take out what that finds: no other batch comes in between."""
        writer, report = self._writer, due.report
        blocks = writer.blocks
        weighed = Weighed(cause=Cause.NEW_EPOCH)

        def find() -> Sequence[BlockRemoved]:
            nonlocal weighed
            if report.epoch != blocks.epoch:
                return ()
            if self._witness.is_drafting(report):
                weighed = Weighed(cause=Cause.DRAFTING)
            else:
                weighed = weigh(report, due.matched_s, RankHoldings(blocks), writer.recent)
            if weighed.cause is Cause.GHOST:
                self._doubts.missing(report.key)
            elif weighed.cause is Cause.DOUBTED:
                self._doubts.present([report.key])
            return weighed.events

        await writer.keeper.prune(blocks, find)
        writer.recent.remove(self._clock(), weighed.events)
        self._counts.pruned_blocks += weighed.copies
        return weighed
