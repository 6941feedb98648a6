"""Physical blocks of one rank: who uses them, what they hold, in which order they go.

Rules:

1. Block 0 is a placeholder that is never handed out.
2. A block with users is never taken. A block without users keeps its content until it is taken.
3. Free blocks are taken from the front of the queue and come back at its end, in the order given:
   a request gives its blocks back from the tail, so that prefixes live longest. Blocks that hold
   nothing anybody could look up go to the front instead, in newer releases (seen in 0.32, not in
   0.16).
4. Equal contents are not merged: two blocks with one hash are two `BlockStored`, and each of them
   that is taken is one `BlockRemoved`. A lookup finds the copy registered first.
5. Events are kept until somebody takes them, in the order in which things happened.

Cost: every operation is O(1) per block.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from simulator.core.types import AllBlocksCleared, BlockRemoved, KvEvent


class BlockPool:
    """The blocks of one rank."""

    def __init__(self, num_blocks: int, *, reuses_empty_first: bool = True) -> None:
        self._reuses_empty_first = reuses_empty_first
        self._num_blocks = num_blocks
        self._users = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._copies: dict[bytes, dict[int, None]] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._events: list[KvEvent] = []

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    @property
    def used_blocks(self) -> int:
        """Blocks that live requests or reservations hold."""
        return self._num_blocks - 1 - len(self._free)

    def find(self, block_hash: bytes) -> int | None:
        """Return the block that holds this content, the oldest if there are several."""
        copies = self._copies.get(block_hash)
        return next(iter(copies)) if copies else None

    def is_free(self, block_id: int) -> bool:
        """Whether nobody uses the block, so that touching it costs a free one."""
        return self._users[block_id] == 0

    def touch(self, block_ids: Iterable[int]) -> None:
        """Use blocks that already hold something."""
        for block_id in block_ids:
            if self._users[block_id] == 0:
                del self._free[block_id]
            self._users[block_id] += 1

    def take(self, count: int) -> list[int]:
        """Take the next free blocks, forgetting what they held."""
        taken = []
        for _ in range(count):
            block_id, _none = self._free.popitem(last=False)
            self._forget(block_id)
            self._users[block_id] = 1
            taken.append(block_id)
        return taken

    def register(self, block_ids: Sequence[int], hashes: Sequence[bytes]) -> None:
        """From now on these blocks hold these contents; announcing it is the caller's business."""
        for block_id, block_hash in zip(block_ids, hashes, strict=True):
            self._hash_of[block_id] = block_hash
            self._copies.setdefault(block_hash, {})[block_id] = None

    def announce(self, event: KvEvent) -> None:
        """Put an event behind those that happened before."""
        self._events.append(event)

    def release(self, block_ids: Iterable[int]) -> None:
        """Give blocks back; the first given is the first to be taken again."""
        empty: list[int] = []
        for block_id in block_ids:
            self._users[block_id] -= 1
            if self._users[block_id]:
                continue
            self._free[block_id] = None
            if self._reuses_empty_first and self._hash_of[block_id] is None:
                empty.append(block_id)
        for block_id in reversed(empty):
            self._free.move_to_end(block_id, last=False)

    def reset(self) -> bool:
        """Forget all contents, unless a block is in use."""
        if self.used_blocks:
            return False
        self._hash_of = [None] * self._num_blocks
        self._copies.clear()
        self.announce(AllBlocksCleared())
        return True

    def take_events(self) -> list[KvEvent]:
        """Return what happened since the last call."""
        events, self._events = self._events, []
        return events

    def _forget(self, block_id: int) -> None:
        block_hash = self._hash_of[block_id]
        if block_hash is None:
            return
        self._hash_of[block_id] = None
        copies = self._copies[block_hash]
        del copies[block_id]
        if not copies:
            del self._copies[block_hash]
        self.announce(BlockRemoved(block_hash))
