"""How an event stream that is handed on unread ends: complete, told of an error, or cut.

Rules:

1. A chat's stream and one of token ids end with `[DONE]`, a message with `message_stop`, a response with an event that
   names its status. Whichever of them comes is taken for the end, on any path.
2. An error, named so or told in an event's data, is an end as well: the client knows.
3. A path without a mark of its own may end behind any event. None ends inside one: what has no blank
   line behind it is no event, unless it is a complete mark.
4. Nothing is judged by a finish or stop reason: more may have to follow.

Cost: O(chunk). The common chunk (whole events, no word that a mark or an error has) is one search.
"""

import re
from typing import Final

from balancer.core.http.sse import data_of
from balancer.core.http.told_error import decode_object

_MAX_KEPT_BYTES: Final = 64 * 1024
_HEAD_BYTES: Final = 1024
_EVENT_END: Final = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")
_WHOLE: Final = (b"\n\n", b"\r\n\r\n")
_MARK: Final = r"message_stop|response\.(?:completed|failed|incomplete|cancelled)"
_MAY_END: Final = re.compile(rf"\[DONE\]|error|{_MARK}".encode())
_NAME: Final = re.compile(rf"(?:^|[\r\n])event: ?(?:{_MARK}|(error))[\r\n]".encode())
_TYPE: Final = re.compile(_MARK)
_DONE: Final = b"[DONE]"


class StreamEnd:
    """One stream. `feed` every chunk, then ask."""

    __slots__ = ("_head", "_is_marked", "_kept", "_needs_mark", "has_error")

    def __init__(self, *, needs_mark: bool) -> None:
        """`needs_mark`: without a mark, or an error, it is cut."""
        self.has_error = False
        """An event told of an error."""
        self._needs_mark = needs_mark
        self._is_marked = False
        self._kept = b""
        """The event that isn't complete; of a large one the last bytes."""
        self._head = b""
        """How a large one began."""

    @property
    def is_whole(self) -> bool:
        """Whether it may end here."""
        if self._is_marked or self.has_error:
            return True
        data = data_of(self._kept)
        if self._head or data is None:
            return not (self._head or self._needs_mark)
        is_event = _EVENT_END.search(self._kept) is not None
        if is_event and not self._needs_mark:
            return True
        is_complete = is_event or data.strip() == _DONE or decode_object(data) is not None
        return is_complete and self._ends(self._kept)

    def feed(self, chunk: bytes) -> None:
        """Take what passes."""
        if not self._kept and chunk.endswith(_WHOLE) and _MAY_END.search(chunk) is None:
            return
        data = self._kept + chunk
        start = 0
        for match in _EVENT_END.finditer(data, max(0, len(self._kept) - 3)):
            if match.end() == len(data) and data.endswith(b"\r"):
                break  # an LF may follow, which belongs to this event
            event = self._head or data[start : match.end()]
            self._is_marked = self._ends(event) or self._is_marked
            self._head = b""
            start = match.end()
        self._kept = data[start:]
        if len(self._kept) > _MAX_KEPT_BYTES:
            self._head = self._head or self._kept[:_HEAD_BYTES]
            self._kept = self._kept[-3:]

    def _ends(self, event: bytes) -> bool:
        """Whether an event is a mark or an error; an error is noted."""
        named = _NAME.search(event)
        if named is not None:
            self.has_error = self.has_error or named.group(1) is not None
            return True
        data = data_of(event)
        if data is None or _MAY_END.search(data) is None:
            return False
        if data.strip() == _DONE:
            return True
        told = decode_object(data) or {}
        kind = told.get("type")
        if kind == "error" or told.get("error"):
            self.has_error = True
        return self.has_error or (isinstance(kind, str) and _TYPE.fullmatch(kind) is not None)
