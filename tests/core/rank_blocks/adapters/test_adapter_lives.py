"""F10: an adapter's blocks after another one was loaded under its name."""

from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from indexer.core.events import AllBlocksCleared, BlockRemoved, BlockStored
from indexer.core.types import BlockKey, EngineHash, Tier

Store = Callable[..., BlockStored]
Remove = Callable[..., BlockRemoved]
Credit = Callable[..., int]
Keys = Callable[..., list[BlockKey]]


def test_f10_new_id_ends_the_credit_of_the_old_one(
    rank: Any, stored: Store, credit: Credit
) -> None:
    """The old weights' rows leave the index; other adapters and the base model keep theirs."""
    rank.apply(stored(1, 2), stored(5, lora="ad2", lora_id=7), stored(6, lora=None, lora_id=None))

    rank.apply(stored(3, life=2))

    assert credit(rank, 1, 2) == 0
    assert credit(rank, 3) == 1
    assert credit(rank, 5, lora="ad2") == 1
    assert credit(rank, 6, lora=None) == 1


def test_same_prompt_counts_again_once_the_new_adapter_has_computed_it(
    rank: Any, stored: Store, credit: Credit
) -> None:
    """Engines that hash the id, or the path, give it another hash."""
    rank.apply(stored(1, 2))

    rank.apply(stored(1, life=2, hashes=[EngineHash(101)]))

    assert credit(rank, 1, 2) == 1


def test_blocks_built_on_the_old_weights_give_no_credit(
    rank: Any, stored: Store, credit: Credit
) -> None:
    """An engine that hashes the name only goes on from the stale blocks: no orphan, no credit."""
    rank.apply(stored(1, 2))

    rank.apply(stored(3, parent=2, life=2))
    rank.apply(stored(4, parent=3, life=2))

    assert credit(rank, 1, 2, 3, 4) == 0
    assert rank.blocks.orphans == 0
    assert rank.blocks.counts["ended_adapter"] == 2


def test_late_store_of_the_old_life_gives_no_credit(
    rank: Any, stored: Store, credit: Credit
) -> None:
    """A request that began before the reload goes on with the old weights."""
    rank.apply(stored(1), stored(3, life=2))

    rank.apply(stored(9, life=1))

    assert credit(rank, 9) == 0
    assert credit(rank, 3) == 1


def test_removals_of_the_old_life_take_nothing_from_the_new(
    rank: Any, stored: Store, removed: Remove, credit: Credit
) -> None:
    """One copy each: the stale one goes first, as it was stored first."""
    rank.apply(stored(1), stored(1))
    rank.apply(stored(3, life=2))

    rank.apply(removed(1), removed(1))
    rank.apply(stored(1, life=2))
    assert credit(rank, 1) == 1

    rank.apply(removed(1), removed(3))
    assert credit(rank, 1) == 0
    assert rank.blocks.tracked_entries() == 0
    assert rank.blocks.counts["unknown_removal"] == 0


def test_what_is_left_of_several_copies_still_ends(
    rank: Any, stored: Store, removed: Remove, credit: Credit
) -> None:
    """One removal of two leaves a block of the old life."""
    rank.apply(stored(1), stored(1), removed(1))
    assert credit(rank, 1) == 1

    rank.apply(stored(3, life=2))

    assert credit(rank, 1) == 0


def test_block_that_was_refused_is_not_counted_apart(
    rank: Any, stored: Store, removed: Remove
) -> None:
    """Nothing of it was stored, so nothing of it will be removed."""
    rank.apply(stored(1, token_ids=[-1] * 4))

    rank.apply(stored(3, life=2), removed(3))

    assert rank.blocks.tracked_entries() == 0


def test_salted_blocks_of_the_adapter_end_too(rank: Any, stored: Store, credit: Credit) -> None:
    """A salt makes another root, not another adapter."""
    rank.apply(stored(1, extra_keys=[["ad1", "s"]]))
    assert credit(rank, 1, salt="s") == 1

    rank.apply(stored(3, life=2))

    assert credit(rank, 1, salt="s") == 0


def test_offloaded_copies_end_with_the_others(
    rank: Any, stored: Store, removed: Remove, credit: Credit
) -> None:
    """Every tier, and what is copied there later."""
    offload = stored(1, token_ids=[], block_size=0, lora=None, lora_id=None, tier=Tier.CPU)
    rank.apply(stored(1), offload)

    rank.apply(stored(3, life=2), offload)
    assert credit(rank, 1) == 0

    rank.apply(removed(1), removed(1, tier=Tier.CPU), removed(1, tier=Tier.CPU), removed(3))
    assert rank.blocks.tracked_entries() == 0


def test_window_groups_end_too(rank: Any, stored: Store, keys_of: Keys) -> None:
    """Every group of a hybrid model."""
    window: dict[str, Any] = {"group": 1, "kind": "sliding_window", "window_tokens": 5}
    rank.apply(stored(1, 2, **window), stored(1, 2, kind="full_attention"))
    assert {group for group, _, _ in rank.shown} == {0, 1}

    rank.apply(stored(3, life=2, kind="full_attention"))

    assert rank.shown == {(0, Tier.GPU, keys_of(3, lora="ad1")[0])}


def test_orphans_of_the_old_life_are_forgotten(rank: Any, stored: Store) -> None:
    """Their parent, should it show, is of the old life as well."""
    rank.apply(stored(2, parent=1))
    assert rank.blocks.orphans == 1

    rank.apply(stored(3, life=2))

    assert rank.blocks.orphans == 0


def test_clear_forgets_what_was_counted_apart(rank: Any, stored: Store, credit: Credit) -> None:
    """The same hash may then be stored by the new adapter."""
    rank.apply(stored(1), stored(3, life=2), AllBlocksCleared(), stored(1, life=2))

    assert credit(rank, 1) == 1


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["store", "store", "remove"]), st.integers(1, 4), st.integers(1, 3)
        ),
        max_size=30,
    )
)
def test_whatever_comes_nothing_of_an_older_life_is_credited(
    stored: Store, removed: Remove, credit: Credit, new_rank: Any, steps: list[tuple[str, int, int]]
) -> None:
    """Law: with hashes that tell lives apart, credit is what the newest life stored and kept."""
    rank, newest, copies = new_rank(), 0, dict[tuple[int, int], int]()
    for what, name, life in steps:
        hash_ = EngineHash(100 * life + name)
        if what == "store":
            rank.apply(stored(name, life=life, hashes=[hash_]))
            newest = max(newest, life)
            copies[life, name] = copies.get((life, name), 0) + 1
        elif copies.get((life, name)):
            rank.apply(removed(hash_))
            copies[life, name] -= 1

        for each in range(1, 5):
            assert credit(rank, each) == (copies.get((newest, each), 0) > 0)
    if not any(copies.values()):
        assert rank.blocks.tracked_entries() == 0
