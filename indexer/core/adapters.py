"""Lives of LoRA adapters: one unloaded, another loaded under its name.

Rules:

1. Ids rise, so the largest id seen with a name is the present life. A store that names a larger
   one ends the credit of everything stored under that name before; a store that names a smaller
   one comes from a request of the old life and gives no credit.
2. Between 0.11.1 and 0.30 engines hash the name only: they take the old weights' blocks for the new
   adapter's and build on them. What hangs under an ended block gives no credit either, and
   its copies are counted apart, so that a removal never takes a block of the present life.
3. Where a name has had one life, as nearly always, nothing is kept apart.
4. Of adapters without a block the `MOST_IDLE` that had one last are remembered, for requests of an
   old life that are still under way: services that load one for each user name ever new ones.
5. Whose blocks under a salt are can't be told after a restart: salts are not kept. They give credit
   until an adapter begins another life, or may do so (a new name, where one may be forgotten): then
   all of them end. That can cost other tenants credit; none gets any for old weights.

Not handled: an adapter reloaded in place keeps its id, its name and its path, and the engine keeps
the old weights' blocks itself. Nothing in any event tells of it.

Cost: a dict entry per block of an adapter, and per adapter that has one; a reload looks at all
blocks once.
"""

from collections.abc import Iterable, Mapping, Sequence

from indexer.core.block_rows import BlockRow
from indexer.core.events import BlockStored
from indexer.core.full_group import FullGroup
from indexer.core.hashing import Namespace, root_key
from indexer.core.types import BlockKey, EngineHash
from indexer.core.window_group import WindowGroup

Group = FullGroup | WindowGroup

MOST_IDLE = 128
"""Adapters without a block whose id is known."""

Place = tuple[int, EngineHash]
"""Number of the group, engine hash."""


