"""Events that contradict themselves, and the reset."""

from collections.abc import Callable
from typing import Any

import pytest

from indexer.core.events import AllBlocksCleared, BlockRemoved, BlockStored
from indexer.core.index import AllDropped, BlocksHeld, GroupKind, GroupSpec
from indexer.core.types import BlockKey, Tier

Store = Callable[..., BlockStored]
Remove = Callable[..., BlockRemoved]
Keys = Callable[..., list[BlockKey]]

CLEARED = AllBlocksCleared()


# Events that contradict themselves


@pytest.fixture
def bad(request: pytest.FixtureRequest, stored: Store) -> BlockStored:
    """An event that contradicts itself: a chain's names, and what is wrong about it."""
    names, fields = request.param
    return stored(*names, **fields)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        pytest.param(((7, 7), {}), "duplicate_hashes", id="duplicate"),
        pytest.param(((7,), {"parent": 7}), "self_parent", id="own-parent"),
        pytest.param(((7, 8), {"parent": 8}), "self_parent", id="parent-in-chain"),
        pytest.param(((7,), {"token_ids": [1, 2, 3, -4]}), "bad_token", id="negative-token"),
        pytest.param(((7,), {"token_ids": [1, 2, 3, 2**32]}), "bad_token", id="large-token"),
        pytest.param(((7,), {"token_ids": [1] * 5}), "unaligned_tokens", id="too-long"),
        pytest.param(
            ((7,), {"token_ids": [1] * 8, "block_size": 8}), "mixed_block_size", id="size"
        ),
        pytest.param(
            ((7,), {"kind": "cross_attention", "group": 5}), "unsupported_group", id="kind"
        ),
        pytest.param(
            ((7,), {"token_ids": [1] * 5, "group": 5}),
            "unsupported_group",
            id="group-without-a-kind",
        ),
    ],
    indirect=["bad"],
)
def test_f20_inconsistent_event_costs_only_itself(
    rank: Any, bad: BlockStored, reason: str, stored: Store, keys_of: Keys
) -> None:
    """F20: the good rows stay, and the event around it counts."""
    rank.apply(stored(*range(100, 200)))

    rank.apply(stored(1), bad, stored(2, parent=1))
    assert rank.held() == {*keys_of(*range(100, 200)), *keys_of(1, 2)}
    assert rank.blocks.counts == {reason: 1}


def test_f20_event_without_hashes_is_no_fault(
    rank: Any, stored: Store, removed: Remove, placeholder: Store
) -> None:
    """F20: window groups send it all the time."""
    rank.apply(stored(token_ids=[1, 2]), placeholder(), removed())

    assert rank.blocks.counts == {}


def test_known_hash_counts_even_where_tokens_do_not_align(
    rank: Any, stored: Store, removed: Remove, keys_of: Keys
) -> None:
    """A masked announcement is still a copy of what is known."""
    rank.apply(stored(1, 2))

    rank.apply(stored(1, 2, token_ids=[1] * 30), removed(1, 2))
    assert rank.held() == set(keys_of(1, 2))
    assert rank.blocks.counts == {"unaligned_tokens": 1}


def test_negative_block_size_is_a_placeholder(rank: Any, stored: Store) -> None:
    """A size that can't be one means nothing about tokens."""
    rank.apply(stored(1, block_size=-4))

    assert rank.blocks.counts == {"unknown_placeholder": 1}


# Reset


def test_clear_drops_everything_at_once(rank: Any, stored: Store, removed: Remove) -> None:
    """It can't be told which cache was reset: every tier, group and orphan goes."""
    rank.apply(stored(1, 2), stored(1, tier=Tier.CPU), stored(9, parent=8), stored(1), removed(1))

    update = rank.apply(stored(3), CLEARED)
    assert list(update.changes) == [AllDropped()]
    assert rank.blocks.tracked_entries() == 0
    assert (rank.blocks.orphans, rank.blocks.held_blocks) == (0, 0)


def test_stores_after_a_clear_in_the_same_batch_count(
    rank: Any, stored: Store, removed: Remove, keys_of: Keys
) -> None:
    """The clear comes with the step that stores the next blocks."""
    rank.apply(stored(1, 2))

    update = rank.apply(removed(2), CLEARED, stored(1))
    full = GroupSpec(group=0, kind=GroupKind.FULL, block_size=4)
    assert list(update.changes) == [AllDropped(), full, BlocksHeld(0, Tier.GPU, keys_of(1))]
