"""Keeps one rank in step with an index that can fail, and can outlive this process.

Rules:

1. Following the engine never waits for a broken index. What couldn't be written is not queued:
   the rank's own tables have it, and the heartbeat writes all of it anew when the index answers.
2. At each heartbeat the lease is renewed, and it shows if the index still has what was written.
3. A full index is given room: the rank's entries, which are out of date, are withdrawn.
4. Another process that writes this rank is no fault to recover from: `NotOwnerError` goes up.

Without a journal (the index in memory) all of it is one call.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

import structlog

from indexer.core.events import EventBatch
from indexer.core.index import (
    BlockIndex,
    BlockIndexError,
    IndexFullError,
    IndexLostError,
    IndexUnavailableError,
    RankUpdate,
)
from indexer.core.journal import RankJournal, RankRecord
from indexer.core.known_batches import payload_digest
from indexer.core.rank_blocks import RankBlocks
from indexer.core.slices import slices
from indexer.core.types import RankId, Trust

_logger = structlog.get_logger(__name__)

BEFORE_FIRST_SEQ = -1
_SLICE_BLOCKS = 256
"""Blocks applied in one piece: 0.3 ms. Only where nothing has to be kept as a whole."""
_LONG_PAYLOAD_BYTES = 9 * _SLICE_BLOCKS
"""Shorter ones can't name more blocks: a hash takes nine bytes."""
_LONGEST_PAUSE = 32
"""Heartbeats between attempts at a rewrite that keeps failing."""


_FAULTS: Mapping[type[BlockIndexError], str] = {
    IndexUnavailableError: "unavailable",
    IndexFullError: "full",
    IndexLostError: "lost",
}


class RankKeeper:
    """Stands between one rank's writer and the index."""

    def __init__(
        self,
        *,
        index: BlockIndex,
        journal: RankJournal | None,
        rank: RankId,
        model: str,
        faults: Counter[str],
    ) -> None:
        """`faults` counts what went wrong, by kind."""
        self.is_behind = False
        """The index doesn't have what the rank's tables have."""
        self._index = index
        self._journal = journal
        self._rank = rank
        self._model = model
        self._faults = faults
        self._turn = asyncio.Lock()
        self._trust = Trust.LOAD_ONLY
        self._latest: tuple[RankBlocks, int, int] | None = None
        """Tables, and number and digest of the batch they stand at."""
        self._pause = 0
        """Heartbeats to wait before the next attempt at a rewrite."""
        self._next_pause = 1

    async def restore(self) -> RankRecord | None:
        """What an earlier process left of the rank; None: begin anew."""
        if self._journal is None:
            return None
        try:
            return await self._journal.restore(self._rank, self._model)
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

    def resume(self, blocks: RankBlocks, record: RankRecord) -> None:
        """`blocks` are what the record said."""
        self._latest = blocks, record.seq, record.digest
        self._trust = record.trust

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
            await self._write(update)

    async def apply(self, blocks: RankBlocks, seq: int, batch: EventBatch, payload: bytes) -> None:
        """Have `blocks` take in a batch, and write what that changes."""
        if self._journal is None:
            await self._apply_in_slices(blocks, seq, batch, payload)
            return
        digest = payload_digest(payload)
        async with self._turn:
            update = blocks.apply(seq, batch, digest)
            self._latest = blocks, seq, digest
            await self._write(update)

    async def _apply_in_slices(
        self, blocks: RankBlocks, seq: int, batch: EventBatch, payload: bytes
    ) -> None:
        """Let requests be routed between the pieces of a long batch."""
        if len(payload) < _LONG_PAYLOAD_BYTES:
            await self._index.apply(blocks.apply(seq, batch))
            return
        for piece in slices(batch, _SLICE_BLOCKS):
            await self._index.apply(blocks.apply(seq, piece))
            await asyncio.sleep(0)

    async def set_trust(self, trust: Trust) -> None:
        async with self._turn:
            self._trust = trust
            if not self.is_behind:
                await self._attempt(lambda: self._index.set_trust(self._rank, trust))

    async def run(self) -> None:
        """Renew and repair until cancelled."""
        journal = self._journal
        if journal is None:
            return
        while True:
            await asyncio.sleep(journal.heartbeat_s)
            if not self.is_behind:
                await self._renew(journal)
            if self.is_behind:
                await self._repair(journal)

    async def _write(self, update: RankUpdate) -> None:
        if not self.is_behind:
            await self._attempt(lambda: self._index.apply(update))

    async def _renew(self, journal: RankJournal) -> None:
        async with self._turn:
            try:
                await journal.renew(self._rank)
            except IndexUnavailableError:
                # It may have kept everything: that shows when it answers again.
                self._faults["not_renewed"] += 1
            except IndexLostError as error:
                self._fall_behind(error)

    async def _repair(self, journal: RankJournal) -> None:
        self._pause -= 1
        if self._pause > 0 or not await self._answers(journal):
            return
        async with self._turn:
            if self._latest is None:
                self.is_behind = False
                return
            blocks, seq, digest = self._latest
            parts = blocks.snapshot(seq, digest)
            is_written = await self._attempt(
                lambda: journal.rewrite(self._model, self._trust, parts)
            )
        if is_written:
            self.is_behind = False
            self._next_pause = 1
            _logger.info("rank_rewritten", **self._names())
        else:
            self._pause = self._next_pause
            self._next_pause = min(2 * self._next_pause, _LONGEST_PAUSE)

    async def _answers(self, journal: RankJournal) -> bool:
        """Ask outside of the rank's turn, so that nobody waits for an index that hangs."""
        try:
            await journal.probe()
        except IndexUnavailableError:
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
        if not self.is_behind:
            self.is_behind = True
            _logger.warning("rank_behind", **self._names(), error=str(error))

    def _names(self) -> dict[str, str | int]:
        return {"instance": self._rank.instance, "rank": self._rank.rank}
