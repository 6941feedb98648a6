"""Blocks that requests in flight hold on one rank: its KV memory that can't be evicted.

Rules:

1. A block counts once, however many requests share it.
2. Keys are chained and every request covers its prompt from the root on, so what is active of a
   prompt is a run from its start, found by binary search.

Cost: one dict operation per block of a leg, in and out.
"""

from collections import Counter
from collections.abc import Sequence

from indexer.core.types import BlockKey


class ActiveBlocks:
    """The blocks in use on one rank."""

    __slots__ = ("_users",)

    def __init__(self) -> None:
        self._users: Counter[BlockKey] = Counter()

    @property
    def blocks(self) -> int:
        """How many different ones."""
        return len(self._users)

    def add(self, keys: Sequence[BlockKey]) -> None:
        """A request uses them."""
        self._users.update(keys)

    def drop(self, keys: Sequence[BlockKey]) -> None:
        """A request that used them is over."""
        users = self._users
        for key in keys:
            left = users[key] - 1
            if left:
                users[key] = left
            else:
                del users[key]

    def run_blocks(self, keys: Sequence[BlockKey]) -> int:
        """How many of `keys` from the first on are in use."""
        users = self._users
        if not keys or keys[0] not in users:
            return 0
        low, high = 1, len(keys)
        while low < high:
            middle = (low + high) // 2
            if keys[middle] in users:
                low = middle + 1
            else:
                high = middle
        return low
