"""Keeps one rank in step with an index that can fail, and can outlive this process.

Rules:

1. Following the engine never waits for a broken index. What couldn't be written is not queued:
   the rank's own tables have it, and the heartbeat writes all of it anew when the index answers.
2. Batches that come while one is being written, or waits for a place (`RankJournal.writing`), are
   written together, net, as the next update. A rank that is busy pays one round trip for many;
   `written_seq` tells how far the index is. No more than `_MOST_UNWRITTEN_BYTES` of them wait, so
   that one update is never a long script.
3. At each heartbeat the lease is renewed, and it shows if the index still has what was written:
   its last batch, and as many keys.
4. A full index is given room: the rank's entries, which are out of date, are withdrawn.
5. An index that is found to give what the tables have not is written anew at once.
6. Another process that writes this rank is no fault to recover from: `NotOwnerError` goes up.

Without a journal (the index in memory) all of it is one call.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress

import structlog

from indexer.config import RankSource
from indexer.core.events import BlockRemoved, EventBatch
from indexer.core.index import (
    BlockIndex,
    BlockIndexError,
    Change,
    IndexFullError,
    IndexLostError,
    IndexSpoiltError,
    IndexUnavailableError,
    RankUpdate,
)
from indexer.core.journal import RankJournal, RankRecord
from indexer.core.known_batches import payload_digest
from indexer.core.rank_blocks import RankBlocks
from indexer.core.slices import slices
from indexer.core.types import Trust
from indexer.turns import Turns

_logger = structlog.get_logger(__name__)

BEFORE_FIRST_SEQ = -1
_SLICE_BLOCKS = 128
"""Blocks applied in one piece: 0.15 ms. Requests are routed in between."""
_LONG_PAYLOAD_BYTES = 9 * _SLICE_BLOCKS
"""Shorter ones can't name more blocks: a hash takes nine bytes."""
_MOST_UNWRITTEN_BYTES = 64 * 1024
"""Of payloads: some 400 blocks, 0.7 ms of a Redis. Twice as many made it 5 % faster."""
_HASH_BYTES = 9
"""What a hash takes in a payload, about."""
PART_BLOCKS = 128
"""Of a rank that is written anew: 0.3 ms of a Redis, ten times that where its tables have just doubled."""
_LONGEST_PAUSE = 32
"""Heartbeats between attempts at a rewrite that keeps failing."""


_FAULTS: Mapping[type[BlockIndexError], str] = {
    IndexUnavailableError: "unavailable",
    IndexFullError: "full",
    IndexLostError: "lost",
    IndexSpoiltError: "lost",
}


