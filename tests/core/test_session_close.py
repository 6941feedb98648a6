"""Close codes as the other side is told them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.core.http.session_close import is_failure, passed_code


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (1000, 1000),
        (1001, 1001),
        (1003, 1003),
        (1004, 1001),
        (1005, 1000),
        (1006, 1001),
        (1007, 1007),
        (1014, 1014),
        (1015, 1001),
        (1016, 1001),
        (2999, 1001),
        (3000, 3000),
        (4999, 4999),
        (5000, 1001),
    ],
)
def test_what_may_be_sent_is_passed(code: int, expected: int) -> None:
    """The rest has a code for what it means."""
    assert passed_code(code, lost=1001) == expected


@given(st.integers(min_value=0, max_value=65535))
def test_no_code_is_sent_that_must_not_be(code: int) -> None:
    """1004 to 1006 and 1015 are never on the wire (RFC 6455, 7.4.1)."""
    assert passed_code(code, lost=1014) not in {1004, 1005, 1006, 1015}


@pytest.mark.parametrize(
    ("code", "expected"),
    [(1000, False), (1001, False), (1005, False), (1011, True), (2999, True), (3000, False)],
)
def test_failures_are_told_from_good_ends(code: int, *, expected: bool) -> None:
    """What applications mean by their codes is theirs."""
    assert is_failure(code) is expected
