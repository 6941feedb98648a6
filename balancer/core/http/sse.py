"""Reads an event stream from the side: usage, first token, end. Passes its bytes on unchanged.

Rules:

1. Whole events pass as they came; an event in pieces is kept until it is complete, so a cut
   stream never ends for the client in half an event. Events over 64 KiB are not kept (nor read).
2. With `withhold_usage` the usage chunk that *we* asked for is left out: an event with `usage`
   and without choices, just before `[DONE]` or the end. Anywhere else it is the engine's own. So it is
   if an event with choices told usage, too: that is never asked for (`core.http.rewrite`), and engines
   that tell it unasked (`--enable-force-include-usage`) do so on every event.
3. Usage is the last one seen. Nothing but `[DONE]` is the end: not a finish_reason, not usage.
4. Lines end in LF, CRLF or CR, in any mixture and cut anywhere; comments pass.
5. A chat stream's opening (a role, and nothing said yet) is no token: engines may send it before
   they compute anything.
6. An event that is no JSON, or has an unknown shape, passes: reading it is our wish alone.
7. With `details` these stand in the usage that passes (`core.http.usage_splice`); `usage` here stays what
   the engine said.

Cost: O(chunk). The common chunk (whole events, none of the words we look for) is three substring
searches, well under a microsecond.
"""

import re
from typing import Any, Final

import msgspec

from balancer.core.http.usage import Usage, decode_head, read_usage, usage_of_chunk
from balancer.core.http.usage_splice import with_details

_MAX_KEPT_BYTES: Final = 64 * 1024
_ENDS: Final = (b"\n\n", b"\r\n\r\n")
_EVENT_END = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")
_USUAL_CHOICES: Final = b'"choices":[]'
_NO_CHOICES = re.compile(rb"\[\s*\]|null")
_MAX_OPENING_BYTES: Final = 4096


class _OpeningChoice(msgspec.Struct):
    delta: dict[str, Any]


class _Opening(msgspec.Struct):
    choices: list[_OpeningChoice]


