"""Frames of the event protocol, in every framing that was released."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.core.frames import (
    FrameError,
    NumberedBatch,
    parse_live,
    parse_replay,
    replay_request,
)

SEQ_7 = b"\0\0\0\0\0\0\0\7"
END = b"\xff" * 8


def test_live_message_is_topic_number_payload() -> None:
    """The three frames of every release."""
    assert parse_live([b"kv", SEQ_7, b"p"]) == NumberedBatch(b"kv", 7, b"p")


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        pytest.param([], "frame_count", id="nothing"),
        pytest.param([b"p"], "frame_count", id="one-frame"),
        pytest.param([SEQ_7, b"p"], "frame_count", id="two-frames"),
        pytest.param([b"", b"", SEQ_7, b"p"], "frame_count", id="four-frames"),
        pytest.param([b"", SEQ_7[1:], b"p"], "seq_frame", id="seven-byte-number"),
        pytest.param([b"", SEQ_7 + b"\0", b"p"], "seq_frame", id="nine-byte-number"),
        pytest.param([b"", END, b"p"], "seq_frame", id="end-marker-number"),
        pytest.param([b"", b"\x80" + SEQ_7[1:], b"p"], "impossible_seq", id="absurd-number"),
        pytest.param([b"", b"\0\0\1" + 5 * b"\0", b"p"], "impossible_seq", id="two-to-the-40"),
    ],
)
def test_bad_live_message_is_refused_with_a_constant_reason(
    frames: list[bytes], reason: str
) -> None:
    """The reason labels a metric, so it never holds data."""
    with pytest.raises(FrameError) as error:
        parse_live(frames)

    assert error.value.reason == reason


@pytest.mark.parametrize(
    ("frames", "topic"),
    [
        pytest.param([b"", SEQ_7, b"p"], b"", id="up-to-0.25"),
        pytest.param([b"", b"", SEQ_7, b"p"], b"", id="since-0.26-empty-topic"),
        pytest.param([b"", b"kv", SEQ_7, b"p"], b"kv", id="since-0.26"),
        pytest.param([SEQ_7, b"p"], b"", id="no-delimiter"),
        pytest.param([b"kv", SEQ_7, b"p"], b"kv", id="no-delimiter-topic"),
    ],
)
def test_replayed_batch_is_read_in_every_framing(frames: list[bytes], topic: bytes) -> None:
    """F01: replay answers carry a topic frame or not."""
    assert parse_replay(frames) == NumberedBatch(topic, 7, b"p")


@pytest.mark.parametrize(
    "frames",
    [
        pytest.param([b"", END, b""], id="up-to-0.25"),
        pytest.param([b"", b"", END, b""], id="since-0.26"),
        pytest.param([b"", b"kv", END, b""], id="with-topic"),
    ],
)
def test_end_marker_is_never_a_batch(frames: list[bytes]) -> None:
    """F01: number all ones and empty payload."""
    assert parse_replay(frames) is None


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        pytest.param([], "replay_frame_count", id="nothing"),
        pytest.param([b"", b"p"], "replay_frame_count", id="payload-only"),
        pytest.param([b"", b"a", b"b", SEQ_7, b"p"], "replay_frame_count", id="too-many"),
        pytest.param([b"", b"\7", b"p"], "replay_seq_frame", id="short-number"),
        pytest.param([b"", END, b"p"], "replay_seq_frame", id="end-with-payload"),
        pytest.param([b"", b"\x80" + SEQ_7[1:], b"p"], "replay_impossible_seq", id="absurd"),
    ],
)
def test_bad_replay_message_is_refused_with_a_constant_reason(
    frames: list[bytes], reason: str
) -> None:
    """Bad answers are told apart from bad live messages."""
    with pytest.raises(FrameError) as error:
        parse_replay(frames)

    assert error.value.reason == reason


@given(st.integers(0, 2**40 - 1), st.binary())
def test_what_is_asked_for_is_what_comes_back(seq: int, payload: bytes) -> None:
    """The number survives both directions."""
    delimiter, number = replay_request(seq)

    assert parse_replay([delimiter, number, payload]) == NumberedBatch(b"", seq, payload)
