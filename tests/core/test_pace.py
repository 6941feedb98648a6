"""How many requests per second are let in."""

from hypothesis import given
from hypothesis import strategies as st

from balancer.core.routing.pace import BURST_S, Pace


def test_without_a_limit_there_is_always_room() -> None:
    """0 is no limit."""
    pace = Pace(0)
    for _ in range(1000):
        assert pace.has_room(0.0)
        pace.take()


@given(
    st.integers(1, 200),
    st.lists(st.floats(0, 0.2), min_size=1, max_size=300),
)
def test_no_second_gets_more_than_the_limit_and_its_burst(
    per_s: int, pauses_s: list[float]
) -> None:
    """Wherever the second begins."""
    pace, now_s, let_in = Pace(per_s), 0.0, []
    for pause_s in pauses_s:
        now_s += pause_s
        if pace.has_room(now_s):
            pace.take()
            let_in.append(now_s)
    most = per_s + max(1.0, per_s * BURST_S)
    for start_s in let_in:
        assert sum(start_s <= each < start_s + 1 for each in let_in) <= most + 1e-6


def test_the_limit_is_reached() -> None:
    """Who always has somebody waiting lets in that many."""
    pace, let_in = Pace(50), 0
    for tick in range(10_000):
        if pace.has_room(tick / 1000):
            pace.take()
            let_in += 1

    assert 500 <= let_in <= 506


def test_so_many_take_so_long() -> None:
    """At the pace; without one they take no time."""
    assert Pace(40).seconds_for(60) == 1.5
    assert Pace(0).seconds_for(60) == 0
