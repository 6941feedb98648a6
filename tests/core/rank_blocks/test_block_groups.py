"""Groups of hybrid models: windows take their names from full groups."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest

from indexer.core.events import AllBlocksCleared, BlockRemoved, BlockStored
from indexer.core.hashing import Namespace, block_keys, pack_tokens, root_key
from indexer.core.index import GroupKind, GroupSpec
from indexer.core.types import BlockKey, EngineHash, Tier

Store = Callable[..., BlockStored]
Remove = Callable[..., BlockRemoved]
Keys = Callable[..., list[BlockKey]]
Hashes = Callable[[Iterable[int]], list[EngineHash]]
Tokens = Callable[..., list[int]]

SIZE = 4

CLEARED = AllBlocksCleared()


@pytest.fixture
def window(stored: Store, tokens_of: Tokens) -> Store:
    """A window group's event: the last blocks of a chain, tokens of all of it."""
    usual = {"group": 1, "kind": "sliding_window", "window_tokens": 6}
    usual["token_ids"] = tokens_of(*range(10))
    return partial(stored, **usual)


@pytest.fixture
def full(stored: Store) -> Store:
    """A full group's event."""
    return partial(stored, group=3, kind="full_attention")


def test_window_blocks_are_named_by_the_full_group_of_the_same_batch(
    rank: Any, window: Store, full: Store, keys_of: Keys
) -> None:
    """Window groups come first and skip masked blocks: names are resolved at the batch's end."""
    rank.apply(window(2, 3), full(1, 2, 3))

    assert rank.blocks.groups == {
        1: GroupSpec(group=1, kind=GroupKind.WINDOW, block_size=SIZE, window_tokens=6),
        3: GroupSpec(group=3, kind=GroupKind.FULL, block_size=SIZE),
    }
    assert rank.held(group=1) == set(keys_of(1, 2, 3)[1:])
    assert rank.held(group=3) == set(keys_of(1, 2, 3))


def test_several_window_groups_are_named_by_one_full_group(
    rank: Any, window: Store, full: Store, keys_of: Keys
) -> None:
    """Gemma publishes three of them before the full group, and more may show later."""
    rank.apply(window(2, group=0), window(2, group=1), full(1, 2))

    rank.apply(window(1, group=2))
    assert [rank.held(group=each) for each in range(3)] == [
        {keys_of(1, 2)[1]},
        {keys_of(1, 2)[1]},
        set(keys_of(1)),
    ]


def test_window_blocks_wait_for_their_name(
    rank: Any, window: Store, full: Store, keys_of: Keys
) -> None:
    """The full group may name a hash batches later, even as an orphan's descendant."""
    rank.apply(window(2, 3), full(2, 3, parent=1))
    assert rank.held(group=1) == set()

    rank.apply(full(1))
    assert rank.held(group=1) == set(keys_of(1, 2, 3)[1:])


def test_window_block_named_earlier_is_held_at_once(
    rank: Any, window: Store, full: Store, keys_of: Keys
) -> None:
    """The full group knew the hash already."""
    rank.apply(full(1, 2, 3))

    rank.apply(window(3))
    assert rank.held(group=1) == {keys_of(1, 2, 3)[2]}


def test_window_block_outlives_the_full_one(
    rank: Any, removed: Remove, window: Store, full: Store, keys_of: Keys
) -> None:
    """A name once known stays while the hash is held; then it goes."""
    rank.apply(window(2), window(2), full(1, 2))
    rank.apply(removed(2, group=3), removed(1, group=3))
    assert rank.held(group=1) == {keys_of(1, 2)[1]}

    rank.apply(removed(2, group=1))
    assert rank.held(group=1) == {keys_of(1, 2)[1]}
    rank.apply(removed(2, group=1), removed(2, group=1))
    assert rank.held(group=1) == set()
    assert rank.blocks.counts == {"unknown_removal": 1}
    assert rank.blocks.tracked_entries() == 0


def test_copies_of_a_named_window_block_are_counted(
    rank: Any, removed: Remove, window: Store, full: Store, keys_of: Keys
) -> None:
    """Two copies, two removals."""
    rank.apply(window(2), full(1, 2))
    rank.apply(window(2))

    rank.apply(removed(2, group=1))
    assert rank.held(group=1) == {keys_of(1, 2)[1]}
    rank.apply(removed(2, group=1))
    assert rank.held(group=1) == set()


def test_unnamed_window_block_may_leave_again(
    rank: Any, removed: Remove, window: Store, full: Store
) -> None:
    """A removal before the name finds the hash."""
    rank.apply(window(2), removed(2, group=1), full(1, 2))

    assert rank.held(group=1) == set()
    assert rank.blocks.counts == {}


def test_window_group_names_its_own_blocks_where_tokens_align(
    rank: Any, window: Store, full: Store, tokens_of: Tokens
) -> None:
    """Its block size may be another than the full group's; then nobody else can."""
    rank.apply(full(1, 2, 3, 4), window(51, 52, block_size=8, token_ids=tokens_of(1, 2, 3, 4)))
    rank.apply(window(53, parent=52, block_size=8, token_ids=tokens_of(5, 6)))
    rank.apply(window(54, parent=99, block_size=8, token_ids=tokens_of(5, 6)))

    root = root_key(Namespace(model="tiny"))
    coarse = block_keys(root, pack_tokens(tokens_of(1, 2, 3, 4, 5, 6)), 8)
    assert rank.held(group=1) == set(coarse)


