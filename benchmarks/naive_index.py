"""The layout one would write first, to compare with: an object per block and rank, a set per key.

Untyped decoding, a Python hash over a tuple per block, a copy count and a parent per engine hash,
and one table from key to the ranks that hold it. A rank's depth is found block by block.
Removing a middle block is not even handled.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from benchmarks.index_workload import BLOCK_SIZE


class NaiveBlock:
    """What one rank knows of one engine hash."""

    def __init__(self, key: int, parent: int | None) -> None:
        self.key = key
        self.parent = parent
        self.copies = 1


class NaiveIndex:
    """All ranks' blocks."""

    def __init__(self) -> None:
        self.blocks: dict[int, dict[int, NaiveBlock]] = {}
        self.holders: dict[int, set[int]] = {}

    def apply(self, rank: int, frame: bytes) -> None:
        blocks = self.blocks.setdefault(rank, {})
        for event in msgspec.msgpack.decode(frame)[1]:
            if event["type"] == "BlockStored":
                self._store(rank, blocks, event)
            else:
                for gone in event["block_hashes"]:
                    self._remove(rank, blocks, gone)

    def depths(self, token_ids: Sequence[int], ranks: int) -> list[int]:
        """Leading blocks that each rank holds."""
        keys = _keys(0, token_ids)
        return [
            next(
                (depth for depth, key in enumerate(keys) if rank not in self.holders.get(key, ())),
                len(keys),
            )
            for rank in range(ranks)
        ]

    def _store(self, rank: int, blocks: dict[int, NaiveBlock], event: dict[str, Any]) -> None:
        parent = event["parent_block_hash"]
        root = 0 if parent is None else blocks[parent].key
        for engine_hash, key in zip(
            event["block_hashes"], _keys(root, event["token_ids"]), strict=True
        ):
            if engine_hash in blocks:
                blocks[engine_hash].copies += 1
            else:
                blocks[engine_hash] = NaiveBlock(key, parent)
                self.holders.setdefault(key, set()).add(rank)
            parent = engine_hash

    def _remove(self, rank: int, blocks: dict[int, NaiveBlock], engine_hash: int) -> None:
        block = blocks[engine_hash]
        block.copies -= 1
        if not block.copies:
            del blocks[engine_hash]
            self.holders[block.key].discard(rank)
            if not self.holders[block.key]:
                del self.holders[block.key]


def _keys(root: int, token_ids: Sequence[int]) -> list[int]:
    key, keys = root, []
    for start in range(0, len(token_ids) - BLOCK_SIZE + 1, BLOCK_SIZE):
        key = hash((key, *token_ids[start : start + BLOCK_SIZE]))
        keys.append(key)
    return keys
