"""The index in memory: the writer's own tables, read; or one set of keys per rank, group and tier.

Rules:

1. Of a full group that is shared (`core.index.BlocksShared`) nothing is kept here: whether a block is
   held is asked of the tables that events write (`core.held_tables`).
2. Of all others (window groups; writers that share nothing) there is a set per tier.
3. Either answers "is this block held", and held means reachable, so a rank's depth is found by
   bisection: 11 probes for 2,048 blocks, of those that any rank has. A rank leaves with its sets, or
   its tables.

Cost: nothing per block of a shared group, 30 to 60 bytes per (block, holder) of another, beside the
key itself.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil, lcm
from typing import Final

from indexer.core.block_tree import TIERS
from indexer.core.index import (
    AllDropped,
    BlocksDropped,
    BlocksHeld,
    BlocksShared,
    Change,
    GroupKind,
    GroupSpec,
    Holds,
    IndexSize,
    KnownBlocks,
    KnownPart,
    PrefixMatch,
    Prompt,
    RankUpdate,
    SharedBlocks,
    StaleEpochError,
)
from indexer.core.types import BlockKey, RankId, Tier, Trust

_SWEPT_KEYS = 1024
"""Keys of departed ranks freed per call: 0.03 ms, so that no lookup waits behind a big one."""

_COUNTED_BLOCKS, _SAMPLES = 64, 16
"""So many blocks are asked one by one on which tier they are; of more, so many and the last."""

Keys = dict[BlockKey, None]
"""A set of keys that no garbage collection walks: as a `set`, each million costs it 60 ms."""


@dataclass(slots=True, eq=False)
class _Holding:
    """One group of one rank in one epoch."""

    spec: GroupSpec
    shared: SharedBlocks | None = None
    """Where its writer keeps what it holds; then there is nothing in `tiers`."""
    tiers: dict[Tier, Keys] = field(default_factory=lambda: {t: {} for t in TIERS})

    @property
    def entries(self) -> int:
        if self.shared is not None:
            return self.shared.reachable_entries
        return sum(len(keys) for keys in self.tiers.values())

    def lookups(self) -> Sequence[tuple[Tier, Holds]]:
        """Tiers that hold any, fastest first: whether a block lies there."""
        if self.shared is not None:
            return self.shared.lookups()
        return [(tier, keys.__contains__) for tier, keys in self.tiers.items() if keys]


@dataclass(slots=True, eq=False)
class _Life:
    """One epoch of one rank."""

    model: str
    epoch: int
    groups: dict[int, _Holding] = field(default_factory=dict)
    fulls: list[_Holding] = field(default_factory=list)
    """Lowest group number first."""
    others: list[_Holding] = field(default_factory=list)
    only: SharedBlocks | None = None
    """What the one group holds, if there is one and its writer shares it."""
    block_size: int | None = None
    """Of the first full group."""
    step_tokens: int = 1
    """Hits end on multiples of this: the least common multiple of the block sizes."""
    clears: int = 0

    def describe(self, holding: _Holding) -> None:
        self.groups[holding.spec.group] = holding
        ordered = [self.groups[number] for number in sorted(self.groups)]
        self.fulls = [each for each in ordered if each.spec.kind is GroupKind.FULL]
        self.others = [each for each in ordered if each.spec.kind is not GroupKind.FULL]
        self.block_size = self.fulls[0].spec.block_size if self.fulls else None
        self.only = holding.shared if len(self.groups) == 1 else None
        self.step_tokens = lcm(*(each.spec.block_size for each in ordered))

    def forget(self) -> None:
        """No group is known."""
        self.groups, self.fulls, self.others = {}, [], []
        self.only = self.block_size = None
        self.step_tokens = 1


class MemoryIndex:
    """A `BlockIndex` for one process. Nothing here awaits, so each call is atomic."""

    never_waits: Final = True
    reads_tables: Final = True

    def __init__(self) -> None:
        self._lives: dict[RankId, _Life] = {}
        self._by_model: dict[str, dict[RankId, _Life]] = {}
        self._trust: dict[RankId, Trust] = {}
        self._reasons: dict[RankId, str] = {}
        """Of what isn't exact."""
        self._leaving: list[Keys] = []

    async def apply(self, update: RankUpdate) -> None:
        life = self._lives.get(update.rank)
        if life is None or update.epoch > life.epoch:
            life = self._open(update)
        elif update.epoch < life.epoch:
            raise StaleEpochError(f"epoch {update.epoch} ended; {life.epoch} is current")
        for change in update.changes:
            self._change(life, change)
        self._sweep()

    async def set_trust(self, rank: RankId, trust: Trust, reason: str = "") -> None:
        self._trust[rank] = trust
        if reason and trust is not Trust.EXACT:
            self._reasons[rank] = reason
        else:
            self._reasons.pop(rank, None)

    async def retire(self, rank: RankId) -> None:
        self._trust.pop(rank, None)
        self._reasons.pop(rank, None)
        self._close(rank)

    async def match(self, prompt: Prompt) -> dict[RankId, PrefixMatch]:
        lives = self._by_model.get(prompt.namespace.model, {})
        trust, exact, reasons = self._trust, Trust.EXACT, self._reasons
        asked = _Asked(prompt)
        return {
            rank: PrefixMatch(
                tokens_by_tier=asked.tokens(life) if life.block_size else {},
                block_size=life.block_size,
                trust=trust.get(rank, exact),
                epoch=life.epoch,
                clears=life.clears,
                reason=reasons.get(rank),
            )
            for rank, life in lives.items()
        }

    async def size(self) -> IndexSize:
        self._sweep()
        by_rank = {
            rank: sum(holding.entries for holding in life.groups.values())
            for rank, life in self._lives.items()
        }
        return IndexSize(entries=sum(by_rank.values()), entries_by_rank=by_rank)

    @property
    def leaving_entries(self) -> int:
        """Entries of departed ranks that are not freed yet. They count nowhere else."""
        return sum(len(keys) for keys in self._leaving)

    def _open(self, update: RankUpdate) -> _Life:
        self._close(update.rank)
        life = _Life(model=update.model, epoch=update.epoch)
        self._lives[update.rank] = life
        self._by_model.setdefault(update.model, {})[update.rank] = life
        return life

    def _close(self, rank: RankId) -> None:
        life = self._lives.pop(rank, None)
        if life is None:
            return
        lives = self._by_model[life.model]
        del lives[rank]
        if not lives:
            del self._by_model[life.model]
        for holding in life.groups.values():
            self._leave(holding)

    def _leave(self, holding: _Holding) -> None:
        self._leaving += [keys for keys in holding.tiers.values() if keys]

    def _change(self, life: _Life, change: Change) -> None:
        if isinstance(change, BlocksDropped):
            self._drop(life.groups[change.group], change)
        elif isinstance(change, BlocksHeld):
            held = life.groups[change.group].tiers[change.tier]
            for key in change.keys:
                held[key] = None
        elif isinstance(change, BlocksShared):
            life.describe(_Holding(life.groups[change.group].spec, change.blocks))
        elif isinstance(change, AllDropped):
            self._empty(life)
        else:
            self._describe(life, change)

    def _drop(self, holding: _Holding, change: BlocksDropped) -> None:
        if holding.shared is None:
            pop = holding.tiers[change.tier].pop
            for key in change.keys:
                pop(key, None)

    def _empty(self, life: _Life) -> None:
        for holding in life.groups.values():
            self._leave(holding)
        life.forget()
        life.clears += 1

    def _describe(self, life: _Life, spec: GroupSpec) -> None:
        known = life.groups.get(spec.group)
        if known is not None:
            if known.spec == spec:
                return
            self._leave(known)
        life.describe(_Holding(spec))

    def _sweep(self) -> None:
        """Free some of what departed ranks held."""
        if not self._leaving:
            return
        keys = self._leaving[-1]
        for _ in range(min(len(keys), _SWEPT_KEYS)):
            keys.popitem()
        if not keys:
            self._leaving.pop()


