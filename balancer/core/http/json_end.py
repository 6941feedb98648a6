"""Whether JSON that an engine answers is whole, where nothing else says where it ends.

Rules:

1. An object, an array or a string is whole once all that it opened is closed: cut anywhere before
   its last byte, behind a nested `}` too, it isn't.
2. Of a bare number or word nobody can tell: it counts as whole. Nothing at all, or blanks, doesn't.
3. It isn't judged otherwise: what is no JSON wasn't cut. Numbers of any length and documents of any
   depth are whole, whoever can read them.

Cost: O(chunk), in a few searches of the standard library; nothing of it is kept.
"""

import re
from typing import Final

_KIND: Final = re.compile(rb"application/(?:json|[^;\s]+\+json)\s*(?:;|$)", re.IGNORECASE)


def is_json_kind(content_type: bytes | None) -> bool:
    """Tell whether a `Content-Type` names JSON: one document, not lines or a sequence of them."""
    return content_type is not None and _KIND.match(content_type) is not None


class JsonEnd:
    """One document. `feed` every chunk, then ask."""

    __slots__ = ("_depth", "_is_begun", "_is_escaped", "_is_inside_string")

    def __init__(self) -> None:
        self._depth = 0
        self._is_begun = False
        self._is_inside_string = False
        self._is_escaped = False
        """The last chunk ended in a backslash that belongs to the next one's first byte."""

    @property
    def is_whole(self) -> bool:
        """Whether it may end here."""
        return self._is_begun and self._depth == 0 and not self._is_inside_string

    def feed(self, chunk: bytes) -> None:
        """Take what passes, at least a byte."""
        if self._is_escaped:
            chunk = chunk[1:]
            self._is_escaped = False
        if b"\\" in chunk:
            chunk = chunk.replace(b"\\\\", b"").replace(b'\\"', b"")
            self._is_escaped = chunk.endswith(b"\\")
        # Without escaped quotes every other part lies between two quotes.
        parts = chunk.split(b'"')
        outside = b"".join(parts[self._is_inside_string :: 2])
        if len(parts) % 2 == 0:
            self._is_inside_string = not self._is_inside_string
        self._depth += outside.count(b"{") + outside.count(b"[")
        self._depth -= outside.count(b"}") + outside.count(b"]")
        self._is_begun = self._is_begun or len(parts) > 1 or bool(outside.strip())
