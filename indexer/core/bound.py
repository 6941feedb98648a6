"""Bounds what one rank's tables may hold.

Rules:

1. After each batch at most `most` hashes are held, all groups and tiers together.
2. The oldest leave first, from the group that has most; of a chain the end leaves before what it
   hangs on (`core.held_blocks`). What left gives no credit, and its removal is no news.
3. Where nothing old can go within a bounded time (one endless chain), the newest blocks of the
   batch are not taken in. Where that isn't enough (its orphans came home), the oldest go by force.
4. When the bound is hit some more leave than must, so that it isn't hit again at once.

Cost: next to nothing until the bound may be hit; then 2 µs per block that has to go.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from indexer.core import store_only
from indexer.core.events import EventBatch
from indexer.core.store_only import StoreOnlyLimits
from indexer.core.types import EngineHash, Tier

_MOST_SPARE = 1024
"""Blocks that leave at once: 2 ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableLimits:
    """How much one rank's tables may hold."""

    max_blocks: int = 2_000_000
    """Hashes, each counted on every tier."""
    max_parked_blocks: int = 65_536
    """Blocks per group that wait for their parent."""
    store_only: StoreOnlyLimits = store_only.USUAL_LIMITS


USUAL_LIMITS: Final = TableLimits()


class Bounded(Protocol):
    """What is asked of a group."""

    @property
    def held_hashes(self) -> int: ...
    @property
    def parked(self) -> int:
        """Blocks that may be held without being announced again."""
        ...

    def evict(self, most: int, *, by_force: bool) -> int:
        """Drop up to `most` of the oldest hashes, even those that others hang on; how many."""
        ...

    def drop(self, engine_hash: EngineHash, tier: Tier) -> None:
        """Drop all copies of a hash, just announced, on a tier."""
        ...


class BlockBound:
    """Of one rank in one epoch."""

    __slots__ = ("_most", "_spare")

    def __init__(self, most: int) -> None:
        self._most = most
        self._spare = min(_MOST_SPARE, most // 16)

    def enforce(
        self, groups: Mapping[int, Bounded], batch: EventBatch, counts: Counter[str]
    ) -> int:
        """Called after `batch` was applied; counts what left as `bound_evicted`.

        Returns how many more hashes may be announced before the bound can be hit.
        """
        held = before = _held(groups)
        if held > self._most:
            _fullest(groups).evict(held - self._most + self._spare, by_force=False)
            if _held(groups) > self._most:
                self._refuse(groups, batch)
            while (held := _held(groups)) > self._most:
                _fullest(groups).evict(held - self._most, by_force=True)
            counts["bound_evicted"] += before - held
        return self._most - held - sum(group.parked for group in groups.values())

    def _refuse(self, groups: Mapping[int, Bounded], batch: EventBatch) -> None:
        """Take back what has just come, newest first, until the bound is kept."""
        for event in reversed(batch.events):
            group = groups.get(event.group) if event.what == "stored" else None
            if event.what != "stored" or group is None:
                continue
            for engine_hash in reversed(event.hashes):
                if _held(groups) <= self._most:
                    return
                group.drop(engine_hash, event.tier)


def _held(groups: Mapping[int, Bounded]) -> int:
    return sum(group.held_hashes for group in groups.values())


def _fullest(groups: Mapping[int, Bounded]) -> Bounded:
    return max(groups.values(), key=lambda group: group.held_hashes)
