"""Blocks whose parent is unknown: kept aside until it shows.

Rules:

1. An unknown parent is never a root: a parked block gives no credit.
2. Its copies are counted meanwhile, so a removal of a parked block works.
3. When its parent becomes known the caller takes it, and then whatever waits for it.
4. At most `limit` blocks are parked; the oldest leaves first and is counted by the caller.
"""

from dataclasses import dataclass, field

from indexer.core.types import EngineHash


@dataclass(slots=True, kw_only=True)
class ParkedBlock:
    """What is needed to place a block once its parent is known."""

    parent: EngineHash
    packed: bytes
    extras: bytes
    copies: list[int] = field(default_factory=lambda: [0, 0, 0])
    """Copies per tier, fastest first."""


class Orphans:
    """Parked blocks of one group of one rank."""

    __slots__ = ("_limit", "_waiting", "blocks")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.blocks: dict[EngineHash, ParkedBlock] = {}
        """To be looked at only. In the order they were parked."""
        self._waiting: dict[EngineHash, dict[EngineHash, None]] = {}
        """Parent to the blocks that wait for it."""

    def __len__(self) -> int:
        return len(self.blocks)

    def clear(self) -> None:
        self.blocks.clear()
        self._waiting.clear()

    def park(self, engine_hash: EngineHash, block: ParkedBlock) -> int:
        """Keep a block that is not parked yet. Returns how many older ones had to leave."""
        self.blocks[engine_hash] = block
        self._waiting.setdefault(block.parent, {})[engine_hash] = None
        evicted = 0
        while len(self.blocks) > self._limit:
            self.take(next(iter(self.blocks)))
            evicted += 1
        return evicted

    def has_copy(self, engine_hash: EngineHash, tier: int) -> bool:
        block = self.blocks.get(engine_hash)
        return block is not None and block.copies[tier] > 0

    def count_up(self, engine_hash: EngineHash, tier: int) -> bool:
        """One more copy; False if the block isn't parked."""
        block = self.blocks.get(engine_hash)
        if block is None:
            return False
        block.copies[tier] += 1
        return True

    def count_down(self, engine_hash: EngineHash, tier: int) -> bool:
        """One copy less; the last one takes the block along. False if there was none."""
        block = self.blocks.get(engine_hash)
        if block is None or not block.copies[tier]:
            return False
        block.copies[tier] -= 1
        if not any(block.copies):
            self.take(engine_hash)
        return True

    def take(self, engine_hash: EngineHash) -> ParkedBlock | None:
        """Remove a parked block and return it."""
        block = self.blocks.pop(engine_hash, None)
        if block is None:
            return None
        siblings = self._waiting[block.parent]
        del siblings[engine_hash]
        if not siblings:
            del self._waiting[block.parent]
        return block

    def take_children(self, parent: EngineHash) -> list[tuple[EngineHash, ParkedBlock]]:
        """Remove and return the blocks that wait for `parent`."""
        return [(child, self.blocks.pop(child)) for child in self._waiting.pop(parent, ())]
