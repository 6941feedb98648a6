"""Whether the beginning of an event stream says anything yet: a token, an error, or neither.

Rules:

1. Comments and a chat's opening (`core.http.sse`) say nothing: an engine may send them before it has
   computed, or loaded, anything, and then fail.
2. The first event that says something decides. An error that comes after it is the client's to see.
3. What is no complete event yet says nothing, unless it is longer than any error.

Cost: a split of the few bytes that came first; a decode only of what names an error.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from balancer.core.http.sse import data_of, is_opening
from balancer.core.http.usage import decode_head

_EVENT_END: Final = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")
_LONGEST_BYTES: Final = 64 * 1024
_USUAL_STATUS: Final = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamError:
    """A stream that begins with an error is none."""

    status: int
    body: Mapping[str, Any]
    """As if it had been the answer."""


def read_beginning(held: bytes) -> StreamError | bool:
    """Tell whether these first bytes say something; the error, if that is what they say."""
    start = 0
    for end in _EVENT_END.finditer(held):
        data = data_of(held[start : end.end()])
        start = end.end()
        if data is not None and not is_opening(data):
            return _error_in(data) or True
    return len(held) > _LONGEST_BYTES


def _error_in(data: bytes) -> StreamError | None:
    head = decode_head(data) if b'"error"' in data else None
    if head is None or head.error is None:
        return None
    code = head.error.get("code") if isinstance(head.error, Mapping) else None
    status = code if isinstance(code, int) and 400 <= code <= 599 else _USUAL_STATUS
    return StreamError(status=status, body={"error": head.error})
