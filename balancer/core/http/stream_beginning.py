"""Whether the beginning of an event stream says anything yet: a token, an error, or neither.

Rules:

1. Comments and a chat's opening (`core.http.sse`) say nothing: an engine may send them before it has
   computed, or loaded, anything, and then fail.
2. The first event that says something decides. An error that comes after it is the client's to see.
3. What is no complete event yet says nothing, unless it is longer than any error.

Cost: a split of the few bytes that came first; a decode only of what names an error.
"""

import re
from typing import Final

from balancer.core.http.sse import data_of, is_opening
from balancer.core.http.told_error import ToldError, read_error

_EVENT_END: Final = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")
_LONGEST_BYTES: Final = 64 * 1024


def read_beginning(held: bytes) -> ToldError | bool:
    """Tell whether these first bytes say something; the error, if that is what they say."""
    start = 0
    for end in _EVENT_END.finditer(held):
        data = data_of(held[start : end.end()])
        start = end.end()
        if data is not None and not is_opening(data):
            return read_error(data.strip()) or True
    return len(held) > _LONGEST_BYTES
