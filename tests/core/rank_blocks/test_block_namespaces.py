"""Salts, adapters and extras: whose blocks an event names."""

from collections.abc import Callable
from typing import Any

import pytest

from indexer.core.events import BlockRemoved, BlockStored
from indexer.core.types import BlockKey

Store = Callable[..., BlockStored]
Remove = Callable[..., BlockRemoved]
Keys = Callable[..., list[BlockKey]]


def test_f08_salt_separates_tenants(rank: Any, stored: Store, keys_of: Keys) -> None:
    """F08: only the salt's owner matches, from the first block on."""
    rank.apply(stored(1, 2, extra_keys=[["a"], None]))

    assert rank.held() == set(keys_of(1, 2, salt="a"))
    assert rank.held().isdisjoint((*keys_of(1, 2), *keys_of(1, 2, salt="b")))


def test_f09_adapter_belongs_to_the_root_not_to_each_block(
    rank: Any, stored: Store, keys_of: Keys
) -> None:
    """F09: the bare string equal to the adapter is the adapter; a salt after it still counts."""
    rank.apply(stored(1, 2, lora="ad1", extra_keys=[["ad1"], ["ad1"]]))
    rank.apply(stored(3, lora="ad1", extra_keys=[["ad1", "salt"]]))
    rank.apply(stored(4, parent=2, lora="ad1", extra_keys=[["ad1"]]))

    assert rank.held() == {
        *keys_of(1, 2, 4, lora="ad1"),
        *keys_of(3, lora="ad1", salt="salt"),
    }


def test_salt_that_spells_the_adapter_is_still_a_salt(
    rank: Any, stored: Store, keys_of: Keys
) -> None:
    """Only the first of two equal strings is the adapter."""
    rank.apply(stored(1, lora="x", extra_keys=[["x", "x"]]))

    assert rank.held() == set(keys_of(1, lora="x", salt="x"))


@pytest.mark.parametrize(
    "extra",
    [
        pytest.param(["image", 2], id="pair"),
        pytest.param("image", id="identifier-of-0.18"),
        pytest.param(b"digest", id="prompt-embeds"),
        pytest.param({"new": 1}, id="unknown"),
    ],
)
def test_extras_of_a_block_leave_the_text_before_it_shared(
    rank: Any, extra: object, stored: Store, keys_of: Keys
) -> None:
    """Text before an image keeps its keys; the image's block and all after it differ."""
    rank.apply(stored(1, 2, 3, extra_keys=[None, [extra], None]))

    assert len(rank.held()) == 3
    assert rank.held() & set(keys_of(1, 2, 3)) == set(keys_of(1))


def test_image_in_block_0_is_no_salt(rank: Any, stored: Store, keys_of: Keys) -> None:
    """A pair belongs to its block; the bare string after it is the salt."""
    rank.apply(stored(1, extra_keys=[[["image", 2], "a"]]), stored(2, extra_keys=[[b"digest"]]))

    assert len(rank.held()) == 2
    assert rank.held().isdisjoint((*keys_of(1), *keys_of(1, salt="a"), *keys_of(2)))


def test_entry_that_is_no_list_is_one_extra(rank: Any, stored: Store, keys_of: Keys) -> None:
    """A shape nobody publishes is read as what it must mean."""
    rank.apply(stored(1, extra_keys=["a"]))

    assert rank.held() == set(keys_of(1, salt="a"))


def test_orphan_keeps_its_extras(rank: Any, make_rank: Any, stored: Store) -> None:
    """A parked image block is placed as an image block."""
    rank.apply(stored(2, parent=1, extra_keys=[["image"]]), stored(1))
    other = make_rank()
    other.apply(stored(1, 2, extra_keys=[None, ["image"]]))

    assert rank.held() == other.held()


def test_root_of_many_salts_leaves_with_its_blocks(
    rank: Any, stored: Store, removed: Remove
) -> None:
    """A tenant costs nothing once its blocks are gone, nor when its event adds none."""
    rank.apply(*[stored(each, extra_keys=[[f"salt-{each}"]]) for each in range(1, 9)])
    rank.apply(stored(1, extra_keys=[["another"]]), removed(1))

    rank.apply(removed(*range(1, 9)))
    assert rank.blocks.tracked_entries() == 0