class RankKeeper:
    """Stands between one rank's writer and the index."""

    def __init__(
        self,
        *,
        index: BlockIndex,
        journal: RankJournal | None,
        source: RankSource,
        faults: Counter[str],
        on_progress: Callable[[], None],
        turns: Turns,
    ) -> None:
        """`faults` counts what went wrong, by kind."""
        self.is_behind = False
        """The index doesn't have what the rank's tables have."""
        self.problem: str | None = None
        """Why the index can't be written or renewed, and what to change."""
        self._index = index
        self._journal = journal
        self._rank = source.rank
        self._model = source.model
        self._alias = source.alias
        self._faults = faults
        self._on_progress = on_progress
        self._turns = turns
        self.on_changes: Callable[[Sequence[Change]], None] = lambda _: None
        """Told of what batches change, net."""
        self.on_written: Callable[[Sequence[Change]], None] = lambda _: None
        """Told of the same when a journal had its chance to take it in."""
        self.on_rewritten: Callable[[], None] = lambda: None
        """A journal has taken in all there is."""
        self.written_seq: int | None = None
        """Newest batch that the index has, or was tried to be given, in this epoch."""
        self._turn = asyncio.Lock()
        """Of writing: one update after the other."""
        self._tables = asyncio.Lock()
        """Held while the tables may not change."""
        self._due = asyncio.Event()
        """Something was taken in that isn't written."""
        self._unwritten_bytes = 0
        self._room = asyncio.Event()
        self._trust = Trust.LOAD_ONLY
        self._latest: tuple[RankBlocks, int, int] | None = None
        """Tables, and number and digest of the batch they stand at."""
        self._pause = 0
        """Heartbeats to wait before the next attempt at a rewrite."""
        self._next_pause = 1
        self._entries = 0
        """Keys that the index should have."""
        self._doubted = asyncio.Event()
        """The index isn't what was written to it."""

    def rename(self, alias: str) -> None:
        """Its instance's name in the log from now on."""
        self._alias = alias

    async def restore(self) -> RankRecord | None:
        """What an earlier process left of the rank; None: begin anew."""
        if self._journal is None:
            return None
        try:
            return await self._journal.restore(self._rank, self._model)
        except IndexLostError as error:
            self._faults["lost"] += 1
            _logger.warning("record_broken", **self._names(), error=str(error))
            return None
        except IndexUnavailableError as error:
            self._fall_behind(error)
            return None

    async def last_epoch(self) -> int:
        """Newest epoch that the index knows of the rank."""
        if self._journal is None or self.is_behind:
            return 0
        try:
            return await self._journal.last_epoch(self._rank, self._model)
        except IndexUnavailableError as error:
            self._fall_behind(error)
            return 0

    @property
    def has_unwritten(self) -> bool:
        """The tables have taken in what isn't written yet."""
        return self._due.is_set() or self._turn.locked()

    def resume(self, blocks: RankBlocks, record: RankRecord) -> None:
        """`blocks` are what the record said."""
        self._latest = blocks, record.seq, record.digest
        self.written_seq = record.seq
        self._trust = record.trust
        self._entries = blocks.entries

    async def open(self, blocks: RankBlocks) -> None:
        """Nothing of an older epoch counts from here on, even if no batch ever follows."""
        update = RankUpdate(
            rank=self._rank,
            model=self._model,
            epoch=blocks.epoch,
            seq=BEFORE_FIRST_SEQ,
            changes=(),
        )
        async with self._turn:
            self._latest = blocks, BEFORE_FIRST_SEQ, 0
            self._entries = 0
            self._settle(None)  # what the old epoch left unwritten counts no more
            if not self.is_behind:
                await self._attempt(lambda: self._index.apply(update))

    async def apply(self, blocks: RankBlocks, seq: int, batch: EventBatch, payload: bytes) -> None:
        """Have `blocks` take in a batch. What that changes is written soon, with what follows."""
        if self._journal is None:
            async for piece in self._slices(batch, payload):
                update = blocks.apply(seq, piece)
                self.on_changes(update.changes)
                await self._index.apply(update)
            self.written_seq = seq
            return
        await self._have_room()
        async with self._tables:
            async for piece in self._slices(batch, payload):
                blocks.absorb(piece)
            self._latest = blocks, seq, payload_digest(payload)
            self._unwritten_bytes += len(payload)
            self._due.set()

    async def _slices(self, batch: EventBatch, payload: bytes) -> AsyncIterator[EventBatch]:
        """A long batch in pieces, with a turn for others between them."""
        if len(payload) < _LONG_PAYLOAD_BYTES:
            yield batch
            return
        is_first = True
        for piece in slices(batch, _SLICE_BLOCKS):
            if not is_first:
                await self._turns.pass_on()
            is_first = False
            yield piece

    async def prune(self, blocks: RankBlocks, find: Callable[[], Sequence[BlockRemoved]]) -> None:
        """Take out what `find` says the engine doesn't hold. Batch number and epoch stay."""

        def take_out() -> int:
            events = find()
            blocks.absorb(EventBatch(0.0, None, list(events)))
            return sum(len(event.hashes) for event in events)

        await self.amend(blocks, take_out)

    async def amend(self, blocks: RankBlocks, change: Callable[[], int]) -> None:
        """Have `blocks` changed by what no batch said; `change` returns how many of them it changed."""
        if self._journal is None:
            seq = BEFORE_FIRST_SEQ if self.written_seq is None else self.written_seq
            if change():
                update = blocks.take(seq, 0)
                self.on_changes(update.changes)
                await self._index.apply(update)
            return
        await self._have_room()
        async with self._tables:
            if self._latest is None or self._latest[0] is not blocks:
                return  # another life has begun meanwhile
            changed = change()
            if changed:
                self._unwritten_bytes += _HASH_BYTES * changed
                self._due.set()

    def doubt(self) -> None:
        """Readers were given what the tables have not: write all of it anew, now.

        Without a journal readers read the tables, and there is nothing to write.
        """
        if self._journal is not None and not self.is_behind:
            self._differ()
            self._doubted.set()

    def _differ(self) -> None:
        self._faults["differs"] += 1
        _logger.warning("index_differs", **self._names())
        self.is_behind = True

    async def _have_room(self) -> None:
        while self._unwritten_bytes > _MOST_UNWRITTEN_BYTES:
            self._room.clear()
            await self._room.wait()

    async def set_trust(self, trust: Trust, reason: str = "") -> None:
        async with self._turn:
            await self._write_latest()  # nobody shall believe in what isn't there yet
            self._trust = trust
            if not self.is_behind:
                await self._attempt(lambda: self._index.set_trust(self._rank, trust, reason))

    async def run(self) -> None:
        """Write, renew and repair until cancelled."""
        if self._journal is None:
            return
        async with asyncio.TaskGroup() as group:
            group.create_task(self._run_writing(self._journal))
            group.create_task(self._run_beating(self._journal))

    async def _run_writing(self, journal: RankJournal) -> None:
        while True:
            await self._due.wait()
            async with journal.writing(), self._turn:
                await self._write_latest()

    async def _run_beating(self, journal: RankJournal) -> None:
        # Not all ranks at the same moment: lookups would wait behind hundreds of renewals.
        share = payload_digest(repr(self._rank).encode()) % 997 / 997
        pause_s = journal.heartbeat_s * share
        while True:
            await self._next_beat(pause_s)
            pause_s = journal.heartbeat_s
            await self._renew(journal)
            if self.is_behind:
                await self._repair(journal)

    async def _next_beat(self, pause_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._doubted.wait()
        self._doubted.clear()

    async def _write_latest(self) -> None:
        """Write what isn't written. Where that failed before, the tables are all that counts."""
        if self._latest is None or not self._due.is_set():
            return
        # A long batch is taken in piece by piece: a part of it under the number before would be
        # counted again by whoever resumes from there.
        async with self._tables:
            blocks, seq, digest = self._latest
            update = blocks.take(seq, digest)
            self._entries = blocks.entries
            self.on_changes(update.changes)
            self._due.clear()
            self._unwritten_bytes = 0
        if not self.is_behind:
            await self._attempt(lambda: self._index.apply(update))
        self.on_written(update.changes)
        self.written_seq = seq
        self._room.set()
        self._on_progress()

    def _settle(self, seq: int | None) -> None:
        """Nothing is left to be written."""
        self._due.clear()
        self._unwritten_bytes = 0
        self.written_seq = seq
        self._room.set()
        self._on_progress()

    async def _renew(self, journal: RankJournal) -> None:
        async with self._turn:
            # Behind: found by a write that had the turn before, and once is enough. No tables: the
            # rank is claimed and still being read, and nothing can be held against it.
            if self.is_behind or self._latest is None:
                return
            try:
                await journal.renew(self._rank)
                self.problem = None
                if await journal.entries(self._rank) != self._entries:
                    self._differ()
            except (IndexLostError, IndexSpoiltError) as error:
                self._fall_behind(error)
            except IndexUnavailableError as error:
                # It may have kept everything: that shows when it answers again.
                self._faults["not_renewed"] += 1
                self.problem = str(error)

    async def _repair(self, journal: RankJournal) -> None:
        self._pause -= 1
        if self._pause > 0 or not await self._answers(journal):
            return
        async with self._turn, self._tables:
            is_written = await self._write_anew(journal)
        if not is_written:
            self._pause = self._next_pause
            self._next_pause = min(2 * self._next_pause, _LONGEST_PAUSE)

    async def _write_anew(self, journal: RankJournal) -> bool:
        if self._latest is not None:
            blocks, seq, digest = self._latest
            taken = blocks.take(seq, digest)  # the snapshot has it too
            self.on_changes(taken.changes)
            self._entries = blocks.entries
            parts = blocks.snapshot(seq, digest, PART_BLOCKS)
            if not await self._attempt(lambda: journal.rewrite(self._model, self._trust, parts)):
                return False
            self.on_rewritten()
            self._settle(seq)
            self._next_pause = 1
            _logger.info("rank_rewritten", **self._names())
        self.is_behind, self.problem = False, None
        return True

    async def _answers(self, journal: RankJournal) -> bool:
        """Ask outside of the rank's turn, so that nobody waits for an index that hangs."""
        try:
            await journal.probe()
        except IndexUnavailableError as error:
            self.problem = str(error)
            return False
        return True

    async def _attempt(self, write: Callable[[], Awaitable[None]]) -> bool:
        """Whether it went well; if not, the rank is behind."""
        try:
            await write()
        except (IndexUnavailableError, IndexLostError) as error:
            self._fall_behind(error)
            if isinstance(error, IndexFullError):
                await self._withdraw()
            return False
        return True

    async def _withdraw(self) -> None:
        if self._journal is not None:
            with suppress(IndexUnavailableError):  # counted just now; the lease does it later
                await self._journal.withdraw(self._rank)

    def _fall_behind(self, error: BlockIndexError) -> None:
        self._faults[_FAULTS[type(error)]] += 1
        self.problem = str(error)
        if not self.is_behind:
            self.is_behind = True
            _logger.warning("rank_behind", **self._names(), error=str(error))

    def _names(self) -> dict[str, str | int]:
        return {"instance": self._alias, "rank": self._rank.rank}
