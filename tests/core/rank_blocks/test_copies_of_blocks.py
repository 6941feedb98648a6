"""Copies are counted, tier by tier; what is announced again on request is none."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from indexer.core.events import AllBlocksCleared, BlockRemoved, BlockStored
from indexer.core.index import BlocksDropped
from indexer.core.reports import FULL_REPORT_SESSION
from indexer.core.types import BlockKey, EngineHash, Tier

Store = Callable[..., BlockStored]
Remove = Callable[..., BlockRemoved]
Keys = Callable[..., list[BlockKey]]
Hashes = Callable[[Iterable[int]], list[EngineHash]]

CLEARED = AllBlocksCleared()


# Counting copies


def test_f04_copies_are_counted_down_and_never_below_nothing(
    rank: Any, stored: Store, removed: Remove, keys_of: Keys
) -> None:
    """F04: held, then gone, then a no-op; a clear resets the count."""
    rank.apply(stored(1))
    rank.apply(stored(1))
    rank.apply(removed(1))
    assert rank.held() == set(keys_of(1))

    rank.apply(removed(1))
    assert rank.held() == set()
    rank.apply(removed(1))
    assert rank.blocks.counts == {"unknown_removal": 1}

    rank.apply(stored(1), CLEARED, stored(1), removed(1))
    assert rank.held() == set()
    assert rank.blocks.tracked_entries() == 0


def test_many_copies_are_counted(rank: Any, stored: Store, removed: Remove, keys_of: Keys) -> None:
    """Every copy is announced and removed by itself."""
    rank.apply(*[stored(1)] * 4)

    rank.apply(*[removed(1)] * 3)
    assert rank.held() == set(keys_of(1))
    rank.apply(removed(1))
    assert rank.held() == set()


def test_twin_hashes_of_one_key_hold_it_together(
    rank: Any, stored: Store, removed: Remove, keys_of: Keys, hashes_of: Hashes
) -> None:
    """Before 0.17 a salt shows only in the hash: the tokens are held while either is."""
    twins = [stored(1, hashes=hashes_of([each])) for each in (11, 12, 13)]
    rank.apply(*twins)
    assert rank.held() == set(keys_of(1))

    rank.apply(removed(11), removed(12))
    assert rank.held() == set(keys_of(1))
    rank.apply(removed(13))
    assert rank.held() == set()
    assert rank.blocks.tracked_entries() == 0


def test_chain_of_twins_shares_every_node(
    rank: Any, stored: Store, removed: Remove, keys_of: Keys, hashes_of: Hashes
) -> None:
    """A second tenant's chain of the same tokens adds hashes, not blocks."""
    rank.apply(stored(1, 2))

    rank.apply(stored(1, 2, hashes=hashes_of([11, 12])), removed(1, 2))
    assert rank.held() == set(keys_of(1, 2))
    rank.apply(removed(11, 12))
    assert rank.blocks.tracked_entries() == 0


def test_single_twin_shares_its_node(
    rank: Any, stored: Store, removed: Remove, keys_of: Keys, hashes_of: Hashes
) -> None:
    """A block under a known parent, announced alone under a second hash."""
    rank.apply(stored(1, 2))

    rank.apply(stored(2, parent=1, hashes=hashes_of([22])), removed(2))
    assert rank.held() == set(keys_of(1, 2))
    rank.apply(removed(22, 1))
    assert rank.blocks.tracked_entries() == 0


# Tiers


def test_each_tier_is_held_and_dropped_by_itself(
    rank: Any, stored: Store, removed: Remove, keys_of: Keys
) -> None:
    """The last copy of a tier drops that tier only."""
    rank.apply(stored(1))
    rank.apply(stored(1, tier=Tier.CPU), stored(1, tier=Tier.STORAGE))
    key = keys_of(1)[0]

    assert list(rank.apply(removed(1)).changes) == [BlocksDropped(0, Tier.GPU, [key])]
    assert list(rank.apply(removed(1, tier=Tier.CPU)).changes) == [
        BlocksDropped(0, Tier.CPU, [key])
    ]
    assert rank.shown == {(0, Tier.STORAGE, key)}


def test_chain_may_run_over_several_tiers(
    rank: Any, stored: Store, removed: Remove, keys_of: Keys
) -> None:
    """Reachable means held on any tier, block by block."""
    rank.apply(stored(1, 2, 3), stored(1, 2, tier=Tier.CPU))

    rank.apply(removed(1))
    assert rank.held() == set(keys_of(1, 2, 3)[1:])
    rank.apply(removed(1, tier=Tier.CPU))
    assert rank.shown == set()


