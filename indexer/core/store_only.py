"""Blocks that a connector tells of when it stores them, and never when it drops them.

LMCache and Mooncake announce on mediums in lower case (`cpu`), the only sign by which they can be
told from connectors that report removals as well (`CPU`).

Rules:

1. A copy that nobody takes back leaves by age: `ttl_s` after it was last announced, by the
   engine's own clock, or as the oldest when there are more than `max_blocks`.
2. Announced again it is younger, not one copy more.
3. LMCache's hashes are of chunks of its own length (256). A chunk that is a whole number of the
   group's blocks is split into them, under hashes made up from the chunk's: so a chain of
   chunks gives credit beside, and in continuation of, the engine's own blocks. Any other chunk is
   ignored (`odd_chunk`), and so is one whose parent was never told (`unknown_chunk_parent`): it
   is no sign that events were lost.
4. A removal, should a release send one, ends the entry like any other.

Cost: an entry of an ordered dict per copy: 150 bytes, 1 µs. Nothing without such a connector.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec
from xxhash import xxh3_64_intdigest

from indexer.core.block_rows import BlockRow
from indexer.core.events import BlockStored
from indexer.core.full_group import FullGroup
from indexer.core.types import EngineHash
from indexer.core.window_group import WindowGroup

Group = FullGroup | WindowGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOnlyLimits:
    """How long, and how much of it, a rank keeps what nobody takes back."""

    ttl_s: float = 600.0
    max_blocks: int = 200_000


USUAL_LIMITS: Final = StoreOnlyLimits()


class _Copy(NamedTuple):
    """One engine hash in one group and tier, by number."""

    group: int
    tier: int
    engine_hash: EngineHash


class StoreOnly:
    """Copies of one rank that leave by age only, oldest announcement first."""

    __slots__ = ("_announced_s", "_limits", "_restored", "copies")

    def __init__(self, limits: StoreOnlyLimits) -> None:
        self.copies = 0
        """How many there are."""
        self._limits = limits
        self._announced_s: OrderedDict[_Copy, float] = OrderedDict()
        self._restored: list[_Copy] = []
        """Of an earlier process: as young as the first batch that this one sees."""

    def places(self) -> tuple[tuple[int, int], ...]:
        """Groups and tiers in which there are any."""
        copies = (*self._announced_s, *self._restored)
        return tuple(sorted({(copy.group, copy.tier) for copy in copies}))

    def restore(
        self, places: Iterable[tuple[int, int]], rows: Mapping[int, Iterable[BlockRow]]
    ) -> None:
        """Take over copies of which only the place is known."""
        self._restored = [
            _Copy(group, tier, row.engine_hash)
            for group, tier in places
            for row in rows.get(group, ())
            if row.copies[tier]
        ]
        self.copies = len(self._restored)

    def announce(self, event: BlockStored, group: Group, tier: int, now_s: float) -> None:
        """`event` has been stored in `group`: what was there already is one copy still."""
        for engine_hash in event.hashes:
            row = group.row(engine_hash)
            if row is None or not row.copies[tier]:
                continue  # an unknown placeholder
            copy = _Copy(event.group, tier, engine_hash)
            if copy in self._announced_s:
                group.remove([engine_hash], tier)
            self._announced_s[copy] = now_s
            self._announced_s.move_to_end(copy)
        self.copies = len(self._announced_s) + len(self._restored)

    def forget(self, group: int, tier: int, hashes: Iterable[EngineHash]) -> None:
        """They were removed after all."""
        for engine_hash in hashes:
            if self._announced_s.pop(_Copy(group, tier, engine_hash), None) is not None:
                self.copies -= 1

    def clear(self) -> None:
        self._announced_s.clear()
        self._restored.clear()
        self.copies = 0

    def expire(self, groups: Mapping[int, Group], now_s: float) -> None:
        """Take what is too old or too much out of its group."""
        announced_s, limits = self._announced_s, self._limits
        for copy in self._restored:
            announced_s.setdefault(copy, now_s)
        self._restored.clear()
        while announced_s:
            copy, then_s = next(iter(announced_s.items()))
            if len(announced_s) <= limits.max_blocks and now_s - then_s <= limits.ttl_s:
                break
            del announced_s[copy]
            groups[copy.group].remove([copy.engine_hash], copy.tier)
        self.copies = len(announced_s)


def in_blocks_of(
    group: Group | None, event: BlockStored, counts: Counter[str]
) -> BlockStored | None:
    """`event` as it may be stored in `group`; None if it can't be, which is counted."""
    if not event.token_ids:
        if group is None:
            counts["unknown_placeholder"] += len(event.hashes)
        return event
    told = split_chunks(event, group.spec.block_size) if isinstance(group, FullGroup) else None
    if told is None or not isinstance(group, FullGroup):
        counts["odd_chunk"] += 1
        return None
    if told.parent is not None and group.key_of(told.parent) is None:
        counts["unknown_chunk_parent"] += 1
        return None
    return told


def split_chunks(event: BlockStored, block_size: int) -> BlockStored | None:
    """`event` in blocks of `block_size`; None if its chunks aren't whole numbers of them."""
    per_chunk, rest = divmod(event.block_size, block_size)
    if not per_chunk or rest or len(event.token_ids) != len(event.hashes) * event.block_size:
        return None
    if per_chunk == 1:
        return event
    parent = event.parent
    return msgspec.structs.replace(
        event,
        hashes=[_part(chunk, number) for chunk in event.hashes for number in range(per_chunk)],
        parent=None if parent is None else _part(parent, per_chunk - 1),
        block_size=block_size,
        extra_keys=None,
    )


def _part(chunk: EngineHash, number: int) -> EngineHash:
    """Hash of a part of a chunk. 64 bits among a rank's: a clash costs a guess."""
    return EngineHash(xxh3_64_intdigest(b"%d/%d" % (chunk, number)))
