"""Chains of block keys on one rank, each beginning that some share kept once.

Rules:

1. A key names its block and everything before it. So chains that share a key share all before it,
   and how far two go together is found by bisection: nobody looks at every block.
2. A stretch is a run of blocks that the same chains pass through. It ends where a chain ends, or
   where two part: there are at most twice as many stretches as chains.
3. A chain is taken out by the stretch it ended in, once. After `clear` none of before may be.

Cost: per chain, in, out or looked up, one step per stretch it passes and log2(blocks) where it ends
within one. A set of keys takes one step per block, and that of every chain.
"""

from collections.abc import Sequence

import msgspec

from indexer.core.types import BlockKey


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
    following: "dict[BlockKey, Stretch]" = msgspec.field(default_factory=dict)
    """By their first keys."""


def _root() -> Stretch:
    return Stretch(None, (), 0, 0, BlockKey(0))


class ChainTree:
    """A multiset of chains."""

    __slots__ = ("_root", "blocks")

    def __init__(self) -> None:
        self._root = _root()
        self.blocks = 0
        """How many different ones; to be looked at only."""

    def add(self, keys: Sequence[BlockKey]) -> Stretch:
        """One more chain; what it is to be dropped by."""
        above = self._root
        at, last = 0, len(keys)
        while at < last:
            first = keys[at]
            found = above.following.get(first)
            if found is None:
                found = above.following[first] = Stretch(above, keys, at, last, first)
                self.blocks += last - at
            else:
                common = _common(found, keys)
                if common < found.end:
                    found = _split(found, common, above)
            found.chains += 1
            above, at = found, found.end
        return above

    def drop(self, end: Stretch) -> None:
        """The chain that ended there is out."""
        each = end
        while (above := each.above) is not None:
            each.chains -= 1
            if not each.chains:
                del above.following[each.first]
                self.blocks -= each.end - each.start
            elif len(each.following) == 1:
                _join(each, above)
            each = above

    def run_blocks(self, keys: Sequence[BlockKey]) -> int:
        """How many of `keys` from the first on are in some chain."""
        at, last = 0, len(keys)
        following = self._root.following
        while at < last:
            found = following.get(keys[at])
            if found is None:
                break
            at = _common(found, keys)
            if at < found.end:
                break
            following = found.following
        return at

    def clear(self) -> None:
        """No chain is in any more."""
        self._root = _root()
        self.blocks = 0


def _common(stretch: Stretch, keys: Sequence[BlockKey]) -> int:
    """Where `keys`, which enter `stretch`, leave it or end."""
    known = stretch.keys
    high = min(stretch.end, len(keys)) - 1
    if keys[high] == known[high]:  # the usual case: the whole of it, or the same prompt again
        return high + 1
    low = stretch.start + 1
    while low < high:
        middle = (low + high) // 2
        if keys[middle] == known[middle]:
            low = middle + 1
        else:
            high = middle
    return low


def _split(stretch: Stretch, at: int, above: Stretch) -> Stretch:
    """Its part before `at`, as a stretch of its own. Who ended in `stretch` still does."""
    before = Stretch(above, stretch.keys, stretch.start, at, stretch.first, stretch.chains)
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
