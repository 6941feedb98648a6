"""What a restarted indexer needs of each block, beside the keys that lookups read.

Rules:

1. One row per (group, engine hash) that is held, or remembered for its descendants (no copies).
2. A row names its parent by own key. `is_first` says that the parent is a root, so that a row
   whose parent's row is missing is never taken for the beginning of a prompt.
3. Rows change with the batch that changes them: the newest state of each, told once.

Cost: 0.3 µs per plain row, 1.5 µs per other; nothing where no backend keeps them.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import msgspec

from indexer.core.types import BlockKey, EngineHash


class BlockRow(NamedTuple):
    """One engine hash of one group."""

    engine_hash: EngineHash
    key: BlockKey | None
    """None: a window block that nothing has named yet."""
    parent: BlockKey | None
    """None in window and state groups, which need none."""
    is_first: bool
    copies: tuple[int, int, int]
    """Per tier, fastest first."""


class GroupRows(msgspec.Struct, frozen=True, gc=False):
    """How rows of one group change."""

    group: int
    written: Sequence[BlockRow]
    gone: Sequence[EngineHash]
    plain: Sequence[int] = ()
    """More that are written: engine hash, key and parent of blocks that hang under a block and
    have one copy, on the fastest tier. Nearly all are such, and three numbers are quickly made."""

    def rows(self) -> Iterator[BlockRow]:
        """All that are written."""
        yield from self.written
        numbers = iter(self.plain)
        for engine_hash, key, parent in zip(numbers, numbers, numbers, strict=True):
            yield plain_row(EngineHash(engine_hash), BlockKey(key), BlockKey(parent))


def plain_row(engine_hash: EngineHash, key: BlockKey, parent: BlockKey) -> BlockRow:
    """The row that these three numbers stand for."""
    return BlockRow(engine_hash, key, parent, is_first=False, copies=(1, 0, 0))


class RankFacts(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What else of a rank outlives its process."""

    masked: tuple[int, ...] = ()
    """Groups without a kind that left blocks out before they were followed."""
    sized_by_gpu: tuple[int, ...] = ()
    """Groups whose block size a GPU event has told."""
    orphans: int = 0
    """Blocks that wait for their parent: they are not kept."""
    adapters: tuple[tuple[int, int], ...] = ()
    """Root key and present id of each adapter."""
    store_only: tuple[tuple[int, int], ...] = ()
    """Groups and tiers, by number, in which copies leave by age only."""


class RowSource(Protocol):
    """A group that can tell its rows."""

    def plain_rows(
        self, hashes: Iterable[EngineHash]
    ) -> tuple[list[int], list[EngineHash], Iterable[EngineHash]]:
        """What `GroupRows.plain` has, hashes that are gone, and those `row` has to be asked for."""
        ...

    def row(self, engine_hash: EngineHash) -> BlockRow | None:
        """None: nothing is left of it."""
        ...


def rows_of(number: int, group: RowSource, hashes: Iterable[EngineHash]) -> GroupRows:
    """The newest rows of these hashes."""
    written: list[BlockRow] = []
    plain, gone, rest = group.plain_rows(hashes)
    for engine_hash in rest:
        row = group.row(engine_hash)
        if row is None:
            gone.append(engine_hash)
        else:
            written.append(row)
    return GroupRows(number, written, gone, plain)
