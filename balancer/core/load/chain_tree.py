"""Chains of block keys on one rank, each beginning that some share kept once.

Rules:

1. A key names its block and everything before it. So chains that share a key share all before it,
   and how far two go together is found by bisection: nobody looks at every block.
2. A stretch is a run of blocks that the same chains pass through. It ends where a chain ends, or
   where two part: there are at most twice as many stretches as chains.
3. A chain is taken out by the stretch it ended in, once, and as what it was put in.
4. Chains in use and chains that are expected lie in one tree: it takes one walk to find both, and most
   are both. Looking at a tree is mostly waiting for memory.
5. Trees of different ranks share nothing but where they begin: who asks all of them about a prompt
   looks its first block up once.
6. A chain leaves what others share in one place, a prompt in another, and they part where the first of
   them does. Both are known from those who parted before: that is tried before anything is searched for.

Cost: per chain, in, out or looked up, one step per stretch it passes, and where it ends within one two
comparisons or log2(blocks). A set of keys takes one step per block, and that of every chain.
"""

from collections.abc import Sequence

import msgspec

from indexer.core.types import BlockKey, RankId


class Stretch(msgspec.Struct, eq=False):
    """Blocks `start` to `end` of a chain."""

    above: "Stretch | None"
    """None: the root, which holds no block."""
    keys: Sequence[BlockKey]
    """Of some chain that passes through, from its beginning."""
    start: int
    end: int
    first: BlockKey
    """By which `above` knows it."""
    chains: int = 0
    """How many pass through or end here."""
    used: int = 0
    """Those of them that are in use; the others are expected."""
    parted: int = 0
    """How far those that parted from it went at most: often where its chain left what others share."""
    following: "dict[BlockKey, Stretch]" = msgspec.field(default_factory=dict)
    """By their first keys."""


Begun = dict[BlockKey, dict[RankId, Stretch]]
"""By their first keys, of every rank that has any: its chains up to where they end or part."""


class _Tops(dict[BlockKey, Stretch]):
    """What follows a root, told to all ranks' `Begun` as well."""

    __slots__ = ("_begun", "_rank")

    def __init__(self, begun: Begun, rank: RankId) -> None:
        self._begun = begun
        self._rank = rank

    def __setitem__(self, first: BlockKey, top: Stretch) -> None:
        super().__setitem__(first, top)
        self._begun.setdefault(first, {})[self._rank] = top

    def __delitem__(self, first: BlockKey) -> None:
        super().__delitem__(first)
        ranks = self._begun[first]
        del ranks[self._rank]
        if not ranks:
            del self._begun[first]


class ChainTree:
    """Two multisets of chains: in use, and expected."""

    __slots__ = ("_root", "used_blocks")

    def __init__(self, begun: Begun, rank: RankId) -> None:
        """`rank` is the tree's; `begun` that of all ranks, or one of its own."""
        self._root = Stretch(None, (), 0, 0, BlockKey(0), following=_Tops(begun, rank))
        self.used_blocks = 0
        """How many different ones are in use; to be looked at only."""

    def add(self, keys: Sequence[BlockKey], *, used: bool = False) -> Stretch:
        """One more chain; what it is to be dropped by."""
        above = self._root
        at, last = 0, len(keys)
        while at < last:
            first = keys[at]
            found = above.following.get(first)
            if found is None:
                found = above.following[first] = Stretch(above, keys, at, last, first)
            else:
                common = _common(found, keys, 0)
                if common < found.end:
                    found = _split(found, common, above)
            found.chains += 1
            if used:
                found.used += 1
                if found.used == 1:
                    self.used_blocks += found.end - at
            above, at = found, found.end
        return above

    def drop(self, end: Stretch, *, used: bool = False) -> None:
        """The chain that ended there is out."""
        each = end
        while (above := each.above) is not None:
            each.chains -= 1
            if used:
                each.used -= 1
                if not each.used:
                    self.used_blocks -= each.end - each.start
            if not each.chains:
                del above.following[each.first]
            elif len(each.following) == 1:
                _join(each, above)
            each = above


def run_blocks(top: Stretch | None, keys: Sequence[BlockKey], near: int = 0) -> tuple[int, int]:
    """How many of `keys` from the first on are expected, and in use, on the rank of `top`.

    `top` is where its chains with this first key begin. Perhaps it is `near`.
    """
    at, last = 0, len(keys)
    expected = used = 0
    while top is not None:
        at = _common(top, keys, near)
        if top.used:
            used = at
        if top.chains > top.used:
            expected = at
        if at < top.end or at == last:
            break
        top = top.following.get(keys[at])
    return expected, used


def _common(stretch: Stretch, keys: Sequence[BlockKey], near: int) -> int:
    """Where `keys`, which enter `stretch`, leave it or end; perhaps it is at `near`."""
    known, parted = stretch.keys, stretch.parted
    low, high = stretch.start + 1, min(stretch.end, len(keys))
    most = high
    for guess in (near, parted) if near < parted or not parted else (parted, near):
        if low <= guess < high:
            if keys[guess - 1] != known[guess - 1]:
                high = guess - 1
            elif keys[guess] != known[guess]:
                low = high = guess
            else:
                low = guess + 1
    if low < high:
        is_whole = high == most and keys[high - 1] == known[high - 1]
        low = high if is_whole else _searched(known, keys, low, high)
    if parted < low < most:
        stretch.parted = low
    return low


def _searched(known: Sequence[BlockKey], keys: Sequence[BlockKey], low: int, high: int) -> int:
    """Where they part, if it is somewhere from `low` to `high`."""
    while low < high:
        middle = (low + high) // 2
        if keys[middle] == known[middle]:
            low = middle + 1
        else:
            high = middle
    return low


def _split(stretch: Stretch, at: int, above: Stretch) -> Stretch:
    """Its part before `at`, as a stretch of its own. Who ended in `stretch` still does."""
    before = Stretch(above, stretch.keys, stretch.start, at, stretch.first)
    before.chains, before.used = stretch.chains, stretch.used
    above.following[before.first] = before
    stretch.above, stretch.start, stretch.first = before, at, stretch.keys[at]
    before.following[stretch.first] = stretch
    return before


def _join(stretch: Stretch, above: Stretch) -> None:
    """Make one of it and the only one that follows, if no chain ends between them."""
    (after,) = stretch.following.values()
    if after.chains == stretch.chains:
        after.above, after.start, after.first = above, stretch.start, stretch.first
        above.following[after.first] = after
