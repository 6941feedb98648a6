"""One rank's tables as `core.contradictions` sees them: the group that matches are made of."""

from collections.abc import Iterable

from indexer.core.held_tables import HeldCopies
from indexer.core.rank_blocks import RankBlocks
from indexer.core.types import BlockKey


class RankHoldings:
    """`contradictions.Holdings` over the tables of one epoch."""

    def __init__(self, blocks: RankBlocks) -> None:
        self.blocks = blocks

    @property
    def full_group(self) -> int:
        """Its number; -1: there is none."""
        first = self.blocks.first_full()
        return -1 if first is None else first.spec.group

    @property
    def has_one_group(self) -> bool:
        return len(self.blocks.groups) == 1

    def holds(self, key: BlockKey) -> bool:
        """Whether that group has a block, reachable or not."""
        first = self.blocks.first_full()
        return first is not None and first.held.holds(key)

    def is_doubted(self, key: BlockKey) -> bool:
        """Whether that group has a block, and it or one above it isn't believed in."""
        first = self.blocks.first_full()
        return first is not None and first.held.is_doubted(key)

    def copies_below(self, key: BlockKey) -> Iterable[HeldCopies]:
        """Every copy of a block and of all its descendants in that group."""
        first = self.blocks.first_full()
        return () if first is None else first.held.copies_below(key)
