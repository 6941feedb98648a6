"""A rank's blocks, an index that follows them, and the events that they are told."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from indexer.core.events import BlockRemoved, BlockStored, EventBatch
from indexer.core.hashing import Namespace, block_keys, pack_tokens, root_key
from indexer.core.index import AllDropped, BlocksHeld, BlocksShared, GroupSpec, RankUpdate
from indexer.core.rank_blocks import RankBlocks
from indexer.core.types import BlockKey, EngineHash, InstanceId, RankId, Tier

RANK = RankId(InstanceId("http://engine:8000"), 0)
SIZE = 4
Shown = set[tuple[int, Tier, BlockKey]]


class Rank:
    """A RankBlocks, and what an index that follows its updates would hold."""

    def __init__(self, **options: Any) -> None:
        self.blocks = RankBlocks(rank=RANK, model="tiny", epoch=1, **options)
        self.shown: Shown = set()
        self.updates: list[RankUpdate] = []
        self.specs: list[GroupSpec] = []
        self._seq = itertools.count()

    def apply(self, *events: Any) -> RankUpdate:
        update = self.blocks.apply(next(self._seq), EventBatch(1.0, 0, list(events)))
        self.updates.append(update)
        for change in update.changes:
            if isinstance(change, GroupSpec):
                self.specs.append(change)
                self.shown = {entry for entry in self.shown if entry[0] != change.group}
            elif isinstance(change, AllDropped):
                self.shown = set()
            elif not isinstance(change, BlocksShared):
                entries = {(change.group, change.tier, key) for key in change.keys}
                assert change.keys
                if isinstance(change, BlocksHeld):
                    assert not entries & self.shown, "told twice"
                    self.shown |= entries
                else:
                    assert entries <= self.shown, "dropped what was never held"
                    self.shown -= entries
        return update

    def held(self, group: int = 0, tier: Tier = Tier.GPU) -> set[BlockKey]:
        return {key for at, where, key in self.shown if (at, where) == (group, tier)}


@pytest.fixture(scope="session")
def make_rank() -> Callable[..., Rank]:
    """For tests that want options, or more than one."""
    return Rank


@pytest.fixture
def rank() -> Rank:
    """A rank that holds nothing yet."""
    return Rank()


def _tokens_of(*names: int) -> list[int]:
    return [name * 100 + at for name in names for at in range(SIZE)]


@pytest.fixture(scope="session")
def tokens_of() -> Callable[..., list[int]]:
    """Tokens of blocks, each block named by a number."""
    return _tokens_of


@pytest.fixture(scope="session")
def keys_of() -> Callable[..., list[BlockKey]]:
    """Keys of the chain of these blocks."""

    def keys(*names: int, lora: str | None = None, salt: str | None = None) -> list[BlockKey]:
        root = root_key(Namespace(model="tiny", lora=lora, cache_salt=salt))
        return list(block_keys(root, pack_tokens(_tokens_of(*names)), SIZE))

    return keys


def _hashes_of(names: Iterable[int]) -> list[EngineHash]:
    return [EngineHash(name) for name in names]


@pytest.fixture(scope="session")
def hashes_of() -> Callable[[Iterable[int]], list[EngineHash]]:
    """Engine hashes of blocks: their names."""
    return _hashes_of


@pytest.fixture(scope="session")
def stored() -> Callable[..., BlockStored]:
    """A chain of blocks; a block's engine hash is its name."""

    def store(*names: int, parent: int | None = None, **fields: Any) -> BlockStored:
        return BlockStored(
            **{
                "hashes": _hashes_of(names),
                "parent": parent,
                "token_ids": _tokens_of(*names),
                "block_size": SIZE,
                **fields,
            }
        )

    return store


@pytest.fixture(scope="session")
def removed() -> Callable[..., BlockRemoved]:
    """The end of one copy of each of these blocks."""

    def remove(*names: int, **fields: Any) -> BlockRemoved:
        return BlockRemoved(_hashes_of(names), **fields)

    return remove


@pytest.fixture(scope="session")
def placeholder() -> Callable[..., BlockStored]:
    """Blocks known by their hashes alone, as connectors announce them."""

    def store(*names: int, **fields: Any) -> BlockStored:
        return BlockStored(_hashes_of(names), None, [], 0, **fields)

    return store
