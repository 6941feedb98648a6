"""Turns one update into the program of the apply script: which keys, which steps. Pure.

Beside it, how the rank's description changes, so that readers know every key there is.
"""

from collections.abc import Sequence

import msgspec

from indexer.core.block_rows import GroupRows
from indexer.core.block_tree import TIERS
from indexer.core.index import AllDropped, BlocksDropped, BlocksHeld, Change, GroupSpec
from indexer.core.types import Tier
from indexer.redis_index.keys import RankKeys
from indexer.redis_index.packing import (
    TIER_NUMBER,
    GroupEntry,
    group_entry,
    pack_numbers,
    pack_rows,
)

_UNLINK, _ADD, _REMOVE, _WRITE_ROWS, _DROP_ROWS, _WRITE_PLAIN_ROWS = range(6)

Groups = dict[int, GroupEntry]


class Program:
    """Steps on one epoch of one rank. Its keys come after the four that every script has."""

    def __init__(self, keys: RankKeys, epoch: int, groups: Groups) -> None:
        self.keys = [keys.model.generation, keys.model.ranks, keys.life, keys.state]
        self.groups = dict(groups)
        """As they will be."""
        self.clears = 0
        """How often the rank is emptied."""
        self.blobs: list[bytes] = []
        self._steps: list[int] = []
        self._numbers: dict[str, int] = {}
        self._rank = keys
        self._epoch = epoch

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self._steps)

    def add(self, changes: Sequence[Change], rows: Sequence[GroupRows]) -> None:
        for change in changes:
            self._add_change(change)
        for each in rows:
            key = self._rank.rows(self._epoch, each.group)
            if each.gone:
                self._step(_DROP_ROWS, key, pack_numbers(each.gone))
            if each.written:
                self._step(_WRITE_ROWS, key, pack_rows(each.written))
            if each.plain:
                self._step(_WRITE_PLAIN_ROWS, key, pack_numbers(each.plain))

    def unlink(self, epoch: int, groups: Groups) -> None:
        """Remove everything these groups may have in any tier."""
        for entry in groups.values():
            for key in keys_of_group(self._rank, epoch, entry):
                self._step(_UNLINK, key)

    def _add_change(self, change: Change) -> None:
        if isinstance(change, BlocksHeld):
            self._hold(change)
        elif isinstance(change, BlocksDropped):
            self._step(_REMOVE, self._blocks(change.group, change.tier), pack_numbers(change.keys))
        elif isinstance(change, AllDropped):
            self.unlink(self._epoch, self.groups)
            self.groups.clear()
            self.clears += 1
        elif isinstance(change, GroupSpec):
            self._describe(change)

    def _hold(self, change: BlocksHeld) -> None:
        entry = self.groups[change.group]
        tiers = entry.tiers | 1 << TIER_NUMBER[change.tier]
        if tiers != entry.tiers:
            self.groups[change.group] = group_entry(entry.spec, tiers)
        if change.keys:
            self._step(_ADD, self._blocks(change.group, change.tier), pack_numbers(change.keys))

    def _describe(self, spec: GroupSpec) -> None:
        known = self.groups.get(spec.group)
        if known is not None:
            if known.spec == spec:
                return
            self.unlink(self._epoch, {spec.group: known})
        self.groups[spec.group] = group_entry(spec)
        # A write that was taken for failed may have left something here.
        self.unlink(self._epoch, {spec.group: self.groups[spec.group]})

    def _blocks(self, group: int, tier: Tier) -> str:
        size = self.groups[group].block_size
        return self._rank.blocks(self._epoch, group, size, TIER_NUMBER[tier])

    def _step(self, what: int, key: str, blob: bytes | None = None) -> None:
        number = self._numbers.get(key)
        if number is None:
            self.keys.append(key)
            number = self._numbers[key] = len(self.keys)
        self._steps += (what, number)
        if blob is not None:
            self.blobs.append(blob)


def keys_of_group(rank: RankKeys, epoch: int, entry: GroupEntry) -> list[str]:
    """Every key that one group of one epoch can have."""
    sets = [
        rank.blocks(epoch, entry.group, entry.block_size, number) for number in range(len(TIERS))
    ]
    return [*sets, rank.rows(epoch, entry.group)]
