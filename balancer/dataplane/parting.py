"""The end of a client connection on which something may still be coming.

Who closes a socket with unread bytes, or gets more on a closed one, resets the connection, and a reset takes
away what the client hasn't read yet: the answer that says what was wrong (RFC 9112, section 9.6).

Rules:

1. The answer and an end of ours go out at once. What still comes is read and dropped, until the client
   has ended its side, too.
2. No longer than `PARTING_S`, and no more than `PARTING_BYTES`: then the client gets its reset.
3. TLS has no half-closed connections: it ends at once.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

PARTING_S: Final = 5.0
PARTING_BYTES: Final = 64 * 1024 * 1024


class Parting:
    """One connection that ends."""

    __slots__ = ("_left_bytes", "_transport", "_until_s")

    def __init__(self, transport: asyncio.Transport, now_s: float) -> None:
        self._transport = transport
        self._until_s = now_s + PARTING_S
        self._left_bytes = PARTING_BYTES
        if transport.can_write_eof():
            transport.write_eof()
        else:
            transport.close()

    def drop(self, size_bytes: int) -> None:
        """So much has come."""
        self._left_bytes -= size_bytes
        if self._left_bytes < 0:
            self._transport.close()

    def look(self, now_s: float) -> None:
        """See whether it has taken long enough."""
        if now_s > self._until_s:
            self._transport.close()


class PartingTransport:
    """What uvicorn's own answers write to: the connection, but for how it ends."""

    __slots__ = ("_cycle", "_end", "_transport", "is_closing", "write")

    def __init__(
        self, transport: asyncio.Transport, cycle: RequestResponseCycle, end: Callable[[], None]
    ) -> None:
        self._transport = transport
        self._cycle = cycle
        self._end = end
        self.write = transport.write
        self.is_closing = transport.is_closing

    def close(self) -> None:
        """End the connection: in order behind a whole answer, at once inside of one."""
        if self._cycle.response_complete:
            self._end()
        else:
            self._transport.close()
