"""Where a stream that is handed on unread may end."""

import pytest

from balancer.core.http.stream_end import StreamEnd

WORD = b'event: content_block_delta\ndata: {"type":"content_block_delta"}\n\n'
STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
DONE = b"data: [DONE]\n\n"
LONG = b"x" * 200_000
LARGE_END = b'event: response.completed\ndata: {"text":"' + LONG + b'"}\n\n'


def ended(stream: bytes, size: int, *, needs_mark: bool) -> StreamEnd:
    end = StreamEnd(needs_mark=needs_mark)
    for at in range(0, len(stream), size):
        end.feed(stream[at : at + size])
    return end


@pytest.mark.parametrize("size", [1, 7, 1_000_000], ids=["bytewise", "sevens", "whole"])
@pytest.mark.parametrize(
    "stream",
    [
        pytest.param(WORD + STOP, id="message"),
        pytest.param(WORD + STOP.replace(b"\n", b"\r\n"), id="crlf"),
        pytest.param(WORD + STOP.replace(b"\n", b"\r"), id="cr"),
        pytest.param(WORD + STOP[:-1], id="unterminated-mark"),
        pytest.param(WORD + b'data: {"type": "response.incomplete"}\n\n', id="unnamed"),
        pytest.param(WORD + b"event:response.failed\ndata: {}\n\n", id="response"),
        pytest.param(b"data: {}\n\n" + DONE, id="done"),
        pytest.param(b"data: {}\n\ndata: [DONE]", id="unterminated-done"),
        pytest.param(WORD + STOP + b": bye", id="comment-behind"),
        pytest.param(WORD + b"event: error\ndata: x\n\n", id="named-error"),
        pytest.param(WORD + b'data: {"type":"error"}\n\n', id="error-type"),
        pytest.param(WORD + b'data: {"error":{"code":500}}\n\n', id="error"),
    ],
)
def test_a_mark_or_an_error_ends_a_stream(stream: bytes, size: int) -> None:
    """Of any API, in any piece."""
    end = ended(stream, size, needs_mark=True)

    assert end.is_whole
    assert end.has_error is (b"error" in stream)


@pytest.mark.parametrize("size", [1, 7, 1_000_000], ids=["bytewise", "sevens", "whole"])
@pytest.mark.parametrize(
    "stream",
    [
        pytest.param(WORD, id="no-mark"),
        pytest.param(WORD + b'data: {"text":"[DONE] message_stop error"}\n\n', id="words-of-text"),
        pytest.param(WORD + b'data: {"type":["error"]}\n\n', id="no-type"),
        pytest.param(WORD + b": message_stop\n\n", id="comment"),
        pytest.param(WORD + STOP[:-6], id="half-a-mark"),
        pytest.param(WORD + b"event: message_stop\n", id="no-data"),
    ],
)
def test_a_stream_with_marks_is_cut_without(stream: bytes, size: int) -> None:
    """However whole its last event is."""
    assert not ended(stream, size, needs_mark=True).is_whole


@pytest.mark.parametrize("size", [1, 7, 1_000_000], ids=["bytewise", "sevens", "whole"])
@pytest.mark.parametrize(
    ("stream", "whole"),
    [
        pytest.param(WORD, True, id="behind-an-event"),
        pytest.param(WORD + b"data: x\r\r", True, id="cr"),
        pytest.param(WORD + b": bye", True, id="in-a-comment"),
        pytest.param(b"", True, id="nothing"),
        pytest.param(WORD + b'data: {"ty', False, id="inside"),
        pytest.param(WORD + b"data: {}\n", False, id="no-blank-line"),
        pytest.param(WORD + b"data: [DONE]", True, id="unterminated-done"),
    ],
)
def test_a_stream_without_marks_ends_between_events(stream: bytes, whole: bool, size: int) -> None:
    """None ends inside one."""
    assert ended(stream, size, needs_mark=False).is_whole is whole


@pytest.mark.parametrize("needs_mark", [False, True])
def test_large_event_is_known_by_its_beginning(needs_mark: bool) -> None:
    """A completed response holds all of it; its end has to come."""
    assert ended(WORD + LARGE_END, 1000, needs_mark=needs_mark).is_whole
    assert not ended(WORD + LARGE_END[:-2], 1000, needs_mark=needs_mark).is_whole
    assert ended(WORD + LARGE_END[42:] + DONE, 1000, needs_mark=needs_mark).is_whole
