"""What one rank without events probably holds: the blocks of prompts that legs have left there.

Rules:

1. A block is guessed to be held until `ttl_s` after the last leg that used it. Of one prompt the tail
   counts as used before its root, as in vLLM's own order of eviction.
2. Engines evict what was used longest ago. So when one turns out not to have a block that was guessed,
   every block that was last used no later than that one goes with it.
3. Bounded: past `max_blocks` the blocks used longest ago go.

Cost: two dict operations per block of a leg; a lookup is log2(blocks) of them.
"""

from collections import OrderedDict
from collections.abc import Sequence

from indexer.core.types import BlockKey


class ApproximateBlocks:
    """One rank's. Times are monotonic."""

    __slots__ = ("_max_blocks", "_used_s")

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._used_s: OrderedDict[BlockKey, float] = OrderedDict()
        """When each block was used last, longest ago first."""

    def __len__(self) -> int:
        return len(self._used_s)

    def add(self, keys: Sequence[BlockKey], now_s: float) -> None:
        """A leg has computed or reused this chain of blocks."""
        used_s = self._used_s
        for key in reversed(keys):
            used_s[key] = now_s
            used_s.move_to_end(key)
        for _ in range(len(used_s) - self._max_blocks):
            used_s.popitem(last=False)

    def purge(self, before_s: float) -> None:
        """Drop what was used last before that moment."""
        used_s = self._used_s
        while used_s and next(iter(used_s.values())) < before_s:
            used_s.popitem(last=False)

    def on_missing(self, key: BlockKey, asked_s: float) -> None:
        """The engine did not have a block when it was asked, at `asked_s` or later.

        That it was used since then says nothing of what was there before.
        """
        if self._used_s.get(key, asked_s) >= asked_s:
            return
        while self._used_s.popitem(last=False)[0] != key:
            pass

    def run_blocks(self, keys: Sequence[BlockKey], start: int) -> int:
        """How many of `keys` from `start` on are guessed to be held without a gap."""
        used_s = self._used_s
        low, high = start, len(keys)
        while low < high:  # a chain loses its tail first
            middle = (low + high) // 2
            if keys[middle] in used_s:
                low = middle + 1
            else:
                high = middle
        return low - start
