"""Has one rank's tables doubt what `core.doubts` says, and believe it again. A few blocks at a time."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from indexer.core.contradictions import MOST_COPIES
from indexer.core.doubts import Doubts, without
from indexer.core.full_group import FullGroup
from indexer.core.recent_batches import mark
from indexer.core.types import BlockKey, EngineHash
from indexer.rank_writer import RankWriter


class RankDoubts:
    """One per judge. It knows nothing until a leg has found a block missing."""

    def __init__(
        self,
        writer: RankWriter,
        *,
        clock: Callable[[], float],
        is_being_told: Callable[[], bool],
    ) -> None:
        """`is_being_told`: a replay is under way."""
        self.is_due = False
        """Something was found since doubts were worked out."""
        self._writer = writer
        self._clock = clock
        self._is_being_told = is_being_told
        self._doubts: Doubts | None = None
        self._group: FullGroup | None = None
        """Whose blocks they are about."""
        self._is_told_anew = False
        """The group is, since doubts were found."""
        self._ranges: Sequence[range] = ()
        """Of what was doubted last."""
        self._proved: list[BlockKey] = []

    def missing(self, key: BlockKey) -> None:
        """The engine lacked a block that the tables have. To be told before it is pruned."""
        group = self._look()
        if group is None:
            return
        if self._doubts is None:
            self._doubts = Doubts(group.held.stored_order(), self._clock())
        self._find(group, self._doubts, key, missing=True)

    def present(self, keys: Iterable[BlockKey]) -> None:
        """The engine had these. One that was stored since says nothing of what was there before."""
        group, doubts = self._look(), self._doubts
        if group is None or doubts is None:
            return
        named = {key: group.held.name_of(key) for key in keys}
        marks = {mark(name, group.spec.group, 0) for name in named.values() if name is not None}
        stored = self._writer.recent.stored_since(doubts.since_s, marks)
        for key, name in named.items():
            if name is None or stored[mark(name, group.spec.group, 0)]:
                continue
            self._find(group, doubts, key, missing=False)
            if group.held.is_doubted(key):
                self._proved.append(key)

    def end(self) -> None:
        """Legs agree in a row: what was found before counts no more. What is doubted stays so."""
        if not self._ranges:
            self._doubts = None

    async def apply(self) -> bool:
        """Doubt what there is to be doubted by now, and nothing else. Whether more is doubted than before."""
        group, doubts = self._look(), self._doubts
        if group is not None and group.held.extended:
            self.present(group.held.extended)
            group.held.extended.clear()
        if group is not None and doubts is not None and self._is_told_anew:
            if self._is_being_told():
                return False
            doubts = self._take_up(group, doubts)
        if not self.is_due or group is None or doubts is None:
            return False
        self.is_due = False
        if not self._writer.recent.reaches(doubts.since_s):
            self._doubts, self._ranges = None, ()  # which of them were stored since isn't known
            return False
        before, self._ranges = self._ranges, doubts.ranges()
        for places in without(before, self._ranges):
            await self._change(doubts.order[places.start : places.stop], group, self._believe)
        for places in without(self._ranges, before):
            await self._change(doubts.order[places.start : places.stop], group, self._doubt)
        proved, self._proved = self._proved, []
        await self._amend(group, lambda: sum(map(group.held.believe_in, proved)))
        return any(without(self._ranges, before))

    def _look(self) -> FullGroup | None:
        """The group that matches are made of. A life told anew is taken up where the last one was."""
        group = self._writer.blocks.first_full()
        if group is self._group:
            return group
        self._ranges, self._proved, self.is_due = (), [], False
        if group is None and self._writer.is_rebuilt:
            return None  # it will be told
        self._group, self._is_told_anew = group, self._writer.is_rebuilt
        if not self._is_told_anew:
            self._doubts = None
        return group

    def _find(self, group: FullGroup, doubts: Doubts, key: BlockKey, *, missing: bool) -> None:
        if self._is_told_anew:
            doubts = self._take_up(group, doubts)
        engine_hash = group.held.name_of(key)
        if engine_hash is not None:
            doubts.found(engine_hash, missing=missing)
            self.is_due = True

    def _take_up(self, group: FullGroup, doubts: Doubts) -> Doubts:
        """What was found of the life that was told again: it may have told of the same ghosts."""
        held = group.held
        self._doubts = doubts.told_anew(held.stored_order(), self._clock(), held.has_copies)
        self._is_told_anew, self.is_due = False, True
        return self._doubts

    async def _change(
        self,
        hashes: Sequence[EngineHash],
        group: FullGroup,
        change: Callable[[FullGroup, Sequence[EngineHash]], int],
    ) -> None:
        for first in range(0, len(hashes), MOST_COPIES):
            some = hashes[first : first + MOST_COPIES]
            await self._amend(group, partial(change, group, some))
            await asyncio.sleep(0)  # nobody waits for all of a large rank

    async def _amend(self, group: FullGroup, change: Callable[[], int]) -> None:
        """Unless another life has begun, or everything was cleared."""
        writer = self._writer
        await writer.keeper.amend(writer.blocks, lambda: change() if self._look() is group else 0)

    def _doubt(self, group: FullGroup, hashes: Sequence[EngineHash]) -> int:
        """But for those that were stored since: they are there."""
        since_s = self._clock() if self._doubts is None else self._doubts.since_s
        marks = {mark(each, group.spec.group, 0): each for each in hashes}
        stored = self._writer.recent.stored_since(since_s, marks.keys())
        return group.held.doubt(each for marked, each in marks.items() if not stored[marked])

    def _believe(self, group: FullGroup, hashes: Sequence[EngineHash]) -> int:
        keys = map(group.key_of, hashes)
        return group.held.believe(key for key in keys if key is not None)