class Adapters:
    """The adapters of one rank."""

    __slots__ = (
        "_blocks",
        "_ended",
        "_idle",
        "_ids",
        "_model",
        "_newest",
        "_root_of",
        "_unsure",
        "are_known",
    )

    def __init__(self, model: str) -> None:
        self.are_known = False
        """Some adapter has been named."""
        self._model = model
        self._newest: dict[BlockKey, int] = {}
        """Present id of each adapter, named by its root key without a salt."""
        self._ids: tuple[tuple[int, int], ...] | None = ()
        """What `ids` said last; None: not any more."""
        self._root_of: dict[Place, BlockKey] = {}
        """Blocks of present lives, each with its adapter."""
        self._blocks: dict[BlockKey, int] = {}
        """How many those are, of each adapter that has any."""
        self._idle: dict[BlockKey, None] = {}
        """All others of `_newest`: the one that had a block last comes last."""
        self._ended: dict[Place, int] = {}
        """Copies of blocks of ended lives, and of what was stored under them."""
        self._unsure: set[Place] = set()
        """Blocks of an earlier process that any adapter may have stored."""

    def __len__(self) -> int:
        return len(self._root_of) + len(self._ended) + len(self._unsure)

    def ids(self) -> tuple[tuple[int, int], ...]:
        """Root key and present id of each adapter: what outlives the process."""
        if self._ids is None:
            self._ids = tuple(self._newest.items())
        return self._ids

    def clear(self) -> None:
        """No block is held any more. Ids stay: they don't fall."""
        for root in tuple(self._blocks):
            self._lose(root, self._blocks[root])
        self._root_of.clear()
        self._ended.clear()
        self._unsure.clear()

    def admits(self, event: BlockStored, groups: Mapping[int, Group]) -> bool:
        """Whether the event's blocks may give credit; if not, their copies are counted here.

        If it begins another life of its adapter, all blocks of the one before leave `groups`.
        """
        lora, lora_id, number = event.lora, event.lora_id, event.group
        root = None
        is_ended = self._hangs_under_ended(event)
        if lora is not None and lora_id is not None:
            self.are_known = True
            root = root_key(Namespace(model=self._model, lora=lora))
            newest = self._newest.get(root)
            if newest is None or lora_id > newest:
                self._begin_life(root, lora_id, groups)
                is_ended = self._hangs_under_ended(event)
            is_ended = is_ended or lora_id < self._newest[root]
        places = [(number, each) for each in event.hashes]
        if is_ended:
            for place in places:
                self._count_ended(place, 1)
        else:
            self._unsure.difference_update(places)
            if root is not None:
                self._hold(root, places)
        return not is_ended

    def remove(self, number: int, group: Group, hashes: Sequence[EngineHash], tier: int) -> None:
        """One copy of each hash went: of an ended block if there is one, else the group's."""
        ended, others = self._ended, []
        for each in hashes:
            left = ended.get((number, each), 0) - 1
            if left > 0:
                ended[number, each] = left
            elif left == 0:
                del ended[number, each]
            else:
                others.append(each)
        group.remove(others, tier)
        for each in others:
            place = number, each
            if place in self._root_of and not _copies(group, each):
                self._lose(self._root_of.pop(place), 1)
            elif place in self._unsure and not _copies(group, each):
                self._unsure.remove(place)

    def restore(
        self, ids: Iterable[tuple[int, int]], rows: Mapping[int, Iterable[BlockRow]]
    ) -> None:
        """Take over an earlier process's."""
        self._newest, self._ids = {BlockKey(root): lora_id for root, lora_id in ids}, None
        if not self._newest:
            return
        self.are_known = True
        every = [(group, row) for group, each in rows.items() for row in each]
        children = _children(row for _, row in every)
        root_of = {key: root for root in self._newest for key in _descendants(root, children)}
        unsalted = _descendants(root_key(Namespace(model=self._model)), children)
        for group, row in every:
            place = group, row.engine_hash
            if row.key in root_of and any(row.copies):
                self._hold(root_of[row.key], [place])
            elif row.key not in unsalted and any(row.copies):
                self._unsure.add(place)
        for root in [each for each in self._newest if each not in self._blocks]:
            self._rest(root)

    def _hold(self, root: BlockKey, places: Sequence[Place]) -> None:
        """These are blocks of an adapter now, whosever they were."""
        for place in places:
            before = self._root_of.get(place)
            if before != root:
                self._root_of[place] = root
                self._blocks[root] = self._blocks.get(root, 0) + 1
                self._idle.pop(root, None)
                if before is not None:
                    self._lose(before, 1)

    def _lose(self, root: BlockKey, blocks: int) -> None:
        left = self._blocks[root] - blocks
        if left:
            self._blocks[root] = left
        else:
            del self._blocks[root]
            self._rest(root)

    def _rest(self, root: BlockKey) -> None:
        """It has no block; whichever has had none for longest is forgotten."""
        self._idle[root] = None
        if len(self._idle) > MOST_IDLE:
            oldest = next(iter(self._idle))
            del self._idle[oldest], self._newest[oldest]
            self._ids = None

    def _begin_life(self, root: BlockKey, lora_id: int, groups: Mapping[int, Group]) -> None:
        is_known = root in self._newest
        if is_known or len(self._newest) >= MOST_IDLE:  # where there are fewer, none was forgotten
            unsure, self._unsure = self._unsure, set()
            self._end(unsure, groups)
        self._newest[root], self._ids = lora_id, None
        if not is_known:
            self._rest(root)
        self._end_life(root, groups)

    def _end_life(self, root: BlockKey, groups: Mapping[int, Group]) -> None:
        if root not in self._blocks:
            return
        ended = [place for place, owner in self._root_of.items() if owner == root]
        for place in ended:
            del self._root_of[place]
        self._end(ended, groups)
        self._lose(root, len(ended))

    def _end(self, places: Iterable[Place], groups: Mapping[int, Group]) -> None:
        for number, engine_hash in places:
            copies = _take_out(groups[number], engine_hash)
            self._count_ended((number, engine_hash), copies)

    def _count_ended(self, place: Place, copies: int) -> None:
        if copies:
            self._ended[place] = self._ended.get(place, 0) + copies

    def _hangs_under_ended(self, event: BlockStored) -> bool:
        group, ended = event.group, self._ended
        if not ended:
            return False
        if event.parent is not None and (group, event.parent) in ended:
            return True
        return any((group, each) in ended for each in event.hashes)


def _take_out(group: Group, engine_hash: EngineHash) -> int:
    """Remove every copy of a hash. Returns how many there were."""
    if isinstance(group, FullGroup):
        parked = group.orphans.take(engine_hash)
        if parked is not None:
            return sum(parked.copies)
    copies = _copies(group, engine_hash)
    for tier, count in enumerate(copies):
        group.remove([engine_hash] * count, tier)
    return sum(copies)


def _copies(group: Group, engine_hash: EngineHash) -> tuple[int, ...]:
    row = group.row(engine_hash)
    return row.copies if row is not None and any(row.copies) else ()


def _children(rows: Iterable[BlockRow]) -> Mapping[BlockKey, Sequence[BlockKey]]:
    children: dict[BlockKey, list[BlockKey]] = {}
    for row in rows:
        if row.key is not None and row.parent is not None:
            children.setdefault(row.parent, []).append(row.key)
    return children


def _descendants(root: BlockKey, children: Mapping[BlockKey, Sequence[BlockKey]]) -> set[BlockKey]:
    found: set[BlockKey] = set()
    waiting = [root]
    while waiting:
        for child in children.get(waiting.pop(), ()):
            if child not in found:
                found.add(child)
                waiting.append(child)
    return found