class _Asked:
    """A prompt while it is looked up: most ranks have one tree, and one block size."""

    __slots__ = ("_known", "_prompt", "_size", "_tree")

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt
        self._tree: KnownBlocks | None = None
        self._size = 0
        self._known = KnownPart(0, (), ())

    def tokens(self, life: _Life) -> dict[Tier, int]:
        """Overlap of a rank that has a full group."""
        only, size = life.only, life.block_size or 0
        if only is None:
            return _match_tokens(life, self._prompt)
        if only.tree is not self._tree or size != self._size:
            self._tree, self._size = only.tree, size
            self._known = only.tree.known(self._prompt.keys_backwards(size))
        blocks = only.depth(self._known)
        if blocks is None:
            return _match_tokens(life, self._prompt)
        return {TIERS[0]: blocks * size} if blocks else {}


def _match_tokens(life: _Life, prompt: Prompt) -> dict[Tier, int]:
    """For a rank that has a full group."""
    first = life.fulls[0]
    size = first.spec.block_size
    tiers = first.lookups()
    if not tiers:
        return {}
    if len(life.groups) > 1:
        blocks = _agreed_tokens(life, prompt) // size
    else:
        blocks = _depth(tiers, prompt.keys_backwards(size))
    if not blocks:
        return {}
    if len(tiers) == 1:
        return {tiers[0][0]: blocks * size}
    return _tokens_by_tier(tiers, prompt.keys(size)[:blocks], size)


