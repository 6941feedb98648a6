"""Which adapters a rank remembers: those that have blocks, and the last that had one."""

from collections.abc import Callable
from typing import Any

from indexer.core.adapters import MOST_IDLE
from indexer.core.events import AllBlocksCleared, BlockRemoved, BlockStored

Store = Callable[..., BlockStored]
Remove = Callable[..., BlockRemoved]
Credit = Callable[..., int]
Resumed = Callable[[Any], Any]
Adapter = Callable[[int], dict[str, Any]]


def known_ids(rank: Any) -> list[int]:
    facts = rank.updates[-1].facts
    assert facts is not None
    return [each for _, each in facts.adapters]


def test_adapters_under_ever_new_names_are_forgotten(
    rank: Any, stored: Store, removed: Remove, adapter: Adapter
) -> None:
    """Those that had a block last are remembered, and all that have one."""
    rank.apply(stored(7, lora="stays"))
    for number in range(MOST_IDLE + 10):
        rank.apply(stored(8, **adapter(number)), removed(8))

    assert known_ids(rank) == [1, *range(110, 110 + MOST_IDLE)]

    rank.apply(removed(7))
    assert known_ids(rank) == [1, *range(111, 110 + MOST_IDLE)]


def test_old_life_of_an_idle_adapter_gives_no_credit(
    rank: Any, stored: Store, removed: Remove, credit: Credit
) -> None:
    """All its blocks have left, and a request of the old weights is still under way."""
    rank.apply(stored(1), stored(2, life=2), removed(2), removed(1))

    rank.apply(stored(1))

    assert credit(rank, 1) == 0


def test_cleared_adapters_are_idle(
    rank: Any, stored: Store, removed: Remove, adapter: Adapter
) -> None:
    """A reset empties them, and they are forgotten like others."""
    rank.apply(stored(7, lora="first"), AllBlocksCleared())
    for number in range(MOST_IDLE):
        rank.apply(stored(8, **adapter(number)), removed(8))

    assert 1 not in known_ids(rank)


def test_block_that_another_adapter_names_is_that_one_s(
    rank: Any, stored: Store, removed: Remove
) -> None:
    """Only a hash that means two things does this; nothing is counted twice."""
    rank.apply(stored(1), stored(1, lora="ad2", life=2))

    rank.apply(removed(1), removed(1))

    assert rank.blocks.tracked_entries() == 0
    assert known_ids(rank) == [1, 2]


def test_restored_adapters_are_forgotten_in_their_turn(
    rank: Any, stored: Store, removed: Remove, resumed: Resumed, adapter: Adapter
) -> None:
    """One that has blocks stays; the others had none."""
    rank.apply(stored(7, lora="stays"), stored(8, lora="goes", life=2), removed(8))
    later = resumed(rank)

    for number in range(MOST_IDLE):
        later.apply(stored(8, **adapter(number)), removed(8))

    assert known_ids(later) == [1, *range(100, 100 + MOST_IDLE)]


def test_facts_that_have_not_changed_are_the_same(rank: Any, stored: Store) -> None:
    """So that a backend need not write them again with every batch."""
    rank.apply(stored(1))
    rank.apply(stored(2, parent=1))
    rank.apply(stored(3, lora="ad2", life=2))

    first, second, third = (update.facts for update in rank.updates)
    assert first is second
    assert second is not third


def test_root_keys_of_many_adapters_are_not_all_remembered(
    rank: Any, stored: Store, credit: Credit, adapter: Adapter
) -> None:
    """They are worked out again, and are the same."""
    for number in range(1100):
        rank.apply(stored(number, **adapter(number)))
    full = rank.blocks.first_full()
    assert full is not None
    assert len(full._plain_roots) <= 1024

    rank.apply(stored(5000, **adapter(0)))

    assert credit(rank, 5000, lora="user-0") == 1
