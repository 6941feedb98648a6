"""How likely a block is asked for again, by how long nobody has asked for it.

A life table over the prompts of the whole fleet: of the blocks that nobody had asked for in so long,
how many were asked for before they had waited until the next age. From that the chance follows that
one is ever asked for again.

Rules:

1. Sampled: of every prompt one block in `SAMPLE_TOKENS` tokens, always at the same depths. Keys are
   chained, so who shares a prefix shares its samples. What a short prompt leaves is not seen.
2. Ages are told apart by 16 bins, each 1.6 times as long as the one before. Uses within the first
   bin's length form one batch, which ages as a whole.
3. A block of whose fate nothing is known yet, or any more, says nothing of the ages it didn't reach:
   so neither a young table nor a bounded one is biased.
4. Bounded: past `MAX_BLOCKS` the sample is thinned by half, by key, and starts anew. What was learned
   stays, and fades with what is learned after it.

Cost: 0.1 µs per sampled block; a few µs per quarter of a second.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence

from indexer.core.types import BlockKey

SAMPLE_TOKENS = 512
FIRST_AGE_S = 0.25
AGE_RATIO = 1.6
BINS = 16
AGES_S = tuple(FIRST_AGE_S * AGE_RATIO**number for number in range(BINS))
"""Where each bin ends."""
MAX_BLOCKS = 16_384
MAX_COUNTED = 16_384
"""Fates after which old ones count half."""
DOUBT = 4
"""Blocks of which nothing is known, added to every bin: none of them is asked for again."""


def sampled(keys: Sequence[BlockKey], block_size: int) -> Sequence[BlockKey]:
    """The blocks of a prompt that are looked at."""
    stride = sample_blocks(block_size)
    return keys[stride // 2 :: stride]


def sample_blocks(block_size: int) -> int:
    """How many blocks each sampled one stands for."""
    return max(1, SAMPLE_TOKENS // block_size)


class _Batch:
    """Blocks that were last asked for at about the same time."""

    __slots__ = ("at_s", "bin", "blocks", "keys")

    def __init__(self, at_s: float) -> None:
        self.at_s = at_s
        self.bin = 0
        self.blocks = 0
        """Those that nobody has asked for since."""
        self.keys: list[BlockKey] = []


class ReuseTimes:
    """Of a fleet."""

    def __init__(self) -> None:
        self._last: dict[BlockKey, _Batch] = {}
        self._bins: list[deque[_Batch]] = [deque() for _ in range(BINS)]
        self._reused = [0.0] * BINS
        self._passed = [0.0] * BINS
        self._chances = [0.0] * (BINS + 1)
        self._thinning = 0
        self._newest = _Batch(float("-inf"))

    def chance(self, idle_s: float) -> float:
        """That a block nobody asked for in so long is asked for again."""
        return self._chances[bisect_right(AGES_S, idle_s)]

    def used(self, keys: Sequence[BlockKey], now_s: float) -> None:
        """A prompt was sent; `keys` are sampled."""
        batch, last = self._newest, self._last
        if now_s - batch.at_s >= FIRST_AGE_S:
            batch = self._open(now_s)
        if self._thinning:
            keys = [key for key in keys if not key & self._thinning]
        for key in keys:
            before = last.get(key)
            if before is batch:
                continue
            if before is not None:
                before.blocks -= 1
                self._reused[before.bin] += 1
            last[key] = batch
            batch.keys.append(key)
            batch.blocks += 1

    def _open(self, now_s: float) -> _Batch:
        if len(self._last) > MAX_BLOCKS:
            self._thin()
        self._grow_older(now_s)
        self._learn()
        self._newest = _Batch(now_s)
        self._bins[0].append(self._newest)
        return self._newest

    def _grow_older(self, now_s: float) -> None:
        for number, batches in enumerate(self._bins):
            until_s = now_s - AGES_S[number]
            while batches and batches[0].at_s <= until_s:
                batch = batches.popleft()
                self._passed[number] += batch.blocks
                if number + 1 < BINS and batch.blocks:
                    batch.bin = number + 1
                    self._bins[batch.bin].append(batch)
                else:
                    self._forget(batch)

    def _forget(self, batch: _Batch) -> None:
        if batch.blocks:
            for key in batch.keys:
                if self._last.get(key) is batch:
                    del self._last[key]

    def _thin(self) -> None:
        self._thinning = self._thinning * 2 + 1
        self._last.clear()
        for batches in self._bins:
            batches.clear()

    def _learn(self) -> None:
        never = 1.0
        for number in range(BINS - 1, -1, -1):
            reused, passed = self._reused[number], self._passed[number]
            never *= (passed + DOUBT) / (reused + passed + DOUBT)
            self._chances[number] = 1 - never
        if sum(self._reused) + self._passed[0] > MAX_COUNTED:
            self._reused = [count / 2 for count in self._reused]
            self._passed = [count / 2 for count in self._passed]