class SseReader:
    """One stream. `feed` every chunk, then `finish` once."""

    __slots__ = (
        "_after_held",
        "_details",
        "_held",
        "_kept",
        "_tail",
        "_withholds",
        "has_data",
        "has_error",
        "is_done",
        "usage",
    )

    def __init__(
        self, *, withhold_usage: bool, details: bytes | None = None, has_data: bool = False
    ) -> None:
        """`has_data`: the first token was seen by whoever looked at the first bytes."""
        self.usage: Usage | None = None
        self.has_data = has_data
        """A data event that isn't an opening was seen: the first token is there."""
        self.has_error = False
        """An event told of an error."""
        self.is_done = False
        """`[DONE]` was seen."""
        self._withholds = withhold_usage
        self._details = details
        self._kept = b""
        self._tail: bytes | None = None
        """Last bytes of an event too large to keep, which has passed already; else None."""
        self._held = b""
        """A usage chunk that may be the last event, and the comments that came after it."""
        self._after_held = b""

    @property
    def is_inside_event(self) -> bool:
        """The client has the beginning of an event without its end."""
        return self._tail is not None

    def feed(self, chunk: bytes) -> bytes:
        """Take what the engine sent; return what the client gets now."""
        if self._kept or self._tail is not None or not chunk.endswith(_ENDS):
            return self._feed_events(chunk)
        if (
            not self._held
            and b'"usage"' not in chunk
            and b"[DONE]" not in chunk
            and b'"error"' not in chunk
        ):
            if not self.has_data:
                self.has_data = any(map(_shows_token, _EVENT_END.split(chunk)))
            return chunk
        if chunk.find(b"\n\n") == len(chunk) - 2 and b"\r" not in chunk:
            return self._on_event(chunk)  # one, and as a rule it comes so
        return self._feed_events(chunk)

    def finish(self) -> bytes:
        """The engine's bytes are over; return what the client still gets.

        An unfinished event is passed only behind a complete stream: `is_done` says which.
        """
        kept, self._kept = self._kept, b""
        passed = self._on_event(kept) if kept else b""
        return passed if self.is_done else b""

    def _feed_events(self, chunk: bytes) -> bytes:
        passed = []
        if self._tail is not None:
            head, chunk = self._pass_large(self._tail, chunk)
            passed.append(head)
        data = self._kept + chunk
        start = 0
        scan_from = max(0, len(self._kept) - 3)
        for match in _EVENT_END.finditer(data, scan_from):
            if match.end() == len(data) and data.endswith(b"\r"):
                break  # an LF may follow, which belongs to this event
            passed.append(self._on_event(data[start : match.end()]))
            start = match.end()
        self._kept = data[start:]
        if len(self._kept) > _MAX_KEPT_BYTES:
            passed.append(self._release_held() + self._kept)
            self._tail, self._kept = self._kept[-3:], b""
            self.has_data = True
        return b"".join(passed)

    def _pass_large(self, tail: bytes, chunk: bytes) -> tuple[bytes, bytes]:
        """Split `chunk` where the event that is passing ends."""
        data = tail + chunk
        match = _EVENT_END.search(data)
        if match is None or (match.end() == len(data) and data.endswith(b"\r")):
            self._tail = data[-3:]
            return chunk, b""
        self._tail = None
        return data[len(tail) : match.end()], data[match.end() :]

    def _on_event(self, event: bytes) -> bytes:
        data = data_of(event)
        if data is None:
            if not self._held:
                return event
            self._after_held += event
            return b""
        if data.strip() == b"[DONE]":
            self.is_done = True
            passed, self._after_held, self._held = self._after_held, b"", b""
            return passed + event
        passed = self._release_held()
        self.has_data = self.has_data or not is_opening(data)
        is_usage_chunk = self._is_usage_chunk(data)
        if self._details is not None:
            event = event.replace(data, with_details(data, self._details))
        if is_usage_chunk and self._withholds:
            self._held = event
            return passed
        return passed + event

    def _release_held(self) -> bytes:
        passed = self._held + self._after_held
        self._held = self._after_held = b""
        return passed

    def _is_usage_chunk(self, data: bytes) -> bool:
        """Note what `data` says of usage and errors."""
        if b'"usage"' not in data and b'"error"' not in data:
            return False
        is_chunk = _USUAL_CHOICES in data
        usage = usage_of_chunk(data) if is_chunk else None
        if usage is None:
            head = decode_head(data)
            if head is None:
                return False
            if head.error is not None:
                self.has_error = True
            usage = read_usage(head.usage)
            if usage is None:
                return False
            is_chunk = _NO_CHOICES.fullmatch(bytes(head.choices).strip()) is not None
        self.usage = usage
        self._withholds = self._withholds and is_chunk
        return is_chunk


def is_opening(data: bytes) -> bool:
    """Tell a chat stream's first event, which names the role and says nothing, from a token."""
    if b'"role"' not in data or len(data) > _MAX_OPENING_BYTES:
        return False
    try:
        choices = msgspec.json.decode(data, type=_Opening).choices
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return bool(choices) and not any(
        value for choice in choices for name, value in choice.delta.items() if name != "role"
    )


def _shows_token(event: bytes) -> bool:
    data = data_of(event)
    return data is not None and not is_opening(data)


def data_of(event: bytes) -> bytes | None:
    """Return an event's data, None if it has none (a comment, a lone blank line, empty data)."""
    line, _, rest = event.partition(b"\n")
    if rest == b"\n" and line.startswith(b"data:") and b"\r" not in line:
        return line[5:] if line[5:].strip() else None  # one line, as a rule
    lines = [line[5:] for line in event.splitlines() if line.startswith(b"data:")]
    data = b"\n".join(lines)
    return data if data.strip() else None