@pytest.mark.parametrize("tier", [Tier.CPU, Tier.STORAGE])
def test_block_may_come_back_from_a_slower_tier(
    rank: Any, tier: Tier, stored: Store, removed: Remove, placeholder: Store, keys_of: Keys
) -> None:
    """It is announced for the GPU again while its copy below stays."""
    rank.apply(stored(1, 2), placeholder(2, tier=tier), removed(2))

    rank.apply(stored(2, parent=1))
    assert rank.held() == set(keys_of(1, 2))
    rank.apply(removed(2, tier=tier))
    assert rank.held() == set(keys_of(1, 2))
    assert rank.blocks.held_blocks == 2


def test_f17_placeholder_takes_its_key_from_the_known_block(
    rank: Any, stored: Store, placeholder: Store, keys_of: Keys
) -> None:
    """F17: h1 is on GPU and CPU now; an unknown hash is counted and ignored."""
    rank.apply(stored(1))

    rank.apply(placeholder(1, tier=Tier.CPU), placeholder(9, tier=Tier.CPU))
    assert rank.held(tier=Tier.CPU) == rank.held() == set(keys_of(1))
    assert rank.blocks.counts == {"unknown_placeholder": 1}


def test_placeholder_of_a_kept_block_brings_it_back(
    rank: Any, stored: Store, removed: Remove, placeholder: Store, keys_of: Keys
) -> None:
    """A block that left the GPU but is kept for its descendants is still known by its hash."""
    rank.apply(stored(1, 2, 3), removed(2))

    rank.apply(placeholder(2, tier=Tier.CPU))
    assert rank.held() == {keys_of(1)[0], keys_of(1, 2, 3)[2]}
    assert rank.held(tier=Tier.CPU) == {keys_of(1, 2)[1]}


def test_placeholder_of_an_unknown_group_is_counted(
    rank: Any, removed: Remove, placeholder: Store
) -> None:
    """Nothing is learnt about a group from an event without a block size."""
    rank.apply(placeholder(1, 2, tier=Tier.CPU), removed(3, group=4))

    assert rank.blocks.counts == {"unknown_placeholder": 2, "unknown_removal": 1}
    assert rank.blocks.groups == {}


# Full reports: what a request of ours has the engine announce again.


def test_what_is_announced_again_on_request_is_no_copy_more(
    rank: Any, stored: Store, removed: Remove, keys_of: Keys
) -> None:
    """Known blocks keep their copies, on every tier; one eviction each, and all is gone."""
    rank.apply(stored(1, 2), stored(1, 2, tier=Tier.CPU), stored(1))
    ours: dict[str, Any] = {"session_id": FULL_REPORT_SESSION}

    rank.apply(stored(1, 2, 3, **ours))

    assert rank.held() == set(keys_of(1, 2, 3))
    rank.apply(removed(3), removed(2), removed(1), removed(1))
    assert rank.held() == set()
    rank.apply(removed(2, tier=Tier.CPU), removed(1, tier=Tier.CPU))
    assert rank.blocks.tracked_entries() == 0


def test_what_the_request_computes_below_is_a_copy_like_any_other(
    rank: Any, stored: Store, removed: Remove, keys_of: Keys
) -> None:
    """Only what begins at the root may have been reused; another session's may not."""
    ours: dict[str, Any] = {"session_id": FULL_REPORT_SESSION}
    rank.apply(stored(1, 2, **ours), stored(3, parent=2, **ours), stored(3, parent=2, **ours))
    rank.apply(stored(1, session_id="other"))

    rank.apply(removed(3), removed(2), removed(1))

    assert rank.held() == set(keys_of(1))


def test_announced_again_places_and_counts_parked_blocks_once(
    rank: Any, stored: Store, removed: Remove, keys_of: Keys
) -> None:
    """An orphan was announced before its parent was known."""
    rank.apply(stored(2, parent=1))
    rank.apply(stored(1, 2, session_id=FULL_REPORT_SESSION))
    assert rank.held() == set(keys_of(1, 2))

    rank.apply(removed(2), removed(1))

    assert rank.blocks.tracked_entries() == 0


def test_window_blocks_announced_again_are_no_copies_more(
    rank: Any, stored: Store, removed: Remove
) -> None:
    """Each group tells its own."""
    window: dict[str, Any] = {"kind": "sliding_window", "window_tokens": 9, "group": 1}
    rank.apply(stored(1, 2, kind="full_attention"), stored(1, 2, **window))
    rank.apply(stored(1, 2, session_id=FULL_REPORT_SESSION, **window))

    rank.apply(removed(1, 2, group=1))

    assert rank.held(group=1) == set()
