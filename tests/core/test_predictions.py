"""What is kept of predictions: those that live, and little of those that are gone."""

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.core.load.chain_tree import Begun, ChainTree, run_blocks
from balancer.core.load.predictions import RankPredictions
from indexer.core.types import BlockKey, InstanceId, RankId

RANK = RankId(InstanceId("http://e0:8000"), 0)


def predicted(begun: Begun, keys: list[BlockKey]) -> int:
    """Blocks, from the first on."""
    return run_blocks(begun.get(keys[0], {}).get(RANK), keys)[0]


@pytest.mark.parametrize("ends", ["expired", "withdrawn"])
def test_nothing_piles_up_of_what_is_gone(ends: str) -> None:
    """Neither behind a count of tokens that isn't reached, nor behind a time that is far off."""
    begun: Begun = {}
    predictions = RankPredictions(10_000, ChainTree(begun, RANK))
    keys = [BlockKey(number) for number in range(4)]
    kept_bytes = []
    tracemalloc.start()
    for number in range(20_000):
        prediction = predictions.add([keys])
        if ends == "expired":
            predictions.expire(prediction, number + 5.0, after_tokens=1 << 40)
        else:
            predictions.expire(prediction, 1e9, after_tokens=1 << 40)
            predictions.withdraw(prediction)
        predictions.sent(1)
        predictions.purge(number)
        if number % 10_000 == 9_999:
            kept_bytes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()

    assert kept_bytes[1] - kept_bytes[0] < 100_000
    assert predicted(begun, keys) == (4 if ends == "expired" else 0)


def test_what_lives_expires_when_it_should() -> None:
    """However much came and went beside it."""
    begun: Begun = {}
    predictions = RankPredictions(10_000, ChainTree(begun, RANK))
    by_time, by_tokens = [BlockKey(1)], [BlockKey(2)]
    predictions.expire(predictions.add([by_time]), 10.0)
    predictions.expire(predictions.add([by_tokens]), 1e9, after_tokens=600)
    for _ in range(500):
        gone = predictions.add([[BlockKey(3)]])
        predictions.expire(gone, 5.0, after_tokens=100)
        predictions.withdraw(gone)
        predictions.sent(1)
    predictions.purge(9.0)
    before = [predicted(begun, keys) for keys in (by_time, by_tokens)]
    predictions.sent(100)
    predictions.purge(10.0)

    assert before == [1, 1]
    assert [predicted(begun, keys) for keys in (by_time, by_tokens)] == [0, 0]


chains = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 8), st.booleans()), min_size=1, max_size=12
)


@given(chains=chains)
def test_predictions_equal_a_naive_count(chains: list[tuple[int, int, bool]]) -> None:
    """A run ends where no live prediction covers the next key, whatever came and went."""
    begun: Begun = {}
    predictions = RankPredictions(10_000, ChainTree(begun, RANK))
    live: list[list[BlockKey]] = []
    for family, length, is_withdrawn in chains:
        keys = [BlockKey(family * 100 + number) for number in range(length)]
        prediction = predictions.add([keys])
        if is_withdrawn:
            predictions.withdraw(prediction)
            predictions.withdraw(prediction)
        else:
            live.append(keys)
    for family in range(3):
        prompt = [BlockKey(family * 100 + number) for number in range(8)]
        covered = max((len(keys) for keys in live if keys[0] == prompt[0]), default=0)

        assert predicted(begun, prompt) == covered
    assert predictions.blocks == sum(map(len, live))
