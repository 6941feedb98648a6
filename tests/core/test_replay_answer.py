"""`kvlb.replay.core.answer`: a streamed answer, read as it comes."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlb.replay.core.answer import AnswerReader

DONE = b"data: [DONE]\n\n"


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text(said: str, finish_reason: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "text": said, "finish_reason": finish_reason}])


def delta(**fields: Any) -> bytes:
    return event(choices=[{"index": 0, "delta": fields}])


USAGE = event(
    choices=[],
    usage={
        "prompt_tokens": 30,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 16},
    },
)


def read(*pieces: bytes) -> AnswerReader:
    """Pieces that come a second apart."""
    reader = AnswerReader(keeps_text=True)
    for number, piece in enumerate(pieces, start=1):
        reader.feed(piece, float(number))
    return reader


def test_first_token_and_pauses_are_timed() -> None:
    """What comes together has no pause between."""
    reader = read(text("a"), text("b") + text("c"), USAGE + DONE)

    assert (reader.first_s, reader.last_s, list(reader.gaps_s)) == (1.0, 2.0, [1.0, 0.0])
    assert (reader.tokens, reader.is_done, reader.fault) == (3, True, None)


def test_usage_is_read() -> None:
    """Cached tokens, too, where they are told."""
    reader = read(text("a"), USAGE, DONE)

    assert (reader.prompt_tokens, reader.completion_tokens, reader.cached_tokens) == (30, 2, 16)


def test_untold_cached_tokens_are_unknown() -> None:
    """Not 0."""
    assert read(event(choices=[], usage={"prompt_tokens": 3})).cached_tokens is None


def test_opening_of_a_chat_is_no_token() -> None:
    """Engines send it before they compute anything."""
    reader = read(delta(role="assistant", content=""), delta(content="hi"), delta(content=""))

    assert (reader.first_s, reader.tokens, reader.text) == (2.0, 1, ["hi"])


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(delta(reasoning_content="hm"), id="reasoning"),
        pytest.param(delta(tool_calls=[{"index": 0}]), id="tool-call"),
        pytest.param(text(""), id="half-a-character"),
    ],
)
def test_whatever_is_said_is_a_token(said: bytes) -> None:
    """Though it is no text."""
    reader = read(said)

    assert (reader.tokens, "".join(reader.text)) == (1, "")


@pytest.mark.parametrize(
    "event_",
    [
        pytest.param(text("", "stop"), id="end"),
        pytest.param(event(choices=[{"index": 0}]), id="nothing"),
        pytest.param(event(choices=None), id="no-choices"),
        pytest.param(b": comment\n\n", id="comment"),
    ],
)
def test_what_says_nothing_is_no_token(event_: bytes) -> None:
    """An end, a comment."""
    assert read(event_).tokens == 0


def test_text_is_kept_only_if_asked_for() -> None:
    """A replay has no use for it."""
    reader = AnswerReader()
    reader.feed(text("a"), 1.0)

    assert (reader.tokens, reader.text) == (1, [])


def test_error_event_is_a_fault() -> None:
    """Although the status was 200."""
    assert read(text("a"), event(error={"message": "died"}), DONE).fault == "error_event"


@pytest.mark.parametrize(
    "data",
    [
        b"data: {\n\n",
        b'data: {"choices": 1}\n\n',
        b"data: \xff\n\n",
        b'data: {"a":' + b"[" * 9000 + b"\n\n",
    ],
)
def test_garbled_event_is_a_fault(data: bytes) -> None:
    """It is told, not skipped."""
    assert read(data, DONE).fault == "garbled"


@given(st.lists(st.integers(1, 200), max_size=8))
def test_cuts_change_nothing(cuts: list[int]) -> None:
    """Wherever the network cuts the bytes, the same is read."""
    whole = (text("a") + text("b") + USAGE + DONE).replace(b"\n", b"\r\n")
    places = [0, *sorted(min(each, len(whole)) for each in cuts), len(whole)]
    reader = AnswerReader(keeps_text=True)
    for start, end in pairwise(places):
        reader.feed(whole[start:end], 1.0)

    assert (reader.text, reader.prompt_tokens, reader.is_done) == (["a", "b"], 30, True)
    assert reader.fault is None