def test_bad_token_in_a_window_group_is_counted(
    rank: Any, window: Store, full: Store, keys_of: Keys
) -> None:
    """The copies count; the name must come from elsewhere."""
    rank.apply(window(1, token_ids=[-1] * SIZE), full(1))

    assert rank.blocks.counts == {"bad_token": 1}
    assert rank.held(group=1) == set(keys_of(1))


def test_window_placeholder_needs_a_held_hash(
    rank: Any, removed: Remove, placeholder: Store, window: Store, full: Store, keys_of: Keys
) -> None:
    """An offloaded window block is resolved like any other."""
    rank.apply(full(1, 2), window(2))
    rank.apply(placeholder(2, group=1, tier=Tier.CPU), placeholder(7, group=1, tier=Tier.CPU))
    assert rank.held(group=1, tier=Tier.CPU) == {keys_of(1, 2)[1]}
    assert rank.blocks.counts == {"unknown_placeholder": 1}

    rank.apply(removed(2, group=1))
    assert rank.held(group=1) == set()
    rank.apply(removed(2, group=1, tier=Tier.CPU))
    assert rank.held(group=1, tier=Tier.CPU) == set()


def test_twin_hashes_hold_a_window_key_together(
    rank: Any, removed: Remove, window: Store, keys_of: Keys, hashes_of: Hashes, tokens_of: Tokens
) -> None:
    """As in full groups, the key decides."""
    twins = [window(1, hashes=hashes_of([each]), token_ids=tokens_of(1)) for each in (11, 12)]
    rank.apply(*twins)

    rank.apply(removed(11, group=1))
    assert rank.held(group=1) == set(keys_of(1))
    rank.apply(removed(12, group=1))
    assert rank.held(group=1) == set()


def test_clear_empties_window_groups(rank: Any, window: Store, full: Store) -> None:
    """Names and copies go with everything else."""
    rank.apply(window(2), full(1, 2))

    rank.apply(CLEARED)
    assert rank.shown == set()
    assert rank.blocks.tracked_entries() == 0


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("full_attention", GroupKind.FULL),
        ("mla_attention", GroupKind.FULL),
        ("sink_full_attention", GroupKind.FULL),
        ("sliding_window", GroupKind.WINDOW),
        ("sliding_window_mla", GroupKind.WINDOW),
        ("mamba", GroupKind.STATE),
        (None, GroupKind.FULL),
    ],
)
def test_kind_says_what_a_hit_needs(
    rank: Any, kind: str | None, expected: GroupKind, stored: Store
) -> None:
    """Group 0 without a kind is full attention: releases before 0.22."""
    rank.apply(stored(1, kind=kind, window_tokens=8))

    assert rank.blocks.groups[0].kind is expected
    assert rank.blocks.groups[0].window_tokens == (8 if expected is GroupKind.WINDOW else None)


def test_full_groups_are_followed_each_by_itself(
    rank: Any, full: Store, keys_of: Keys, tokens_of: Tokens
) -> None:
    """The index takes what all of them hold; block sizes may differ."""
    rank.apply(full(1, 2, group=0), full(31, group=2, block_size=8, token_ids=tokens_of(1, 2)))

    coarse = block_keys(root_key(Namespace(model="tiny")), pack_tokens(tokens_of(1, 2)), 8)
    assert rank.held(group=0) == set(keys_of(1, 2))
    assert rank.held(group=2) == set(coarse)
    assert rank.blocks.held_blocks == 3


def test_group_without_a_kind_is_full_until_its_tokens_say_otherwise(
    rank: Any, stored: Store, keys_of: Keys, tokens_of: Tokens
) -> None:
    """0.20 and 0.21 number groups but don't name kinds; a window must not limit hits for ever."""
    rank.apply(stored(1, 2, group=1))
    assert rank.held(group=1) == set(keys_of(1, 2))

    rank.apply(stored(3, parent=2, group=1, token_ids=tokens_of(3, 4)))
    assert rank.specs[-1] == GroupSpec(group=1, kind=GroupKind.WINDOW, block_size=SIZE)
    assert rank.specs[-1].boundary_blocks == 0
    rank.apply(stored(5, group=1))
    assert rank.held(group=1) == set()
    assert rank.blocks.counts == {"unsupported_group": 2}


def test_gpu_corrects_a_block_size_learnt_from_another_tier(
    rank: Any, stored: Store, keys_of: Keys
) -> None:
    """A connector's chunks come first after a late start: the engine's own blocks decide."""
    rank.apply(stored(9, tier=Tier.CPU, block_size=8, token_ids=[1] * 8))
    rank.apply(stored(1, 2))
    rank.apply(stored(8, tier=Tier.CPU, block_size=8, token_ids=[1] * 8))

    assert [spec.block_size for spec in rank.specs] == [8, SIZE]
    assert rank.shown == {(0, Tier.GPU, key) for key in keys_of(1, 2)}
    assert rank.blocks.counts == {"mixed_block_size": 1}
