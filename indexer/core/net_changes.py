"""Keys gained and lost per tier while one batch is applied, net.

A key that came and went again within the batch is not reported at all, so the index is told of
each key at most once and the order of gains and losses doesn't matter. Where the index reads the
tables themselves, gains are not reported, and all losses are.
"""

from collections.abc import Collection

from indexer.core.block_tree import TIERS
from indexer.core.index import BlocksDropped, BlocksHeld
from indexer.core.types import BlockKey


class NetChanges:
    """Gains and losses of one group since the last `take`."""

    __slots__ = ("_keeps_gains", "gained", "lost")

    def __init__(self, *, keeps_gains: bool = True) -> None:
        self._keeps_gains = keeps_gains
        self.gained: tuple[set[BlockKey], ...] = tuple(set() for _ in TIERS)
        """By tier. No key is in both: whoever writes here directly sees to that."""
        self.lost: tuple[set[BlockKey], ...] = tuple(set() for _ in TIERS)

    def gain(self, key: BlockKey, tier: int) -> None:
        lost = self.lost[tier]
        if key in lost:
            lost.discard(key)
        elif self._keeps_gains:
            self.gained[tier].add(key)

    def gain_all(self, keys: Collection[BlockKey], tier: int) -> None:
        """Gain many keys, none of which is held."""
        if self.lost[tier]:
            for key in keys:
                self.gain(key, tier)
        elif self._keeps_gains:
            self.gained[tier].update(keys)

    def lose(self, key: BlockKey, tier: int) -> None:
        gained = self.gained[tier]
        if key in gained:
            gained.discard(key)
        else:
            self.lost[tier].add(key)

    def take(self, group: int) -> list[BlocksDropped | BlocksHeld]:
        """What is to be told of the group, and begin anew."""
        changes: list[BlocksDropped | BlocksHeld] = []
        for tier, keys in zip(TIERS, self.lost, strict=True):
            if keys:
                changes.append(BlocksDropped(group, tier, list(keys)))
                keys.clear()
        if not self._keeps_gains:
            return changes
        for tier, keys in zip(TIERS, self.gained, strict=True):
            if keys:
                changes.append(BlocksHeld(group, tier, list(keys)))
                keys.clear()
        return changes

    def clear(self) -> None:
        for keys in (*self.gained, *self.lost):
            keys.clear()
