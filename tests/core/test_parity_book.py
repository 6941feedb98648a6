"""When local tokens are compared, and what one difference leads to."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.core.prompt.parity import EAGER, Difference, ParityBook, find_difference

ids = st.lists(st.integers(0, 3), max_size=6)


@given(ids, ids)
def test_the_difference_is_where_they_part(own: list[int], engine: list[int]) -> None:
    """Before it they are equal; there they aren't, or one of them has ended."""
    found = find_difference(own, engine)

    if found is None:
        assert own == engine
    else:
        at = found.index
        assert own[:at] == engine[:at]
        assert own[at : at + 1] != engine[at : at + 1]
        assert (found.own_tokens, found.engine_tokens) == (len(own), len(engine))


def test_first_prompts_are_compared_then_one_each_interval() -> None:
    """What is wrong from the start shows at once."""
    book = ParityBook(10.0)

    assert [book.is_due("m", 0.1 * number) for number in range(8)] == [True] * EAGER + [False] * 3
    assert not book.is_due("m", 10.3)
    assert book.is_due("m", 10.5)


def test_models_are_compared_apart() -> None:
    """One that is asked for often keeps nobody from being looked at."""
    book = ParityBook(10.0)
    for _ in range(EAGER):
        book.is_due("a", 0.0)

    assert not book.is_due("a", 1.0)
    assert book.is_due("b", 1.0)


def test_doubt_brings_the_next_comparison_forward() -> None:
    """The engine has counted other tokens; but no more than one comparison a second."""
    book = ParityBook(10.0)
    for _ in range(EAGER):
        book.is_due("m", 0.0)
    book.doubt("m")
    book.doubt("unheard-of")

    assert not book.is_due("m", 0.9)
    assert book.is_due("m", 1.0)
    assert not book.is_due("m", 2.1)


def test_without_an_interval_nothing_is_compared() -> None:
    """The operator's wish."""
    assert not ParityBook(0.0).is_due("m", 0.0)


def test_distrusted_model_is_not_compared_any_more() -> None:
    """Nor believed."""
    book = ParityBook(10.0)
    difference = Difference(index=3, own_tokens=5, engine_tokens=6)
    before = book.is_distrusted("m")

    book.distrust("m", difference)

    assert not before
    assert book.is_distrusted("m")
    assert not book.is_due("m", 0.0)


@pytest.mark.parametrize("outcomes", [["same", "same", "failed"]])
def test_outcomes_are_counted(outcomes: list[str]) -> None:
    """By name."""
    book = ParityBook(10.0)
    for each in outcomes:
        book.count("m", each)

    assert book.models["m"].outcomes == {"same": 2, "failed": 1}
