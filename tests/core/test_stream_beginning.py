"""What the first bytes of an event stream say: nothing yet, something, or an error."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.core.http.stream_beginning import StreamError, read_beginning

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


@pytest.mark.parametrize(
    ("error", "status"),
    [
        ({"message": "m", "code": 500}, 500),
        ({"message": "m", "code": 400}, 400),
        ({"message": "m", "code": 200}, 500),
        ({"message": "m", "code": "odd"}, 500),
        ("m", 500),
    ],
)
@pytest.mark.parametrize("before", [b"", OPENING], ids=["first", "behind-an-opening"])
def test_an_error_is_the_answer(error: Any, status: int, before: bytes) -> None:
    """With its own status, if it names one."""
    event = b"data: " + json.dumps({"error": error}).encode() + b"\n\n"

    assert read_beginning(before + event) == StreamError(status=status, body={"error": error})


@given(st.lists(st.sampled_from([OPENING, b": ping\n\n"]), max_size=4), st.booleans())
def test_more_bytes_never_unsay_anything(before: list[bytes], fails: bool) -> None:
    """The law: what the first telling event said stands, whatever follows."""
    begun = b"".join(before) + (FAILED if fails else TOKEN)

    assert read_beginning(begun) == read_beginning(begun + FAILED) == read_beginning(begun + TOKEN)
