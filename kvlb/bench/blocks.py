"""The blocks of one virtual engine, by key: `simulator.core.blocks` without tokens and hashes.

Rules: those of `simulator.core.blocks` for newer releases. What differs is the form only:

1. Contents are block keys, which a workload knows beforehand, instead of hashes of tokens.
2. Changes are told as the index takes them: a key is held from its first copy on, and dropped with
   its last one. That is what `indexer.core.rank_blocks` makes of an engine's events; a block
   never outlives its parent here, since blocks are given back from the tail.

Cost: O(1) per block, nearly all of it in C. What only few blocks have (another user, a second copy)
is kept apart, so that the rest needn't look.
"""

from bisect import bisect_left
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from itertools import compress, filterfalse
from operator import not_

from indexer.core.index import BlocksDropped, BlocksHeld, Change
from indexer.core.types import BlockKey, Tier


class KeyPool:
    """Who uses which block, what it holds, and which is taken next."""

    def __init__(self, num_blocks: int) -> None:
        self._free: OrderedDict[int, BlockKey | None] = OrderedDict.fromkeys(range(1, num_blocks))
        """What each holds; who isn't here is used."""
        self._more_users: Counter[int] = Counter()
        """Users beyond the first one, where there are any."""
        self._first: dict[BlockKey, int] = {}
        """The copy registered first, which is the one that is found."""
        self._more: dict[BlockKey, list[int]] = {}
        """Later copies, where there are any."""
        self._changes: list[tuple[bool, list[BlockKey]]] = []

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def copy(self) -> "KeyPool":
        """Another one in the same state."""
        twin = copy(self)
        vars(twin).update(
            _free=self._free.copy(),
            _more_users=self._more_users.copy(),
            _first=self._first.copy(),
            _more={key: blocks.copy() for key, blocks in self._more.items()},
            _changes=[(held, keys.copy()) for held, keys in self._changes],
        )
        return twin

    def held(self, keys: Sequence[BlockKey]) -> int:
        """How many of the first of `keys` are held without a gap: nothing is behind one (rule 2)."""
        first = self._first
        return bisect_left(keys, True, key=lambda key: key not in first)

    def run(self, keys: Sequence[BlockKey]) -> list[int]:
        """The blocks that hold `keys`, which are all held."""
        return list(map(self._first.__getitem__, keys))

    def unused(self, blocks: Iterable[int]) -> int:
        """How many of them nobody uses, so that touching them costs a free one."""
        return sum(map(self._free.__contains__, blocks))

    def touch(self, blocks: Sequence[int]) -> None:
        """Use blocks that already hold something."""
        free = self._free
        unused = list(filter(free.__contains__, blocks))
        if len(unused) < len(blocks):
            self._more_users.update(filterfalse(free.__contains__, blocks))
        _exhaust(map(free.__delitem__, unused))

    def take(self, count: int) -> list[int]:
        """Take the next free blocks, forgetting what they held."""
        popitem = self._free.popitem
        taken = [popitem(last=False) for _ in range(count)]
        dropped = [key for _, key in taken if key is not None]
        if dropped:
            if self._more:
                dropped = self._forget_copies(taken)
            _exhaust(map(self._first.__delitem__, dropped))
            if dropped:
                self._tell(held=False).extend(dropped)
        return [block for block, _ in taken]

    def register(self, blocks: Sequence[int], keys: Sequence[BlockKey]) -> bool:
        """From now on these blocks hold these keys, each another one; True if one is new here."""
        first = self._first
        if first.keys().isdisjoint(keys):
            first.update(zip(keys, blocks, strict=True))
            new = keys
        else:
            new = []
            for block, key in zip(blocks, keys, strict=True):
                if key in first:
                    self._more.setdefault(key, []).append(block)
                else:
                    first[key] = block
                    new.append(key)
        if new:
            self._tell(held=True).extend(new)
        return bool(new)

    def release(self, blocks: Sequence[int], keys: Sequence[BlockKey]) -> None:
        """Give back what somebody used: the last one is the first to be taken again.

        `keys`: what the first of them hold. The others hold nothing and are taken before all else.
        """
        free, more_users = self._free, self._more_users
        full = [*reversed(blocks[: len(keys)])]
        pairs: Iterable[tuple[int, BlockKey]] = zip(full, reversed(keys), strict=True)
        if more_users:
            is_shared = [*map(more_users.__contains__, full)]
            pairs = compress(pairs, map(not_, is_shared))
            for block in compress(full, is_shared):
                if more_users[block] > 1:
                    more_users[block] -= 1
                else:
                    del more_users[block]
        free.update(pairs)
        for block in blocks[len(keys) :]:
            free[block] = None
            free.move_to_end(block, last=False)

    def take_changes(self) -> list[Change]:
        """What changed since the last call, in order."""
        changes, self._changes = self._changes, []
        return [
            BlocksHeld(0, Tier.GPU, keys) if held else BlocksDropped(0, Tier.GPU, keys)
            for held, keys in changes
        ]

    def _tell(self, *, held: bool) -> list[BlockKey]:
        if not self._changes or self._changes[-1][0] is not held:
            self._changes.append((held, []))
        return self._changes[-1][1]

    def _forget_copies(self, taken: Iterable[tuple[int, BlockKey | None]]) -> list[BlockKey]:
        """Of what is taken, the keys that no other block holds."""
        last = []
        for block, key in taken:
            if key is None:
                continue
            more = self._more.get(key)
            if more is None:
                last.append(key)
                continue
            if self._first[key] == block:
                self._first[key] = more.pop(0)
            else:
                more.remove(block)
            if not more:
                del self._more[key]
        return last


def _exhaust(calls: Iterator[object]) -> None:
    """Make them, all in C."""
    deque(calls, maxlen=0)
