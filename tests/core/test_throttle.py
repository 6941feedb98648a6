"""One log line per interval."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from indexer.core.throttle import Throttle


def test_first_line_passes_and_the_next_within_the_interval_doesnt() -> None:
    """Each key has its own interval."""
    throttle = Throttle(10)

    assert throttle.admits("a", 0.0)
    assert not throttle.admits("a", 9.9)
    assert throttle.admits("b", 9.9)
    assert throttle.admits("a", 10.0)


@given(st.lists(st.floats(0, 100), max_size=50))
def test_admitted_lines_are_an_interval_apart(times: list[float]) -> None:
    """However often it is asked."""
    throttle = Throttle(5)
    admitted = [now_s for now_s in sorted(times) if throttle.admits("a", now_s)]

    assert all(after - before >= 5 for before, after in itertools.pairwise(admitted))
