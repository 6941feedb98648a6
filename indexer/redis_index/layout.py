"""What one lookup asks: keys and program of the match script, worked out once per generation. Pure.

Cost of a build: 10 µs per rank. It is done anew only when a rank opened an epoch, left, changed its
trust, or got a group or tier: not for blocks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import lcm

import msgspec

from indexer.core.block_tree import TIERS
from indexer.core.index import GroupKind, PrefixMatch, Prompt
from indexer.core.types import RankId
from indexer.redis_index.keys import ModelKeys, RankKeys
from indexer.redis_index.packing import (
    GroupEntry,
    PackedKeys,
    RankEntry,
    decode_entry,
    pack_numbers,
    tiers_in,
    unpack_tokens,
)

_ABSENT = 2**32 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Ranks of one model as of one generation."""

    generation: bytes
    keys: PackedKeys
    epochs: bytes
    program: bytes
    block_sizes: Sequence[int]
    nothing_held: Sequence[tuple[RankId, PrefixMatch]]
    """What to say of each rank that holds nothing of a prompt."""

    def arguments(self, prompt: Prompt, max_blocks: int) -> list[bytes]:
        """ARGV of the match script."""
        blobs = [
            pack_numbers(prompt.keys(size)[: min(prompt.hit_limit_blocks(size), max_blocks)])
            for size in self.block_sizes
        ]
        return [self.generation, self.epochs, self.program, *blobs]

    def matches(self, answer: bytes) -> dict[RankId, PrefixMatch]:
        """What the match script's answer says."""
        tokens = iter(unpack_tokens(answer))
        matches = {}
        for (rank, match), *counts in zip(self.nothing_held, tokens, tokens, tokens, strict=True):
            if counts[0] == _ABSENT:
                continue
            if any(counts):
                by_tier = {tier: count for tier, count in zip(TIERS, counts, strict=True) if count}
                matches[rank] = PrefixMatch(
                    tokens_by_tier=by_tier,
                    block_size=match.block_size,
                    trust=match.trust,
                    epoch=match.epoch,
                    clears=match.clears,
                    reason=match.reason,
                )
            else:
                matches[rank] = match
        return matches


def build_layout(
    keys: ModelKeys, generation: bytes, table: Mapping[bytes, bytes] | Sequence[bytes]
) -> Layout:
    """From the table of ranks. Entries that can't be read are another version's: left out."""
    entries = []
    for value in _values(table):
        try:
            entries.append(decode_entry(value))
        except msgspec.DecodeError:
            continue
    plan = _Plan(keys, entries)
    return Layout(
        generation=generation,
        keys=PackedKeys(plan.keys),
        epochs=msgspec.msgpack.encode([str(entry.epoch) for entry in entries]),
        program=msgspec.msgpack.encode(plan.program),
        block_sizes=tuple(plan.sizes),
        nothing_held=tuple((entry.id, _nothing_held(entry)) for entry in entries),
    )


def _values(table: Mapping[bytes, bytes] | Sequence[bytes]) -> Sequence[bytes]:
    """RESP3 tells a hash as a map, RESP2 as fields and values in turn; a script always as the latter."""
    return list(table.values()) if isinstance(table, Mapping) else table[1::2]


def _nothing_held(entry: RankEntry) -> PrefixMatch:
    sizes = (group.block_size for group in entry.groups if group.kind is GroupKind.FULL)
    return PrefixMatch(
        tokens_by_tier={},
        block_size=next(sizes, None),
        trust=entry.trust,
        epoch=entry.epoch,
        clears=entry.clears,
        reason=entry.reason or None,
    )


class _Plan:
    """Keys and program, as they grow rank by rank."""

    def __init__(self, keys: ModelKeys, entries: Sequence[RankEntry]) -> None:
        ranks = [keys.rank(entry.id) for entry in entries]
        self.keys = [keys.generation, keys.ranks, *(rank.life for rank in ranks)]
        self.program: list[int] = []
        self.sizes: list[int] = []
        for rank, entry in zip(ranks, entries, strict=True):
            self._add_rank(rank, entry)

    def _add_rank(self, rank: RankKeys, entry: RankEntry) -> None:
        if len(entry.groups) == 1 and self._add_plainly(rank, entry.epoch, entry.groups[0]):
            return
        self.program.append(lcm(*(group.block_size for group in entry.groups)))
        fulls = [group for group in entry.groups if group.kind is GroupKind.FULL]
        others = [group for group in entry.groups if group.kind is not GroupKind.FULL]
        for groups in (fulls, others):
            self.program.append(len(groups))
            for group in groups:
                self._add_group(rank, entry.epoch, group)

    def _add_plainly(self, rank: RankKeys, epoch: int, group: GroupEntry) -> bool:
        """Describe a rank with one full group on one tier in short; whether it is one."""
        tiers = tiers_in(group.tiers)
        if group.kind is not GroupKind.FULL or len(tiers) != 1:
            return False
        ((number, _),) = tiers
        self.keys.append(rank.blocks(epoch, group.group, group.block_size, number))
        size = group.block_size
        self.program += (0, self._list_of(size), size, number + 1, len(self.keys))
        return True

    def _list_of(self, block_size: int) -> int:
        """Number of the list of the prompt's keys in blocks of that size."""
        if block_size not in self.sizes:
            self.sizes.append(block_size)
        return self.sizes.index(block_size) + 1

    def _add_group(self, rank: RankKeys, epoch: int, group: GroupEntry) -> None:
        tiers = tiers_in(group.tiers)
        self.program += (
            self._list_of(group.block_size),
            group.block_size,
            group.spec.boundary_blocks,
            len(tiers),
        )
        for number, _ in tiers:
            self.keys.append(rank.blocks(epoch, group.group, group.block_size, number))
            self.program += (number + 1, len(self.keys))
