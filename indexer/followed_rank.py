"""One rank while it is followed: its port, subscriber and writer, started anew if they fail.

A rank that another process writes is left to it until that one is gone. One whose messages can't be
told from another's (`indexer.claims`) is in no answer, and begins anew once they can.
"""

import asyncio
from contextlib import closing
from dataclasses import replace

import structlog

from indexer.claims import Claim, TopicSharedError
from indexer.config import RankSource
from indexer.core.index import IndexUnavailableError, NotOwnerError
from indexer.core.rank_status import RankCounts, RankStatus
from indexer.core.types import Trust
from indexer.ports import Ports
from indexer.rank_judge import RankJudge
from indexer.rank_writer import RankWriter, WritingMeans
from indexer.sockets import ZmqContext
from indexer.subscriber import RankSubscriber

_logger = structlog.get_logger(__name__)

_RESTART_S = 1.0


class FollowedRank:
    """From the moment its source was found until it leaves the fleet."""

    def __init__(
        self,
        source: RankSource,
        *,
        means: WritingMeans,
        context: ZmqContext,
        ports: Ports,
    ) -> None:
        self.source = source
        self._means = means
        self._context = context
        self._ports = ports
        self._counts = RankCounts()
        self._problem: str | None = None
        self._claim: Claim | None = None
        self._stood_back_s: float | None = None
        """When another indexer was found to write it; None: we do."""
        """Another process writes this rank."""
        self._writer, self._subscriber = self._begin()
        self.judge = self._new_judge()

    def rename(self, alias: str) -> None:
        """Called by this name from now on; what is followed and known stays."""
        self.source = replace(self.source, alias=alias)
        self._writer.rename(alias)

    async def drop_credit(self) -> None:
        """Nothing that it held counts any more; what is stored from now on does."""
        await self._subscriber.on_cache_dropped()

    async def run(self) -> None:
        """Follow it until cancelled; a bug costs it an epoch, nobody else anything."""
        with self._ports.claims.claiming(self.source) as claim:
            self._claim = claim
            may_resume = True
            while True:
                try:
                    if not claim.holds:
                        may_resume = False
                        await self._stand_aside(claim)
                    self._writer, self._subscriber = self._begin()
                    self.judge = self._new_judge()
                    with closing(self._writer):
                        await self._follow(claim, may_resume=may_resume)
                except* TopicSharedError:
                    may_resume = False
                except* NotOwnerError:
                    await self._stand_back()
                    may_resume = True
                except* Exception as error:
                    may_resume = False
                    self._counts.failures += 1
                    self._problem = repr(error)
                    _logger.exception(
                        "rank_failed", instance=self.source.alias, rank=self.source.rank.rank
                    )
                    await asyncio.sleep(_RESTART_S)

    async def _follow(self, claim: Claim, *, may_resume: bool) -> None:
        async with (
            self._ports.listening(self.source, self._subscriber),
            asyncio.TaskGroup() as group,
        ):
            self._problem = self._stood_back_s = None
            self._writer.may_resume = may_resume
            beside = [
                group.create_task(claim.until_lost()),
                group.create_task(self._writer.keeper.run()),
            ]
            await self._subscriber.run()
            for task in beside:
                task.cancel()

    async def _stand_aside(self, claim: Claim) -> None:
        """Be in no answer for as long as others' messages may be taken for this rank's."""
        self._writer, self._subscriber = self._begin()
        self.judge = self._new_judge()
        self._problem = self._stood_back_s = None
        self._writer.trust_reason = "topic_shared"
        names = {"instance": self.source.alias, "rank": self.source.rank.rank}
        _logger.error("topic_shared", **names, problem=claim.problem)
        with closing(self._writer):
            await self._leave_the_index()
            self._means.on_progress()
            await claim.until_it_holds()
        _logger.info("topic_free", **names)

    async def _leave_the_index(self) -> None:
        """What it has there, of this process or of an earlier one, may be the other's."""
        rank, journal = self.source.rank, self._means.journal
        try:
            if journal is not None:
                await journal.last_epoch(rank, self.source.model)  # claims it
            await self._means.index.retire(rank)
        except (IndexUnavailableError, NotOwnerError) as error:
            # Nobody renews its lease any more, so its entries leave by themselves.
            _logger.warning("rank_not_retired", instance=self.source.alias, error=str(error))

    async def _stand_back(self) -> None:
        """Wait until the rank is free again."""
        journal = self._means.journal
        self._counts.index_faults["taken_over"] += 1
        self._stood_back_s = self._means.clock()
        self._problem = "standing by: another indexer writes this rank"
        names = {"instance": self.source.alias, "rank": self.source.rank.rank}
        _logger.warning("rank_taken_over", **names)
        while journal is not None:
            await asyncio.sleep(_RESTART_S)
            try:
                await journal.last_epoch(self.source.rank, self.source.model)
            except (NotOwnerError, IndexUnavailableError):
                continue
            _logger.info("rank_taken_back", **names)
            return

    def _begin(self) -> tuple[RankWriter, RankSubscriber]:
        writer = RankWriter(self.source, means=self._means, counts=self._counts)
        subscriber = RankSubscriber(
            self.source,
            sink=writer,
            config=self._means.config,
            context=self._context,
            clock=self._means.clock,
            counts=self._counts,
        )
        subscriber.on_progress = self._means.on_progress
        subscriber.turns = self._means.turns
        return writer, subscriber

    @property
    def is_standing_by(self) -> bool:
        """Another indexer writes it."""
        return self._stood_back_s is not None

    @property
    def _shared_topic(self) -> str | None:
        return self._claim.problem if self._claim else None

    @property
    def index_problem(self) -> str | None:
        """Why the index can't be written for this rank."""
        return self._writer.keeper.problem

    def _new_judge(self) -> RankJudge:
        return RankJudge(
            writer=self._writer,
            subscriber=self._subscriber,
            counts=self._counts,
            config=self._means.config,
            clock=self._means.clock,
        )

    def status(self) -> RankStatus:
        writer, subscriber, blocks = self._writer, self._subscriber, self._writer.blocks
        trust, reason, since_s = writer.trust, writer.trust_reason, writer.trust_since_s
        if self._stood_back_s is not None:  # what was known of it is out of date
            trust, reason, since_s = Trust.LOAD_ONLY, "standing_by", self._stood_back_s
        return RankStatus(
            rank=self.source.rank,
            alias=self.source.alias,
            model=self.source.model,
            endpoint=self.source.events,
            replay_endpoint=self.source.replay,
            is_connected=subscriber.is_connected,
            is_standing_by=self.is_standing_by,
            problem=self._shared_topic or self._problem or self.index_problem,
            epoch=blocks.epoch,
            epoch_reason=writer.epoch_reason,
            last_seq=writer.indexed_seq,
            trust=trust,
            trust_reason=reason,
            trust_since_s=self._means.clock() - since_s,
            held_batches=subscriber.stream.held_batches,
            is_replaying=subscriber.stream.replaying is not None,
            held_blocks=blocks.held_blocks,
            orphans=blocks.orphans,
            doubted_blocks=blocks.doubted_blocks,
            block_sizes={number: spec.block_size for number, spec in blocks.groups.items()},
            lag_s=writer.lag_s,
            named_rank=writer.named_rank,
            counts=self._counts,
        )
