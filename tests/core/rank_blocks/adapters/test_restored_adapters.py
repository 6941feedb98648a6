"""F10 across a restart of the indexer: whose the restored blocks are, and which end with an adapter."""

from collections.abc import Callable
from typing import Any

from indexer.core.adapters import MOST_IDLE
from indexer.core.events import AllBlocksCleared, BlockRemoved, BlockStored
from indexer.core.types import EngineHash

Store = Callable[..., BlockStored]
Remove = Callable[..., BlockRemoved]
Credit = Callable[..., int]
Resumed = Callable[[Any], Any]
Adapter = Callable[[int], dict[str, Any]]

SALTED: dict[str, Any] = {"extra_keys": [["ad1", "s"]]}
PLAIN: dict[str, Any] = {"lora": None, "lora_id": None}


def test_reload_is_seen_after_a_restart_of_the_indexer(
    rank: Any, stored: Store, credit: Credit, resumed: Resumed
) -> None:
    """The next process knows the id, and which rows are the adapter's."""
    window: dict[str, Any] = {"group": 1, "kind": "sliding_window", "window_tokens": 5}
    rank.apply(stored(1, 2, kind="full_attention"), stored(1, 2, **window))
    rank.apply(stored(6, 7, lora=None, lora_id=None, kind="full_attention"))
    twins = [EngineHash(101), EngineHash(102)]
    rank.apply(stored(1, 2, hashes=twins, kind="full_attention"))
    later = resumed(rank)

    later.apply(stored(3, life=2, kind="full_attention"))

    assert credit(later, 1, 2) == 0
    assert credit(later, 6, 7, lora=None) == 2
    assert not {group for group, _, _ in later.shown} - {0}


def test_salted_blocks_end_after_a_restart_too(
    rank: Any, stored: Store, credit: Credit, resumed: Resumed
) -> None:
    """Nobody knows any more whose they are, so all of them do; unsalted ones keep their credit."""
    rank.apply(stored(1, **SALTED), stored(2, parent=1), stored(3, lora="ad2", life=7))
    rank.apply(stored(4, **PLAIN), stored(5, **PLAIN, extra_keys=[["t"]]))
    later = resumed(rank)
    assert credit(later, 1, 2, salt="s") == 2

    later.apply(stored(9, life=8))
    later.apply(stored(10, parent=2, life=8))  # an engine that hashes the name only

    assert credit(later, 1, 2, 10, salt="s") == 0
    assert credit(later, 5, lora=None, salt="t") == 0
    assert credit(later, 3, lora="ad2") == credit(later, 4, lora=None) == credit(later, 9) == 1


def test_salted_block_of_a_restored_rank_that_is_told_again_is_known(
    rank: Any, stored: Store, credit: Credit, resumed: Resumed
) -> None:
    """Whoever stores it says whose it is: a tenant of the base model loses nothing."""
    salted = stored(5, **PLAIN, extra_keys=[["t"]])
    rank.apply(stored(1), salted)
    later = resumed(rank)

    later.apply(salted, stored(9, life=2))

    assert credit(later, 5, lora=None, salt="t") == 1


def test_new_adapter_ends_no_salted_blocks(
    rank: Any, stored: Store, credit: Credit, resumed: Resumed, adapter: Adapter
) -> None:
    """Unless so many are known that it may be one that was forgotten."""
    rank.apply(stored(1, **SALTED))
    later = resumed(rank)

    later.apply(*(stored(8, **adapter(number)) for number in range(MOST_IDLE - 1)))
    assert credit(later, 1, salt="s") == 1

    later.apply(stored(9, **adapter(MOST_IDLE)))
    assert credit(later, 1, salt="s") == 0


def test_salted_blocks_of_a_restored_rank_leave_like_others(
    rank: Any, stored: Store, removed: Remove, credit: Credit, resumed: Resumed
) -> None:
    """With their last copy, or a reset."""
    rank.apply(
        stored(1, **SALTED), stored(1, **SALTED), stored(2, hashes=[EngineHash(2)], **SALTED)
    )
    later = resumed(rank)

    later.apply(removed(1))
    assert credit(later, 1, salt="s") == 1
    later.apply(removed(1), removed(2))
    assert later.blocks.tracked_entries() == 0

    later = resumed(rank)
    later.apply(AllBlocksCleared())
    assert later.blocks.tracked_entries() == 0
