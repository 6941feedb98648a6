"""Which copies of a block and of what hangs on it a group has."""

from collections import Counter

import pytest

from indexer.core.block_tree import BlockTree
from indexer.core.events import BlockStored
from indexer.core.full_group import FullGroup
from indexer.core.index import GroupKind, GroupSpec
from indexer.core.types import BlockKey, EngineHash

SIZE = 2
GPU, CPU, STORAGE = range(3)


@pytest.fixture
def tree() -> BlockTree:
    return BlockTree()


def new_group(tree: BlockTree) -> FullGroup:
    spec = GroupSpec(group=0, kind=GroupKind.FULL, block_size=SIZE)
    return FullGroup(spec, model="tiny", tree=tree, counts=Counter(), max_parked_blocks=10)


def store(
    group: FullGroup, *names: int, parent: int | None = None, add: int = 0, tier: int = GPU
) -> None:
    """Blocks by name; an engine hash is the name and `add`."""
    hashes = [EngineHash(name + add) for name in names]
    tokens = [100 * name + at for name in names for at in range(SIZE)]
    above = None if parent is None else EngineHash(parent + add)
    group.store(BlockStored(hashes, above, tokens, SIZE), tier)


def key_of(group: FullGroup, engine_hash: int) -> BlockKey:
    key = group.key_of(EngineHash(engine_hash))
    assert key is not None
    return key


def copies(group: FullGroup, key: BlockKey) -> set[tuple[int, int, int]]:
    found = list(group.held.copies_below(key))
    assert all(group.key_of(each.engine_hash) == each.key for each in found)
    return {(each.engine_hash, each.tier, each.copies) for each in found}


def test_copies_of_a_block_and_its_descendants_are_told(tree: BlockTree) -> None:
    """Per hash and tier; what is above or beside it is not."""
    group = new_group(tree)
    store(group, 1, 2, 3)
    store(group, 4, parent=1)
    store(group, 2, parent=1)
    group.recall([EngineHash(3)], CPU)

    assert copies(group, key_of(group, 2)) == {(2, GPU, 2), (3, GPU, 1), (3, CPU, 1)}
    assert copies(group, BlockKey(7)) == set()


def test_blocks_of_other_ranks_are_not_told(tree: BlockTree) -> None:
    """They share the tree, and not what is held of it."""
    group, other = new_group(tree), new_group(tree)
    store(group, 1)
    store(other, 1, 2)

    assert copies(group, key_of(group, 1)) == {(1, GPU, 1)}
    assert not group.held.holds(key_of(other, 2))
    assert other.held.holds(key_of(other, 2))


def test_every_hash_of_a_block_is_told(tree: BlockTree) -> None:
    """Its node is named by another rank; here it has two hashes of its own, one of them below."""
    group, other = new_group(tree), new_group(tree)
    store(other, 1, 2)
    store(group, 1, 2, add=10)
    store(group, 1, add=20)
    store(group, 3, add=10)

    assert copies(group, key_of(group, 11)) == {(11, GPU, 1), (12, GPU, 1), (21, GPU, 1)}


def test_block_that_is_only_remembered_is_not_held(tree: BlockTree) -> None:
    """Its descendants are still found below it."""
    group = new_group(tree)
    store(group, 1, 2)
    key = key_of(group, 1)
    group.remove([EngineHash(1)], GPU)

    assert not group.held.holds(key)
    assert not group.held.holds(BlockKey(7))
    assert copies(group, key) == {(2, GPU, 1)}
