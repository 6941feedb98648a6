"""`kvlb.replay.core.schedule`: when each request of a trace is due."""

from itertools import repeat
from math import log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlb.replay.core.schedule import Pace, plan_schedule
from kvlb.replay.core.trace_rows import TextPrompt, TraceRequest


def request(at_s: float | None, line: int = 1, session: str | None = None) -> TraceRequest:
    return TraceRequest(
        line=line, at_s=at_s, prompt=TextPrompt(text="x"), output_tokens=1, session=session
    )


def half() -> float:
    """A draw that is always the median."""
    return 0.5


def test_first_request_is_due_at_once_and_speed_divides_pauses() -> None:
    """In order of time; equal times keep the trace's order."""
    requests = [request(9.0, 1), request(5.0, 2), request(9.0, 3)]

    planned = plan_schedule(requests, Pace(speed=2.0), half)

    assert [(each.at_s, each.request.line) for each in planned] == [(0.0, 2), (2.0, 1), (2.0, 3)]


def test_limit_counts_in_order_of_time() -> None:
    """Not in order of lines."""
    planned = plan_schedule([request(9.0, 1), request(5.0, 2)], Pace(limit=1), half)

    assert [each.request.line for each in planned] == [2]


def test_chats_begin_and_go_on_after_drawn_pauses() -> None:
    """Exponential ones, of two means; the first begins at once."""
    requests = [request(None, line, session) for line, session in ((1, "a"), (1, "a"), (2, "b"))]

    planned = plan_schedule(requests, Pace(session_gap_s=2.0, turn_gap_s=5.0), half)

    assert [(each.request.session, each.at_s) for each in planned] == [
        ("a", 0.0),
        ("b", pytest.approx(2 * log(2))),
        ("a", pytest.approx(5 * log(2))),
    ]


def test_no_requests_are_no_schedule() -> None:
    """Nothing is due."""
    assert plan_schedule([], Pace(), half) == []


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.01, 100))
def test_speed_scales_the_whole_schedule(times: list[float], speed: float) -> None:
    """It begins at 0, never goes back, and takes the trace's time over the speed."""
    draws = iter(repeat(0.5))
    planned = plan_schedule(
        [request(each) for each in times], Pace(speed=speed), lambda: next(draws)
    )
    at_s = [each.at_s for each in planned]

    assert at_s[0] == 0.0
    assert at_s == sorted(at_s)
    assert at_s[-1] == pytest.approx((max(times) - min(times)) / speed)
