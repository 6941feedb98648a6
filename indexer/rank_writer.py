"""Writes one rank's ordered batches to the index: decode, turn into changes, apply.

A batch that can't be decoded, an event that can't be used, and a batch that names another rank than
its connection's are counted by reason and logged at most once per interval. Blocks of one token are
warned of once per rank: each token is a row of the index then. Everything else was decided before (`core.stream`) or is decided by the core (`core.rank_blocks`, `core.refusals`).
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import structlog

from indexer.config import IndexerConfig, RankSource
from indexer.core.block_tree import BlockTree
from indexer.core.bound import TableLimits
from indexer.core.epochs import Epochs
from indexer.core.events import (
    EventBatch,
    UndecodableBatchError,
    decode_batch,
)
from indexer.core.index import BlockIndex, BlocksDropped, BlocksHeld, Change
from indexer.core.journal import RankJournal, RankRecord, Resumption
from indexer.core.rank_blocks import RankBlocks
from indexer.core.rank_status import RankCounts
from indexer.core.recent_batches import RecentBatches
from indexer.core.refusals import has_clear, has_lost_events, refused_reasons
from indexer.core.store_only import StoreOnlyLimits
from indexer.core.stream_effects import ApplyBatch, BatchOutcome, Effect
from indexer.core.throttle import Throttle
from indexer.core.types import Trust
from indexer.rank_keeper import RankKeeper
from indexer.turns import Turns

_logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WritingMeans:
    """What the writers of all ranks share."""

    index: BlockIndex
    epochs: Epochs
    """Never gives a number twice, so a rank that comes back is newer than it was."""
    config: IndexerConfig
    clock: Callable[[], float]
    """Monotonic, seconds."""
    wall_clock: Callable[[], float]
    """Unix time, seconds: compared with the engines' own."""
    on_progress: Callable[[], None]
    """Called when a rank has dealt with something."""
    tree: BlockTree
    """Blocks of all ranks, each once."""
    journal: RankJournal | None = None
    """The index too, if what it has outlives this process."""
    turns: Turns = field(default_factory=Turns)
    """Of the event loop."""


