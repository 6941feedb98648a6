"""Whether the beginning of an event stream says anything yet: a token, an error, or neither.

Rules:

1. Comments, empty data and a chat's opening (`core.http.sse`), or what opens an answer of another API
   (`core.http.gave_up`), say nothing: an engine may send them before it has
   computed, or loaded, anything, and then fail.
2. The first event that says something decides. An error that comes after it is the client's to see.
3. A comment without data says nothing either, but is for the client to see at once: it is how an engine
   keeps a connection alive while it computes (`--sse-keep-alive-interval`).
4. What is no complete event yet says nothing, unless it is longer than any error. Once the stream has
   ended it may be an error all the same: one that was written as if no stream had been asked for.

Cost: as a rule some searches in the few bytes that came first, else a split of them; a decode only of what
names an error.
"""

import re
from typing import Final

from balancer.core.http.gave_up import read_named
from balancer.core.http.sse import data_of, is_opening
from balancer.core.http.told_error import (
    BYTE_ORDER_MARK,
    ToldError,
    read_error,
    read_named_error,
    read_wordless,
)

_EVENT_END: Final = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")
_ERROR_NAME: Final = re.compile(rb"(?:^|[\r\n])event: ?error[\r\n]")
_COMMENT: Final = re.compile(rb"(?:^|[\r\n]):")
_USUAL: Final = b'data: {"id"'
_LONGEST_BYTES: Final = 64 * 1024


def is_usual_event(beginning: bytes) -> bool:
    """Tell at a glance that a stream's first bytes say something, and tell no error; False: look closer."""
    return (
        beginning.startswith(_USUAL)
        and beginning.endswith(b"\n\n")
        and b'"role"' not in beginning
        and b'"type"' not in beginning
        and b"error" not in beginning
        and b"abort" not in beginning
    )


def read_beginning(held: bytes) -> ToldError | bool:
    """Tell whether these first bytes say something; the error, if that is what they say."""
    start = len(BYTE_ORDER_MARK) if held.startswith(BYTE_ORDER_MARK) else 0
    for end in _EVENT_END.finditer(held):
        event = held[start : end.end()]
        start = end.end()
        data = data_of(event)
        if data is None:
            continue
        says = _read_event(event, data)
        if says:
            return says
    return len(held) > _LONGEST_BYTES


def has_comment(held: bytes) -> bool:
    """Tell whether a comment that stands for itself is complete."""
    start = len(BYTE_ORDER_MARK) if held.startswith(BYTE_ORDER_MARK) else 0
    for end in _EVENT_END.finditer(held):
        event = held[start : end.end()]
        start = end.end()
        if _COMMENT.search(event) is not None and data_of(event) is None:
            return True
    return False


class FirstWord:
    """Looks for the first event that says something, in a stream that began with a comment."""

    __slots__ = ("_held", "is_over")

    def __init__(self) -> None:
        self.is_over = False
        """It is here, or is an error, so that none is to come."""
        self._held = b""

    def take(self, chunk: bytes) -> bool:
        """Whether it is in this piece."""
        if self.is_over:
            return False
        self._held += chunk
        says = read_beginning(self._held)
        self.is_over = bool(says)
        ends = [end.end() for end in _EVENT_END.finditer(self._held)]
        self._held = self._held[ends[-1] :] if ends else self._held
        return says is True


def read_ended(held: bytes) -> ToldError | None:
    """Tell whether a stream that ended, and said nothing, is an error that is no stream."""
    return read_error(held.strip())


def _read_event(event: bytes, data: bytes) -> ToldError | bool:
    bare = data.strip()
    if b"error" in event or b"abort" in event:
        if _ERROR_NAME.search(event):
            return read_named_error(bare)
        told = read_error(bare) or read_wordless(bare)
        if told is not None:
            return told
    return not is_opening(data) and read_named(bare)
