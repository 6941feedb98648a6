"""What the last batches of one rank stored and lost, to weigh reports about the time before them.

Rules:

1. Engine hashes are noted per group and tier, in the order in which batches were applied, with the
   time of arrival.
2. Beside them the keys that left the index, since what isn't held now may have been in between, and
   the hashes removed, since what is removed and stored in one batch leaves nothing to be seen. Where
   the index has to be told of blocks, the keys that it was told of, too.
3. Bounded by hashes and by batches: the oldest batches go first, whole. `reaches` tells whether all
   since a moment is still there.

Cost: 8 bytes per hash and per key (at most 9 MB a rank, where each batch removes one block; 12 MB where it
stores one, too, and the index has to be told), 0.04 µs to note one in a long event, 0.2 µs
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


class _Dated:
    """Numbers with the moment at which they left, or came, newest last; the oldest go first."""

    __slots__ = ("_kept", "_most", "_most_moments", "_noted", "since_s")

    def __init__(self, since_s: float, most: int, most_moments: int) -> None:
        self.since_s = since_s
        """All that was noted later is here."""
        self._most = most
        self._most_moments = most_moments
        """One with a single number takes as much as one with twenty."""
        self._noted: deque[tuple[float, array[int]]] = deque()
        self._kept = 0

    def add(self, now_s: float, numbers: Iterable[int]) -> None:
        noted = array("Q", numbers)
        if not noted:
            return
        self._noted.append((now_s, noted))
        self._kept += len(noted)
        while self._kept > self._most or len(self._noted) > self._most_moments:
            self.since_s, oldest = self._noted.popleft()
            self._kept -= len(oldest)

    def has_since(self, moment_s: float, wanted: Container[int]) -> bool:
        for noted_s, numbers in reversed(self._noted):
            if noted_s < moment_s:
                return False
            if any(map(wanted.__contains__, numbers)):
                return True
        return False


class RecentBatches:
    """The newest batches of one epoch of one rank. Times are monotonic and never go back."""

    __slots__ = (
        "_gained",
        "_lost",
        "_max_batches",
        "_max_hashes",
        "_removed",
        "_starts",
        "_stored",
        "_times_s",
        "_told_all_s",
        "cleared_s",
        "hears_gains",
        "newest_s",
        "since_s",
    )

    def __init__(
        self,
        since_s: float,
        *,
        hears_gains: bool = False,
        max_hashes: int = 131_072,
        max_batches: int = 16_384,
    ) -> None:
        self.hears_gains = hears_gains
        """`gain` is told of every key that joins the index."""
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
        self._gained = _Dated(since_s, max_hashes, max_batches)
        """Keys that joined the index."""
        self._told_all_s = float("-inf")
        self._lost = _Dated(since_s, max_hashes, max_batches)
        """Keys that left the index."""
        self._removed = _Dated(since_s, max_hashes, max_batches)
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
            else:
                removed.append(event)
        self.remove(now_s, removed)
        if len(stored) > 2 * self._max_hashes or len(self._starts) > 2 * self._max_batches:
            self._trim()

    def lose(self, now_s: float, keys: Sequence[BlockKey]) -> None:
        """These left the index because a batch said so, or were pruned."""
        self._lost.add(now_s, keys)

    def gain(self, now_s: float, keys: Sequence[BlockKey]) -> None:
        """The index was told of these."""
        self._gained.add(now_s, keys)

    def gain_all(self, now_s: float) -> None:
        """The index was told anew of everything."""
        self._told_all_s = now_s

    def remove(self, now_s: float, events: Sequence[BlockRemoved]) -> None:
        """These were taken out of the tables: a batch said so, or they were pruned."""
        if events:
            self._removed.add(now_s, chain.from_iterable(map(_marks, events)))

    def has_lost_since(self, moment_s: float, key: BlockKey) -> bool:
        """Whether a block was held at that moment or later, and is remembered to have left."""
        if self.cleared_s is not None and self.cleared_s >= moment_s:
            return True
        return self._lost.has_since(moment_s, (key,))

    def has_gained_since(self, moment_s: float, key: BlockKey) -> bool:
        """Whether the index was told of a block at that moment or later."""
        return self._told_all_s >= moment_s or self._gained.has_since(moment_s, (key,))

    def has_removed_since(self, moment_s: float, marks: Set[int]) -> bool:
        """Whether a copy of one of these was removed at that moment or later."""
        return self._removed.has_since(moment_s, marks)

    def remembers_losses(self, moment_s: float) -> bool:
        """Whether all that left after that moment is still here."""
        return moment_s >= max(self._lost.since_s, self._removed.since_s)

    def remembers_gains(self, moment_s: float) -> bool:
        """Whether all that the index was told of after that moment is still here."""
        return moment_s >= self._gained.since_s

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