class RankWriter:
    """A `subscriber.StreamSink`."""

    def __init__(self, source: RankSource, *, means: WritingMeans, counts: RankCounts) -> None:
        self.may_resume = True
        """What an earlier process left may be gone on with."""
        self.epoch_reason = ""
        self.applied_seq: int | None = None
        """Batch whose changes the tables have, in this epoch; the index may be told soon."""
        self.lag_s: float | None = None
        self.named_rank: int | None = None
        """Rank that the newest batch names."""
        self.trust = Trust.LOAD_ONLY
        self.trust_reason = ""
        self.trust_since_s = means.clock()
        self._source = source
        self._means = means
        self._counts = counts
        self._set_aside: Counter[str] = Counter()
        self._is_size_warned = False
        self._throttle = Throttle(means.config.log_interval_s)
        self._blocks = self._new_blocks()
        self.recent = self._new_recent()
        """What the batches of the present epoch stored and removed lately."""
        self.keeper = RankKeeper(
            index=means.index,
            journal=means.journal,
            source=source,
            faults=counts.index_faults,
            on_progress=means.on_progress,
            turns=means.turns,
        )
        self.keeper.on_changes = self._note_lost
        self.keeper.on_written = self._note_gained
        self.keeper.on_rewritten = lambda: self.recent.gain_all(means.clock())

    @property
    def indexed_seq(self) -> int | None:
        """Newest batch that the index has been told of, in this epoch."""
        return self.keeper.written_seq if self.keeper.has_unwritten else self.applied_seq

    @property
    def is_rebuilt(self) -> bool:
        """The present epoch is an older one, told again from its beginning."""
        return self.epoch_reason == "rebuilt"

    @property
    def blocks(self) -> RankBlocks:
        """State of the present epoch."""
        return self._blocks

    def rename(self, alias: str) -> None:
        """Its instance's name in the log from now on."""
        self._source = replace(self._source, alias=alias)
        self.keeper.rename(alias)

    async def resume(self) -> Resumption | None:
        """Go on with what an earlier process left of this rank; None: a new epoch has to open."""
        record = await self.keeper.restore() if self.may_resume else None
        self._means.epochs.pass_by(await self.keeper.last_epoch())
        if record is None or record.trust is Trust.LOAD_ONLY:
            return None
        blocks = self._new_blocks(record.epoch)
        if not blocks.restore(record.groups, record.rows, record.facts):
            blocks.close()
            _logger.warning("record_broken", **self.names())
            return None
        self._blocks.close()
        self._blocks = blocks
        self.recent = self._new_recent()
        self.keeper.resume(blocks, record)
        self.epoch_reason, self.applied_seq = "resumed", record.seq
        self._counts.epochs["resumed"] += 1
        facts = {"seq": record.seq, "blocks": blocks.held_blocks}
        _logger.info("rank_resumed", **self.names(), **facts)
        return Resumption(seq=record.seq, digest=record.digest, trust=_kept_trust(record))

    async def open_epoch(self, reason: str) -> None:
        """Nothing of the old epoch counts from here on, even if no batch ever follows."""
        ended, self._blocks = self._blocks, self._new_blocks()
        self.recent = self._new_recent()
        self._set_aside = Counter()
        self.epoch_reason = reason
        self.applied_seq = None
        try:
            await self.keeper.open(self._blocks)
        finally:
            # Not before the keeper lets go of it: it may be writing all of it anew.
            ended.close()
        _logger.info("epoch_opened", **self.names(), reason=reason)

    async def apply(self, effect: ApplyBatch) -> BatchOutcome:
        try:
            batch = decode_batch(effect.payload)
        except UndecodableBatchError as error:
            self._reject("undecodable_batch", detail=str(error))
            self.applied_seq = effect.seq
            return BatchOutcome(
                has_refusals=True,
                is_unfollowed=self._blocks.is_unfollowed,
                orphans=self._blocks.orphans,
            )
        for reason in batch.rejected:
            self._reject(reason)
        self.recent.note(self._means.clock(), batch)  # first: see `core.contradictions`, rule 2
        await self.keeper.apply(self._blocks, effect.seq, batch, effect.payload)
        self._note(effect, batch)
        self._check_rank(batch)
        self._check_sizes()
        set_aside = self._take_set_aside()
        return BatchOutcome(
            is_cleared=has_clear(batch.events),
            has_refusals=self._has_refused(set_aside, batch) or has_lost_events(batch.rejected),
            is_bound_hit="bound_evicted" in set_aside,
            is_unfollowed=self._blocks.is_unfollowed,
            orphans=self._blocks.orphans,
        )

    def close(self) -> None:
        """The rank isn't followed any more, or anew."""
        self._blocks.close()

    async def set_trust(self, trust: Trust, reason: str) -> None:
        # Bad news at once; good news when the index has what they speak of.
        if trust is Trust.EXACT:
            await self.keeper.set_trust(trust, reason)
            self._show_trust(trust, reason)
        else:
            self._show_trust(trust, reason)
            await self.keeper.set_trust(trust, reason)

    def _show_trust(self, trust: Trust, reason: str) -> None:
        if trust is not self.trust:
            self.trust_since_s = self._means.clock()
            self._log(_logger.info, "trust_changed", trust=trust.value, reason=reason)
        self.trust, self.trust_reason = trust, reason

    def on_effect(self, effect: Effect) -> None:
        """Nothing to do: counted by the subscriber."""

    def _new_blocks(self, epoch: int | None = None) -> RankBlocks:
        return RankBlocks(
            rank=self._source.rank,
            model=self._source.model,
            epoch=next(self._means.epochs) if epoch is None else epoch,
            tree=self._means.tree,
            limits=TableLimits(
                max_blocks=self._means.config.max_blocks_per_rank,
                max_parked_blocks=self._means.config.max_parked_blocks,
                store_only=StoreOnlyLimits(
                    ttl_s=self._means.config.store_only_ttl_s,
                    max_blocks=self._means.config.max_store_only_blocks,
                ),
            ),
            keeps_rows=self._means.journal is not None,
        )

    def _new_recent(self) -> RecentBatches:
        return RecentBatches(self._means.clock(), hears_gains=self._means.journal is not None)

    def _note(self, effect: ApplyBatch, batch: EventBatch) -> None:
        self.applied_seq = effect.seq
        self._counts.batches += 1
        self._counts.events += len(batch.events)
        if not effect.replayed:
            self.lag_s = self._means.wall_clock() - batch.ts

    def _note_lost(self, changes: Sequence[Change]) -> None:
        for change in changes:
            if isinstance(change, BlocksDropped):
                self.recent.lose(self._means.clock(), change.keys)

    def _note_gained(self, changes: Sequence[Change]) -> None:
        for change in changes:
            if isinstance(change, BlocksHeld):
                self.recent.gain(self._means.clock(), change.keys)

    def _check_rank(self, batch: EventBatch) -> None:
        """The connection is the identity, so a batch of another rank is applied all the same.

        It says that ports are crossed or `rank_base` is wrong: an operator has to mend that.
        """
        self.named_rank = batch.rank
        if batch.rank is not None and batch.rank != self._source.rank.rank:
            self._counts.wrong_rank += 1
            self._log(_logger.warning, "wrong_rank", reason=str(batch.rank))

    def _check_sizes(self) -> None:
        if not self._is_size_warned and self._blocks.has_one_token_blocks:
            self._is_size_warned = True
            _logger.warning(
                "one_token_blocks",
                **self.names(),
                remedy="start the engine with a larger --block-size: each token is a row of the index",
            )

    def _take_set_aside(self) -> Counter[str]:
        """What the newest batch added to it, by reason."""
        counts = self._blocks.counts
        if counts == self._set_aside:
            return Counter()
        new = counts - self._set_aside
        self._counts.set_aside += new
        self._set_aside = Counter(counts)
        if "bound_evicted" in new:
            self._log(_logger.warning, "bound_hit", reason="max_blocks_per_rank")
        return new

    def _has_refused(self, set_aside: Counter[str], batch: EventBatch) -> bool:
        refused = refused_reasons(set_aside, batch.events, self._blocks.groups)
        for reason in refused:
            self._log(_logger.warning, "events_refused", reason=reason)
        return bool(refused)

    def _reject(self, reason: str, **fields: str) -> None:
        self._counts.rejected[reason] += 1
        self._log(_logger.warning, "events_rejected", reason=reason, **fields)

    def _log(self, write: Callable[..., object], event: str, reason: str, **fields: str) -> None:
        """At most one line per event and reason in an interval; all of it is counted."""
        if self._throttle.admits((event, reason), self._means.clock()):
            write(event, **self.names(), reason=reason, **fields)

    def names(self) -> dict[str, str | int]:
        """Whose log line it is."""
        return {"instance": self._source.alias, "rank": self._source.rank.rank}


def _kept_trust(record: RankRecord) -> Trust:
    """Orphans aren't kept, and without them the rank isn't what it was."""
    return Trust.DEGRADED if record.facts.orphans else record.trust
