"""The header by which balancers know each other, and themselves."""

import pytest

from balancer.core.errors import LoopError
from balancer.core.http.own_mark import balancer_reason, refuse_balancers


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        pytest.param({}, None, id="an-engine"),
        pytest.param({"x-kvlb-balancer": "me"}, "own_address", id="this-one"),
        pytest.param({"x-kvlb-balancer": "you"}, "another_balancer", id="another"),
        pytest.param({"x-kvlb-balancer": ""}, "another_balancer", id="one-without-a-name"),
    ],
)
def test_an_answer_tells_who_gave_it(headers: dict[str, str], reason: str | None) -> None:
    """Engines have no such header."""
    assert balancer_reason(headers, "me") == reason


@pytest.mark.parametrize(
    ("mark", "says"),
    [(b"me", "through this balancer already"), (b"you", "another kvlb balancer")],
)
def test_request_that_was_a_leg_is_refused(mark: bytes, says: str) -> None:
    """508, which nobody tries elsewhere."""
    with pytest.raises(LoopError, match=says) as caught:
        refuse_balancers([(b"host", b"h"), (b"x-kvlb-balancer", mark)], "me")

    assert (caught.value.status, caught.value.code) == (508, "loop")
    assert not caught.value.retryable


def test_request_of_a_client_passes() -> None:
    """It has no such header."""
    refuse_balancers([(b"host", b"h"), (b"x-kvlb-explain", b"1")], "me")
