"""Blocks whose parent isn't known are parked until it shows."""

from collections.abc import Callable
from typing import Any

from indexer.core.bound import TableLimits
from indexer.core.events import BlockRemoved, BlockStored
from indexer.core.types import BlockKey, Tier

Store = Callable[..., BlockStored]
Remove = Callable[..., BlockRemoved]
Keys = Callable[..., list[BlockKey]]


def test_f05_unknown_parent_is_parked_and_never_a_root(
    rank: Any, stored: Store, keys_of: Keys
) -> None:
    """F05: no credit, not even for a prompt of just its tokens, until the parent shows."""
    rank.apply(stored(2, parent=1))
    rank.apply(stored(3, 4, parent=2))
    assert rank.shown == set()
    assert (rank.blocks.orphans, rank.blocks.counts["orphan_parked"]) == (3, 3)

    rank.apply(stored(1))
    assert rank.held() == set(keys_of(1, 2, 3, 4))
    assert rank.blocks.orphans == 0


def test_removal_of_an_orphan_counts(
    rank: Any, stored: Store, removed: Remove, placeholder: Store, keys_of: Keys
) -> None:
    """Copies of a parked block are counted like any others."""
    rank.apply(stored(2, parent=1), stored(2, parent=1), stored(3, parent=2))
    rank.apply(removed(2))
    rank.apply(placeholder(3, tier=Tier.CPU), removed(3))
    rank.apply(stored(1))
    assert rank.shown == {
        (0, Tier.GPU, keys_of(1, 2)[0]),
        (0, Tier.GPU, keys_of(1, 2)[1]),
        (0, Tier.CPU, keys_of(1, 2, 3)[2]),
    }
    assert rank.blocks.counts == {"orphan_parked": 2}


def test_orphan_whose_last_copy_went_is_forgotten(
    rank: Any, stored: Store, removed: Remove, keys_of: Keys
) -> None:
    """Its descendants wait on for it to be stored again."""
    rank.apply(stored(2, 3, parent=1), removed(2))
    assert rank.blocks.orphans == 1

    rank.apply(stored(1))
    assert rank.held() == set(keys_of(1))
    rank.apply(stored(2, parent=1))
    assert rank.held() == set(keys_of(1, 2, 3))


def test_copies_of_an_orphan_are_kept_when_it_is_placed(
    rank: Any, stored: Store, removed: Remove, keys_of: Keys
) -> None:
    """Three copies parked, one more announced with its parent: four removals."""
    rank.apply(*[stored(2, parent=1)] * 3)
    rank.apply(stored(1, 2))

    rank.apply(*[removed(2)] * 3)
    assert rank.held() == set(keys_of(1, 2))
    rank.apply(removed(2))
    assert rank.held() == set(keys_of(1))


def test_siblings_wait_for_one_parent(
    rank: Any, stored: Store, removed: Remove, keys_of: Keys
) -> None:
    """Each of them is attached; one that left meanwhile is not."""
    rank.apply(stored(2, parent=1), stored(3, parent=1), removed(2))

    rank.apply(stored(1))
    assert rank.held() == set(keys_of(1, 3))


def test_removal_of_another_tier_leaves_an_orphan_alone(
    rank: Any, stored: Store, removed: Remove
) -> None:
    """Tiers are counted apart."""
    rank.apply(stored(2, parent=1), removed(2, tier=Tier.CPU))

    assert rank.blocks.counts == {"orphan_parked": 1, "unknown_removal": 1}


def test_orphan_that_is_stored_elsewhere_means_one_block(
    rank: Any, stored: Store, removed: Remove, keys_of: Keys
) -> None:
    """It waits for 5, and is stored under 1 before 5 shows: a hash never means two blocks."""
    rank.apply(stored(2, parent=5, tier=Tier.CPU))

    rank.apply(stored(1, 2, 3, 4, 5))
    assert rank.held() == set(keys_of(1, 2, 3, 4, 5))
    assert rank.held(tier=Tier.CPU) == {keys_of(1, 2)[-1]}
    rank.apply(removed(1, 2, 3, 4, 5), removed(2, tier=Tier.CPU))
    assert rank.blocks.tracked_entries() == 0


def test_parked_blocks_are_bounded_and_the_oldest_leaves(
    make_rank: Any, stored: Store, keys_of: Keys
) -> None:
    """A stream that never explains itself can't fill the memory."""
    rank = make_rank(limits=TableLimits(max_parked_blocks=2))

    rank.apply(stored(2, parent=1), stored(4, parent=3), stored(6, parent=5))
    assert rank.blocks.orphans == 2
    assert rank.blocks.counts == {"orphan_parked": 3, "orphan_evicted": 1}
    rank.apply(stored(1), stored(3), stored(5))
    assert rank.held() == {*keys_of(1), *keys_of(3, 4), *keys_of(5, 6)}
