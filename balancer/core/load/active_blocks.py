"""Blocks that requests in flight hold on one rank: its KV memory that can't be evicted.

Rules:

1. A block counts once, however many requests share it.
2. Keys are chained and every request covers its prompt from the root on, so what is active of a
   prompt is a run from its start, found by binary search.

Cost: `core.load.key_counts`, in and out.
"""

from collections.abc import Sequence

from balancer.core.load.key_counts import KeyCounts
from indexer.core.types import BlockKey


class ActiveBlocks:
    """The blocks in use on one rank."""

    __slots__ = ("_users",)

    def __init__(self) -> None:
        self._users = KeyCounts()

    @property
    def blocks(self) -> int:
        """How many different ones."""
        return len(self._users)

    def add(self, keys: Sequence[BlockKey]) -> None:
        """A request uses them."""
        self._users.add(keys)

    def drop(self, keys: Sequence[BlockKey]) -> None:
        """A request that used them is over."""
        self._users.drop(keys)

    def run_blocks(self, keys: Sequence[BlockKey]) -> int:
        """How many of `keys` from the first on are in use."""
        users = self._users.held
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
