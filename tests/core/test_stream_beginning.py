"""What the first bytes of an event stream say: nothing yet, something, or an error."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.core.http.stream_beginning import read_beginning
from balancer.core.http.told_error import ToldError

OPENING = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
TOKEN = b'data: {"choices":[{"text":"a"}]}\n\n'
FAILED = b'data: {"error":{"message":"m","code":500}}\n\n'


@pytest.mark.parametrize(
    ("held", "says"),
    [
        pytest.param(b"", False, id="nothing"),
        pytest.param(b": ping\n\n", False, id="comment"),
        pytest.param(OPENING, False, id="opening"),
        pytest.param(OPENING + b": ping\r\n\r\n" + OPENING, False, id="openings"),
        pytest.param(TOKEN[:-1], False, id="half-an-event"),
        pytest.param(TOKEN, True, id="token"),
        pytest.param(OPENING + TOKEN, True, id="opening-and-token"),
        pytest.param(TOKEN + FAILED, True, id="token-and-error"),
        pytest.param(b"data: [DONE]\n\n", True, id="end"),
        pytest.param(b'data: {"error":null}\n\n', True, id="no-error"),
        pytest.param(b'data: {"error":\n\n', True, id="no-json"),
        pytest.param(b"data: " + b"x" * 70_000, True, id="too-long"),
    ],
)
def test_an_event_that_says_something_ends_the_beginning(held: bytes, says: bool) -> None:
    """The first one decides; comments and openings are none."""
    assert read_beginning(held) is says


@pytest.mark.parametrize("before", [b"", OPENING], ids=["first", "behind-an-opening"])
def test_an_error_is_the_answer(before: bytes) -> None:
    """With its own status."""
    error = b'{"error": {"message": "m", "code": 400}}'

    assert read_beginning(before + b"data: " + error + b"\n\n") == ToldError(status=400, body=error)


@given(st.lists(st.sampled_from([OPENING, b": ping\n\n"]), max_size=4), st.booleans())
def test_more_bytes_never_unsay_anything(before: list[bytes], fails: bool) -> None:
    """The law: what the first telling event said stands, whatever follows."""
    begun = b"".join(before) + (FAILED if fails else TOKEN)

    assert read_beginning(begun) == read_beginning(begun + FAILED) == read_beginning(begun + TOKEN)
