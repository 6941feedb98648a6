"""What the last batches of one rank stored and lost, to weigh reports about the time before them.

Rules:

1. Engine hashes are noted per group and tier, in the order in which batches were applied, with the
   time of arrival. What was removed shows in what is still held.
2. Beside them the keys that left the index: what isn't held now may have been in between.
3. Bounded by hashes and by batches: the oldest batches go first, whole. `reaches` tells whether all
   since a moment is still there.

Cost: 8 bytes per hash and per key (at most 3 MB a rank), 0.04 µs to note one in a long event, 0.2 µs
for an event of one; a question about the time since a moment reads everything noted since.
"""

from array import array
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence, Set
from typing import Final

from indexer.core.events import AllBlocksCleared, BlockStored, EventBatch
from indexer.core.types import BlockKey, EngineHash, Tier

_TIER_NUMBER: Final = {tier: number for number, tier in enumerate(Tier)}
_GPU: Final = Tier.GPU
_SPREAD: Final = 0x9E37_79B9_7F4A_7C15
_MASK_64: Final = 0xFFFF_FFFF_FFFF_FFFF


def mark(engine_hash: EngineHash, group: int, tier: int) -> int:
    """One number for a hash in a group and tier; of the first group on the GPU it is the hash."""
    return engine_hash ^ (group * len(_TIER_NUMBER) + tier) * _SPREAD & _MASK_64


class RecentBatches:
    """The newest batches of one epoch of one rank. Times are monotonic and never go back."""

    __slots__ = (
        "_lost",
        "_lost_keys",
        "_max_batches",
        "_max_hashes",
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
        self._lost: deque[tuple[float, array[int]]] = deque()
        """Keys, newest last, with the time at which they left."""
        self._lost_keys = 0

    def note(self, now_s: float, batch: EventBatch) -> None:
        """A batch was applied."""
        stored = self._stored
        self.newest_s = now_s
        self._times_s.append(now_s)
        self._starts.append(len(stored))
        for event in batch.events:
            if isinstance(event, BlockStored):
                _note(stored, event)
            elif isinstance(event, AllBlocksCleared):
                self.cleared_s = now_s
        if len(stored) > 2 * self._max_hashes or len(self._starts) > 2 * self._max_batches:
            self._trim()

    def lose(self, now_s: float, keys: Sequence[BlockKey]) -> None:
        """These left the index because a batch said so."""
        self._lost.append((now_s, array("Q", keys)))
        self._lost_keys += len(keys)
        while self._lost_keys > self._max_hashes:
            self._lost_keys -= len(self._lost.popleft()[1])

    def has_lost_since(self, moment_s: float, key: BlockKey) -> bool:
        """Whether a block was held at that moment or later, and is remembered to have left."""
        if self.cleared_s is not None and self.cleared_s >= moment_s:
            return True
        for lost_s, keys in reversed(self._lost):
            if lost_s < moment_s:
                return False
            if key in keys:
                return True
        return False

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
