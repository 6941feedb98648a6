"""What the first bytes of an event stream say: nothing yet, something, or an error."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.core.http.stream_beginning import (
    FirstWord,
    has_comment,
    is_usual_event,
    read_beginning,
    read_ended,
)
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
        pytest.param(
            b'data: {"choices":[{"text":"a","finish_reason":"error"}]}\n\n', True, id="words-first"
        ),
        pytest.param(b'event: errors\ndata: {"a":1}\n\n', True, id="another-name"),
        pytest.param(b"data: [DONE]\n\n", True, id="end"),
        pytest.param(b'data: {"error":null}\n\n', True, id="no-error"),
        pytest.param(b'data: {"error":\n\n', True, id="no-json"),
        pytest.param(b'event: ping\ndata: {"type": "ping"}\n\n', False, id="named-opening"),
        pytest.param(b"data:\n\n", False, id="empty-data"),
        pytest.param(b"data: \ndata:\n\n" + TOKEN, True, id="empty-data-and-token"),
        pytest.param(b"data: " + b"x" * 70_000, True, id="too-long"),
    ],
)
def test_an_event_that_says_something_ends_the_beginning(held: bytes, says: bool) -> None:
    """The first one decides; comments and openings are none."""
    assert read_beginning(held) is says


@pytest.mark.parametrize(
    "before",
    [b"", OPENING, b"data:\n\n", b"retry: 10\n\n", b"\xef\xbb\xbf"],
    ids=["first", "behind-an-opening", "behind-empty-data", "behind-retry", "byte-order-mark"],
)
def test_an_error_is_the_answer(before: bytes) -> None:
    """With its own status."""
    error = b'{"error": {"message": "m", "code": 400}}'

    assert read_beginning(before + b"data: " + error + b"\n\n") == ToldError(status=400, body=error)


@pytest.mark.parametrize(
    "choice",
    [
        pytest.param(b'{"text":"","finish_reason":"error"}', id="completion"),
        pytest.param(b'{"delta":{"content":""},"finish_reason":"error"}', id="chat"),
        pytest.param(b'{"delta":{"role":"assistant"},"finish_reason":"error"}', id="opening"),
    ],
)
@pytest.mark.parametrize("before", [b"", OPENING], ids=["first", "behind-an-opening"])
def test_an_end_without_a_word_is_an_error(before: bytes, choice: bytes) -> None:
    """The engine gave up before it had said anything."""
    told = read_beginning(before + b'data: {"choices":[' + choice + b"]}\n\ndata: [DONE]\n\n")

    assert isinstance(told, ToldError)
    assert told.status == 500


@pytest.mark.parametrize(
    "event",
    [
        pytest.param(b'event: error\ndata: {"message":"gone"}\n\n', id="first"),
        pytest.param(b'id: 1\r\nevent:error\r\ndata: {"message":"gone"}\r\n\r\n', id="crlf"),
    ],
)
def test_an_event_named_error_is_one(event: bytes) -> None:
    """Whatever its data look like."""
    told = read_beginning(event)

    assert isinstance(told, ToldError)
    assert (told.status, b'"gone"' in told.body) == (502, True)


def test_a_stream_may_end_as_an_error_that_is_no_stream() -> None:
    """Somebody put the content type of streams before it."""
    body = b'{"error":{"message":"m","code":503}}'

    assert not read_beginning(body + b"\n\n")
    assert read_ended(body + b"\n\n") == ToldError(status=503, body=body)
    assert read_ended(b"") is None
    assert read_ended(b": ping\n\n") is None


USUAL = b'data: {"id":"c","choices":[{"text":"a"}]}\n\n'


@pytest.mark.parametrize(
    ("held", "is_usual"),
    [
        pytest.param(USUAL, True, id="token"),
        pytest.param(USUAL + USUAL, True, id="two"),
        pytest.param(USUAL[:-1], False, id="half-an-event"),
        pytest.param(b": ping\n\n" + USUAL, False, id="behind-a-comment"),
        pytest.param(USUAL.replace(b'"text":', b'"role":'), False, id="role"),
        pytest.param(USUAL.replace(b'"text":', b'"type":'), False, id="type"),
        pytest.param(USUAL + FAILED, False, id="error"),
        pytest.param(USUAL.replace(b'"a"', b'"","finish_reason":"abort"'), False, id="abort"),
        pytest.param(b"", False, id="nothing"),
    ],
)
def test_usual_event_is_known_at_a_glance(held: bytes, is_usual: bool) -> None:
    """Whatever may be an opening or an error is looked at closer."""
    assert is_usual_event(held) is is_usual


_WORDS = [
    b'"role"',
    b'"type"',
    b'"ping"',
    b"error",
    b"abort",
    b":",
    b"{",
    b"}",
    b"\r",
    b"\n",
    b"data:",
]


@given(st.lists(st.sampled_from(_WORDS), max_size=6), st.sampled_from([b"\n\n", b"\r\n\r\n"]))
def test_glance_agrees_with_closer_look(words: list[bytes], end: bytes) -> None:
    """The law: what is usual says something, and isn't an error."""
    held = b'data: {"id"' + b"".join(words) + end

    assert not is_usual_event(held) or read_beginning(held) is True


@given(st.lists(st.sampled_from([OPENING, b": ping\n\n"]), max_size=4), st.booleans())
def test_more_bytes_never_unsay_anything(before: list[bytes], fails: bool) -> None:
    """The law: what the first telling event said stands, whatever follows."""
    begun = b"".join(before) + (FAILED if fails else TOKEN)

    assert read_beginning(begun) == read_beginning(begun + FAILED) == read_beginning(begun + TOKEN)


@pytest.mark.parametrize(
    ("held", "found"),
    [
        pytest.param(b": keep-alive\n\n", True, id="alone"),
        pytest.param(b"\xef\xbb\xbf:\r\n\r\n", True, id="byte-order-mark"),
        pytest.param(OPENING + b": a\r\r", True, id="behind-an-opening"),
        pytest.param(b"retry: 10\n: a\n\n", True, id="behind-a-field"),
        pytest.param(b": keep-alive\n", False, id="not-whole"),
        pytest.param(b": a\n" + OPENING, False, id="of-an-event"),
        pytest.param(b"id: 1\n\n", False, id="colon-within"),
        pytest.param(b"", False, id="nothing"),
    ],
)
def test_a_comment_that_stands_for_itself_is_found(held: bytes, found: bool) -> None:
    """One that belongs to an event waits with it."""
    assert has_comment(held) is found


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_first_word_behind_comments_is_told_once(size: int) -> None:
    """However the stream is cut."""
    stream = b": a\n\n" + OPENING + b": b\r\n\r\n" + TOKEN + TOKEN
    word = FirstWord()

    told = [word.take(stream[at : at + size]) for at in range(0, len(stream), size)]

    assert told.count(True) == 1
    assert word.is_over


def test_an_error_behind_comments_is_no_word() -> None:
    """Nor is what follows it."""
    word = FirstWord()

    assert [word.take(each) for each in (b": a\n\n", FAILED, TOKEN)] == [False] * 3
    assert word.is_over
