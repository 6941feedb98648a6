"""Close codes of a relayed WebSocket: what one side said, as the other may be told.

Rules:

1. A code that may be sent is passed on with its reason (RFC 6455, 7.4; the registry; 3000 to 4999).
2. A close without a code is a normal one. A connection that was lost has no code: the engine hears
   that its client is gone (1001), the client that its engine is (1014).
"""

from typing import Final

NORMAL: Final = 1000
GOING_AWAY: Final = 1001
INTERNAL_ERROR: Final = 1011
SERVICE_RESTART: Final = 1012
BAD_GATEWAY: Final = 1014
_NO_CODE: Final = 1005
_SENDABLE: Final = frozenset({1000, 1001, 1002, 1003, *range(1007, 1015)})
_GOOD: Final = frozenset({NORMAL, GOING_AWAY, _NO_CODE})


def passed_code(code: int, *, lost: int) -> int:
    """The code to send for one that was received; `lost` stands for a lost connection."""
    if code == _NO_CODE:
        return NORMAL
    return code if code in _SENDABLE or 3000 <= code < 5000 else lost


def is_failure(code: int) -> bool:
    """Tell whether an engine's code says that something went wrong. 3000 and up are applications'."""
    return code not in _GOOD and code < 3000
