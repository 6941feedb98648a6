"""Chains of a rank, what the index is told of them, and what of them is held."""

from collections.abc import Callable, Iterable
from typing import Any

from indexer.core.events import BlockRemoved, BlockStored
from indexer.core.index import BlocksHeld, GroupKind, GroupSpec
from indexer.core.types import BlockKey, EngineHash, InstanceId, RankId, Tier

Store = Callable[..., BlockStored]
Remove = Callable[..., BlockRemoved]
Keys = Callable[..., list[BlockKey]]
Hashes = Callable[[Iterable[int]], list[EngineHash]]

RANK = RankId(InstanceId("http://engine:8000"), 0)
SIZE = 4


# Chains, and what the index is told


def test_first_store_describes_the_group_and_holds_its_chain(
    rank: Any, stored: Store, keys_of: Keys
) -> None:
    """The index hears of the group once, then of the blocks."""
    spec = GroupSpec(group=0, kind=GroupKind.FULL, block_size=SIZE)

    update = rank.apply(stored(1, 2, 3))
    assert (update.rank, update.model, update.epoch, update.seq) == (RANK, "tiny", 1, 0)
    assert rank.specs == [spec]
    assert rank.held() == set(keys_of(1, 2, 3))
    assert rank.blocks.groups == {0: spec}
    assert rank.blocks.held_blocks == 3


def test_continuation_hangs_on_its_parent(rank: Any, stored: Store, keys_of: Keys) -> None:
    """A block stored under a known one belongs to that prefix."""
    rank.apply(stored(1, 2))

    rank.apply(stored(3, parent=2), stored(4, parent=3))
    assert rank.held() == set(keys_of(1, 2, 3, 4))


def test_nothing_new_is_an_empty_update(rank: Any, stored: Store) -> None:
    """The update still carries its number, for whoever resumes from it."""
    rank.apply(stored(1))

    update = rank.apply(stored(1))
    assert (list(update.changes), update.seq) == ([], 1)


def test_batch_is_told_net(rank: Any, stored: Store, removed: Remove, keys_of: Keys) -> None:
    """A block that leaves and returns within one batch is no news, nor is one that only passes."""
    rank.apply(stored(1, 2))

    assert list(rank.apply(removed(2), stored(2, parent=1)).changes) == []
    assert list(rank.apply(stored(3, parent=2), removed(3)).changes) == []
    assert list(rank.apply(removed(2), stored(2, 3, parent=1)).changes) == [
        BlocksHeld(0, Tier.GPU, [keys_of(1, 2, 3)[2]])
    ]


def test_known_blocks_in_front_of_new_ones_are_counted(
    rank: Any, stored: Store, removed: Remove, keys_of: Keys
) -> None:
    """One announcement may repeat a prefix and go on."""
    rank.apply(stored(1, 2))

    rank.apply(stored(1, 2, 3, 4))
    assert rank.held() == set(keys_of(1, 2, 3, 4))
    rank.apply(removed(4, 3, 2, 1))
    assert rank.held() == set(keys_of(1, 2))


def test_branches_share_their_prefix(
    rank: Any, stored: Store, removed: Remove, keys_of: Keys
) -> None:
    """Two conversations after one system prompt."""
    rank.apply(stored(1), stored(2, parent=1), stored(3, 4, parent=1), stored(5, parent=1))

    assert rank.held() == {*keys_of(1, 2), *keys_of(1, 3, 4), *keys_of(1, 5)}
    rank.apply(removed(3), removed(4), removed(2), removed(5))
    assert rank.held() == set(keys_of(1))


def test_place_of_a_middle_sibling_is_used_again_cleanly(
    rank: Any, stored: Store, removed: Remove, keys_of: Keys
) -> None:
    """The next block in its row has neither its neighbours nor its parent."""
    rank.apply(stored(1), stored(2, parent=1), stored(3, parent=1), stored(4, parent=1))
    rank.apply(removed(3), stored(9))
    rank.apply(stored(5, parent=9))

    rank.apply(removed(9))
    assert rank.held() == {*keys_of(1, 2), *keys_of(1, 4)}
    rank.apply(removed(5))
    assert rank.held() == {*keys_of(1, 2), *keys_of(1, 4)}
    rank.apply(removed(1, 2, 4))
    assert rank.blocks.tracked_entries() == 0


def test_place_of_a_middle_sibling_is_used_by_a_child_at_once(
    rank: Any, stored: Store, removed: Remove, keys_of: Keys
) -> None:
    """The same where the row goes to a block that hangs elsewhere."""
    rank.apply(stored(9), stored(1), *[stored(each, parent=1) for each in (2, 3, 4)])
    rank.apply(removed(3))
    rank.apply(stored(5, parent=9))

    rank.apply(removed(9), removed(5))
    assert rank.held() == {*keys_of(1, 2), *keys_of(1, 4)}
    rank.apply(removed(2, 4, 1))
    assert rank.blocks.tracked_entries() == 0


# Held means reachable


def test_f18_only_the_unbroken_run_from_the_start_is_held(
    rank: Any, stored: Store, removed: Remove, keys_of: Keys
) -> None:
    """F18: of blocks 0, 2, 3 of four only block 0 gives credit; without block 0 none does."""
    rank.apply(stored(1, 2, 3, 4))

    rank.apply(removed(2))
    assert rank.held() == set(keys_of(1))
    assert rank.blocks.held_blocks == 1
    rank.apply(stored(2, parent=1), removed(1))
    assert rank.held() == set()


def test_descendants_return_with_the_middle_block(
    rank: Any, stored: Store, removed: Remove, keys_of: Keys
) -> None:
    """What was never removed counts again as soon as its chain is whole."""
    rank.apply(stored(1, 2, 3), stored(4, 5, parent=2))
    rank.apply(removed(2))
    assert rank.held() == set(keys_of(1))

    update = rank.apply(stored(2, parent=1))
    assert rank.held() == {*keys_of(1, 2, 3), *keys_of(1, 2, 4, 5)}
    assert rank.blocks.held_blocks == 5
    assert len(list(update.changes)) == 1


def test_block_under_a_removed_one_is_still_placed(
    rank: Any, stored: Store, removed: Remove, keys_of: Keys
) -> None:
    """A block kept for its descendants is a known parent, without credit."""
    rank.apply(stored(1, 2, 3), removed(2))

    rank.apply(stored(5, parent=2, tier=Tier.CPU))
    assert rank.held() == set(keys_of(1))
    assert rank.blocks.orphans == 0
    rank.apply(stored(2, parent=1))
    assert rank.held() == set(keys_of(1, 2, 3))
    assert rank.held(tier=Tier.CPU) == {keys_of(1, 2, 5)[2]}


def test_kept_block_leaves_with_its_last_descendant(
    rank: Any, stored: Store, removed: Remove
) -> None:
    """Nothing stays behind of a chain removed head first."""
    rank.apply(stored(1, 2, 3))

    rank.apply(removed(1), removed(2), removed(3))
    assert rank.blocks.tracked_entries() == 0
    rank.apply(stored(9, parent=2))
    assert rank.blocks.orphans == 1


def test_kept_block_that_returns_as_a_twin_is_one_block(
    rank: Any, stored: Store, removed: Remove, keys_of: Keys, hashes_of: Hashes
) -> None:
    """The key decides, whatever hash the engine gives it this time."""
    rank.apply(stored(1, 2, 3), removed(2))

    rank.apply(stored(2, parent=1, hashes=hashes_of([22])))
    assert rank.held() == set(keys_of(1, 2, 3))
    rank.apply(removed(3, 22, 1))
    assert rank.blocks.tracked_entries() == 0
