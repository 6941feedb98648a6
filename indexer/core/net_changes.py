"""Keys gained and lost per tier while one batch is applied, net.

A key that came and went again within the batch is not reported at all, so the index is told of
each key at most once and the order of gains and losses doesn't matter.
"""

from collections.abc import Collection, Iterator

from indexer.core.types import BlockKey


class NetChanges:
    """Gains and losses of one group since the last `clear`."""

    __slots__ = ("_gained", "_lost")

    def __init__(self, tiers: int) -> None:
        self._gained: tuple[set[BlockKey], ...] = tuple(set() for _ in range(tiers))
        self._lost: tuple[set[BlockKey], ...] = tuple(set() for _ in range(tiers))

    def gain(self, key: BlockKey, tier: int) -> None:
        lost = self._lost[tier]
        if key in lost:
            lost.discard(key)
        else:
            self._gained[tier].add(key)

    def gain_all(self, keys: Collection[BlockKey], tier: int) -> None:
        """Gain many keys, none of which is held."""
        if self._lost[tier]:
            for key in keys:
                self.gain(key, tier)
        else:
            self._gained[tier].update(keys)

    def lose(self, key: BlockKey, tier: int) -> None:
        gained = self._gained[tier]
        if key in gained:
            gained.discard(key)
        else:
            self._lost[tier].add(key)

    def is_empty(self) -> bool:
        return not any(self._gained) and not any(self._lost)

    def clear(self) -> None:
        for keys in (*self._gained, *self._lost):
            keys.clear()

    def gained(self) -> Iterator[tuple[int, list[BlockKey]]]:
        """Tier and keys, for tiers that gained any."""
        return ((tier, list(keys)) for tier, keys in enumerate(self._gained) if keys)

    def lost(self) -> Iterator[tuple[int, list[BlockKey]]]:
        """Tier and keys, for tiers that lost any."""
        return ((tier, list(keys)) for tier, keys in enumerate(self._lost) if keys)
