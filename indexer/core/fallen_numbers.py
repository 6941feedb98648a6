"""Tells what a number at or below the newest means: a duplicate, a late batch, or another process.

Rules:

1. Byte for byte what was known under its number: a duplicate.
2. Not older than the newest batch, or nobody knows how old that is: the publisher restarted.
3. Older: a late batch, or the first words of a process whose clock is further back. Replay tells which.
   Where it can't (`on_unproven`), and nothing in order has come since:
   - the first one after a reconnect is a restart, as a new connection never owes what an old one did;
   - so are `RUN_BATCHES` in a row under numbers that rise by one and were somebody else's, or are
     forgotten: late batches come singly. Numbers that we lack don't count: several batches that one
     overtakes look like that, and their life goes on.
4. What such a run told is handed over whole (`told`): it is how the new life began.

Cost: one digest and two times read per batch; at most `RUN_BATCHES` payloads are kept.
"""

from collections.abc import Callable, Mapping
from enum import StrEnum

from indexer.core.known_batches import KnownBatches

RUN_BATCHES = 3


class Fallen(StrEnum):
    """What a batch under such a number is."""

    DUPLICATE = "duplicate"
    UNDECODABLE = "undecodable"
    LATE = "late"
    """Or of a process whose clock is further back."""
    RESTARTED = "restarted"


class FallenNumbers:
    """Of one life of one publisher."""

    def __init__(self, known: KnownBatches, ts_of: Callable[[bytes], float | None]) -> None:
        self._known = known
        self._ts_of = ts_of
        self._unproven_at: int | None = None
        """The newest number when it couldn't be proved that this life goes on."""
        self._reconnected_at: int | None = None
        """The same, if a new connection was why, and had brought nothing."""
        self._run: dict[int, bytes] = {}
        """Late batches in a row, under numbers that rise by one."""
        self._run_at: int | None = None
        """The newest number since it began."""
        self._looked_at: int | None = None
        self.told: Mapping[int, bytes] = {}
        """Payloads of the new life by number, once a batch was RESTARTED."""

    def judge(self, seq: int, payload: bytes) -> Fallen:
        """What `payload` is under `seq`, which is at or below the newest number."""
        known = self._known
        if known.is_duplicate(seq, payload):
            return Fallen.DUPLICATE
        ts, newest_ts = self._ts_of(payload), self._ts_of(known.newest_payload)
        if ts is None:
            return Fallen.UNDECODABLE
        if newest_ts is None or ts >= newest_ts or self._reconnected_at == known.newest:
            self.told = {seq: payload}
            return Fallen.RESTARTED
        self._follow_run(seq, payload)
        if len(self._run) < RUN_BATCHES or self._unproven_at != known.newest:
            return Fallen.LATE
        self.told = self._run
        return Fallen.RESTARTED

    def is_worth_a_look(self, next_seq: int | None) -> bool:
        """A LATE batch is a reason to ask if this life goes on; one look per number settles it."""
        was_looked_at, self._looked_at = self._looked_at == next_seq, next_seq
        return not was_looked_at

    def on_unproven(self, *, is_reconnected: bool) -> None:
        """Replay can't tell if this life goes on; `is_reconnected`: after a new connection."""
        known = self._known
        self._unproven_at = known.newest
        # What waits came over the new connection: it was the first, and no restart.
        self._reconnected_at = known.newest if is_reconnected and not known.held else None

    def _follow_run(self, seq: int, payload: bytes) -> None:
        known = self._known
        if known.lacks(seq):
            self._run = {}
            return
        if self._run_at != known.newest or seq - 1 not in self._run:
            self._run, self._run_at = {}, known.newest
        self._run[seq] = payload
        if len(self._run) > RUN_BATCHES:
            del self._run[min(self._run)]
