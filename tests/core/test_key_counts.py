"""Keys and how many hold them."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from balancer.core.load.key_counts import KeyCounts
from indexer.core.types import BlockKey

holders = st.lists(st.lists(st.integers(0, 9).map(BlockKey), max_size=12), max_size=12)


@given(holders, st.data())
def test_a_key_is_held_until_its_last_holder_drops_it(
    keys: list[list[BlockKey]], data: st.DataObject
) -> None:
    """As a plain counter of sets has it, whatever the order."""
    counts, model = KeyCounts(), Counter[BlockKey]()
    for each in keys:
        counts.add(each)
        model.update(set(each))
    for each in data.draw(st.permutations(keys)):
        counts.drop(each)
        model.subtract(set(each))
        held = {key for key, left in model.items() if left}

        assert {key for key in range(10) if BlockKey(key) in counts.held} == held
        assert len(counts) == len(held)


def test_cleared_counts_are_empty() -> None:
    """Shared keys, too."""
    counts = KeyCounts()
    counts.add([BlockKey(1), BlockKey(2)])
    counts.add([BlockKey(1)])
    counts.clear()
    counts.add([BlockKey(1)])
    counts.drop([BlockKey(1)])

    assert len(counts) == 0
