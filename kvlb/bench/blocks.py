"""The blocks of one virtual engine, by key: `simulator.core.blocks` without tokens and hashes.

Rules: those of `simulator.core.blocks` for newer releases. What differs is the form only:

1. Contents are block keys, which a workload knows beforehand, instead of hashes of tokens.
2. Changes are told as the index takes them: a key is held from its first copy on, and dropped with
   its last one. That is what `indexer.core.rank_blocks` makes of an engine's events; a block
   never outlives its parent here, since blocks are given back from the tail.

Cost: O(1) per block.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from indexer.core.index import BlocksDropped, BlocksHeld, Change
from indexer.core.types import BlockKey, Tier

NOTHING = BlockKey(-1)


class KeyPool:
    """Who uses which block, what it holds, and which is taken next."""

    def __init__(self, num_blocks: int) -> None:
        self._users = [0] * num_blocks
        self._key_of = [NOTHING] * num_blocks
        self._first: dict[BlockKey, int] = {}
        """The copy registered first, which is the one that is found."""
        self._more: dict[BlockKey, list[int]] = {}
        """Later copies, where there are any."""
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._changes: list[tuple[bool, list[BlockKey]]] = []

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def run(self, keys: Sequence[BlockKey]) -> list[int]:
        """The blocks that hold the first of `keys`, as far as there is no gap."""
        found = list(map(self._first.get, keys))  # in C: most calls are for what is there
        whole = [block for block in found if block is not None]
        return whole if len(whole) == len(found) else whole[: found.index(None)]

    def unused(self, blocks: Iterable[int]) -> int:
        """How many of them nobody uses, so that touching them costs a free one."""
        return list(map(self._users.__getitem__, blocks)).count(0)

    def touch(self, blocks: Iterable[int]) -> None:
        """Use blocks that already hold something."""
        users, free = self._users, self._free
        for block in blocks:
            if not users[block]:
                del free[block]
            users[block] += 1

    def take(self, count: int) -> list[int]:
        """Take the next free blocks, forgetting what they held."""
        users, key_of, popitem = self._users, self._key_of, self._free.popitem
        first, more = self._first, self._more
        taken, dropped = [], []
        for _ in range(count):
            block, _none = popitem(last=False)
            key = key_of[block]
            if key != NOTHING:
                key_of[block] = NOTHING
                if more and key in more:
                    self._forget_copy(block, key)
                else:
                    del first[key]
                    dropped.append(key)
            users[block] = 1
            taken.append(block)
        if dropped:
            self._tell(held=False).extend(dropped)
        return taken

    def register(self, blocks: Sequence[int], keys: Sequence[BlockKey]) -> bool:
        """From now on these blocks hold these keys; True if one of them is new here."""
        first, key_of = self._first, self._key_of
        new = []
        for block, key in zip(blocks, keys, strict=True):
            key_of[block] = key
            if key in first:
                self._more.setdefault(key, []).append(block)
            else:
                first[key] = block
                new.append(key)
        if new:
            self._tell(held=True).extend(new)
        return bool(new)

    def release(self, blocks: Iterable[int]) -> None:
        """Give blocks back; the first given is the first to be taken again."""
        users, key_of, free = self._users, self._key_of, self._free
        empty = []
        for block in blocks:
            users[block] -= 1
            if users[block]:
                continue
            free[block] = None
            if key_of[block] == NOTHING:
                empty.append(block)
        for block in reversed(empty):
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

    def _forget_copy(self, block: int, key: BlockKey) -> None:
        """One of several: the key stays."""
        more = self._more[key]
        if self._first[key] == block:
            self._first[key] = more.pop(0)
        else:
            more.remove(block)
        if not more:
            del self._more[key]