def _depth(tiers: Sequence[tuple[Tier, Holds]], backwards: Sequence[BlockKey]) -> int:
    """How many of a prompt's first blocks are held, by bisection: held means reachable.

    From the last block to the first "held" goes from False to True, which is what `bisect` is for.
    """
    if len(tiers) == 1:
        return len(backwards) - bisect_left(backwards, True, key=tiers[0][1])

    def is_held(key: BlockKey) -> bool:
        for _, lies_here in tiers:  # noqa: SIM110 - `any` takes twice as long
            if lies_here(key):
                return True
        return False

    return len(backwards) - bisect_left(backwards, True, key=is_held)


def _tokens_by_tier(
    tiers: Sequence[tuple[Tier, Holds]], keys: Sequence[BlockKey], size: int
) -> dict[Tier, int]:
    """Count each of these keys, all held, at its fastest tier.

    Many are sampled, as in `match.lua`, and where two samples differ the change between them is
    searched for: exact where tiers hold runs. One by one 64 ranks with two tiers took 6 ms.
    """
    *faster, (slowest, _) = tiers

    def fastest(number: int) -> Tier:
        key = keys[number]
        for tier, lies_here in faster:
            if lies_here(key):
                return tier
        return slowest

    last = len(keys) - 1
    step = 1 if len(keys) <= _COUNTED_BLOCKS else ceil(len(keys) / _SAMPLES)
    found = [(number, fastest(number)) for number in (*range(0, last, step), last)]
    blocks = dict.fromkeys((tier for tier, _ in tiers), 0)
    for (start, tier), (end, other) in pairwise(found):
        border = end if other is tier else _change(fastest, start, end)
        blocks[tier] += border - start
        blocks[other] += end - border
    blocks[found[-1][1]] += 1
    return {tier: count * size for tier, count in blocks.items() if count}


def _change(fastest: Callable[[int], Tier], low: int, high: int) -> int:
    """First block after `low`, at most `high`, whose tier isn't that of `low`."""
    tier = fastest(low)
    return bisect_left(range(high), True, low + 1, key=lambda number: fastest(number) is not tier)


def _agreed_tokens(life: _Life, prompt: Prompt) -> int:
    """Where all groups of a hybrid model let a hit end."""
    step = life.step_tokens
    end = min(
        _depth(full.lookups(), prompt.keys_backwards(size)) * size
        for full in life.fulls
        for size in (full.spec.block_size,)
    )
    end -= end % step
    is_agreed = False
    while not is_agreed:
        is_agreed = True
        for holding in life.others:
            allowed = _boundary(holding, prompt, end, step)
            if allowed < end:
                end, is_agreed = allowed, False
    return end


def _boundary(holding: _Holding, prompt: Prompt, end_tokens: int, step_tokens: int) -> int:
    """Largest end, at most `end_tokens`, before which a window or state group has its blocks."""
    size, needed = holding.spec.block_size, holding.spec.boundary_blocks
    lookups = holding.lookups()
    keys = prompt.keys(size)
    step = step_tokens // size
    end = end_tokens // size
    block = end
    while block > 0 and end - block < needed:
        block -= 1
        if not any(lies_here(keys[block]) for _, lies_here in lookups):
            # A hole: no end above it will do until the window has passed it.
            end = block = block - block % step
    return end * size
