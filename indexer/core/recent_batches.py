"""What the last batches of one rank stored and lost, to weigh reports about the time before them.

Rules:

1. Engine hashes are noted per group and tier, in the order in which batches were applied, with the
   time of arrival.
2. Beside them the keys that left the index, since what isn't held now may have been in between, and
   the hashes removed, since what is removed and stored in one batch leaves nothing to be seen.
3. Bounded by hashes and by batches: the oldest batches go first, whole. `reaches` tells whether all
   since a moment is still there.

Cost: 8 bytes per hash and per key (at most 9 MB a rank, where each batch removes one block), 0.04 µs to note one in a long event, 0.2 µs
for an event of one; a question about the time since a moment reads everything noted since.
"""

from array import array
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Container, Iterable, Sequence, Set
from itertools import chain
from typing import Final

from indexer.core.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from indexer.core.types import BlockKey, EngineHash, Tier

_TIER_NUMBER: Final = {tier: number for number, tier in enumerate(Tier)}
_GPU: Final = Tier.GPU
_SPREAD: Final = 0x9E37_79B9_7F4A_7C15
_MASK_64: Final = 0xFFFF_FFFF_FFFF_FFFF


def mark(engine_hash: EngineHash, group: int, tier: int) -> int:
    """One number for a hash in a group and tier; of the first group on the GPU it is the hash."""
    return engine_hash ^ (group * len(_TIER_NUMBER) + tier) * _SPREAD & _MASK_64


class _Departures:
    """Numbers with the moment at which they left, newest last; the oldest go first."""

    __slots__ = ("_kept", "_left", "_most", "_most_moments", "since_s")

    def __init__(self, since_s: float, most: int, most_moments: int) -> None:
        self.since_s = since_s
        """All that left later is here."""
        self._most = most
        self._most_moments = most_moments
        """One with a single number takes as much as one with twenty."""
        self._left: deque[tuple[float, array[int]]] = deque()
        self._kept = 0

    def add(self, now_s: float, numbers: Iterable[int]) -> None:
        left = array("Q", numbers)
        if not left:
            return
        self._left.append((now_s, left))
        self._kept += len(left)
        while self._kept > self._most or len(self._left) > self._most_moments:
            self.since_s, oldest = self._left.popleft()
            self._kept -= len(oldest)

    def has_since(self, moment_s: float, wanted: Container[int]) -> bool:
        for left_s, numbers in reversed(self._left):
            if left_s < moment_s:
                return False
            if any(map(wanted.__contains__, numbers)):
                return True
        return False


class RecentBatches:
    """The newest batches of one epoch of one rank. Times are monotonic and never go back."""

    __slots__ = (
        "_lost",
        "_max_batches",
        "_max_hashes",
        "_removed",
        "_starts",
        "_stored",
        "_times_s",
        "cleared_s",
        "newest_s",
        "since_s",
    )

    def __init__(
        self, since_s: float, *, max_hashes: int = 131_072, max_batches: int = 16_384
    ) -> None:
        self.since_s = since_s
        """Everything that came later is here."""
        self.newest_s: float | None = None
        """When the newest batch came."""
        self.cleared_s: float | None = None
        """When the newest batch came that said that the cache is empty."""
        self._max_hashes = max_hashes
        self._max_batches = max_batches
        self._stored = array("Q")
        self._times_s: list[float] = []
        self._starts: list[int] = []
        """How many hashes had been stored before each batch."""
        self._lost = _Departures(since_s, max_hashes, max_batches)
        """Keys that left the index."""
        self._removed = _Departures(since_s, max_hashes, max_batches)
        """Hashes, as `mark` has them."""

    def note(self, now_s: float, batch: EventBatch) -> None:
        """A batch was applied."""
        stored = self._stored
        removed: list[BlockRemoved] = []
        self.newest_s = now_s
        self._times_s.append(now_s)
        self._starts.append(len(stored))
        for event in batch.events:
            if isinstance(event, BlockStored):
                _note(stored, event)
            elif isinstance(event, AllBlocksCleared):
                self.cleared_s = now_s
            elif isinstance(event, BlockRemoved):
                removed.append(event)
        self.remove(now_s, removed)
        if len(stored) > 2 * self._max_hashes or len(self._starts) > 2 * self._max_batches:
            self._trim()

    def lose(self, now_s: float, keys: Sequence[BlockKey]) -> None:
        """These left the index because a batch said so, or were pruned."""
        self._lost.add(now_s, keys)

    def remove(self, now_s: float, events: Sequence[BlockRemoved]) -> None:
        """These were taken out of the tables: a batch said so, or they were pruned."""
        if events:
            self._removed.add(now_s, chain.from_iterable(map(_marks, events)))

    def has_lost_since(self, moment_s: float, key: BlockKey) -> bool:
        """Whether a block was held at that moment or later, and is remembered to have left."""
        if self.cleared_s is not None and self.cleared_s >= moment_s:
            return True
        return self._lost.has_since(moment_s, (key,))

    def has_removed_since(self, moment_s: float, marks: Set[int]) -> bool:
        """Whether a copy of one of these was removed at that moment or later."""
        return self._removed.has_since(moment_s, marks)

    def remembers_losses(self, moment_s: float) -> bool:
        """Whether all that left after that moment is still here."""
        return moment_s >= max(self._lost.since_s, self._removed.since_s)

    def reaches(self, moment_s: float) -> bool:
        """Whether all that came after that moment is still here."""
        return moment_s >= self.since_s

    def stored_since(self, moment_s: float, marks: Set[int]) -> Counter[int]:
        """How often each of `marks` was stored by batches that came at that moment or later."""
        first = bisect_left(self._times_s, moment_s)
        if first == len(self._starts):
            return Counter()
        return Counter(filter(marks.__contains__, self._stored[self._starts[first] :]))

    def _trim(self) -> None:
        """Drop the older half. Seldom, so it costs little per batch."""
        starts, stored = self._starts, len(self._stored)
        first = max(len(starts) - self._max_batches, bisect_left(starts, stored - self._max_hashes))
        gone = starts[first] if first < len(starts) else stored
        self.since_s = self._times_s[first - 1]
        del self._stored[:gone], self._times_s[:first]
        self._starts = [start - gone for start in starts[first:]]


def _note(stored: "array[int]", event: BlockStored) -> None:
    hashes = event.hashes
    if event.tier is not _GPU or event.group:
        tier = _TIER_NUMBER[event.tier]
        stored.extend(mark(each, event.group, tier) for each in hashes)
    elif len(hashes) == 1:
        stored.append(hashes[0])
    else:
        stored.fromlist(hashes)  # type: ignore[arg-type]


def _marks(event: BlockRemoved) -> Iterable[int]:
    if event.tier is _GPU and not event.group:
        return event.hashes
    tier = _TIER_NUMBER[event.tier]
    return (mark(each, event.group, tier) for each in event.hashes)
