"""`Exchange`: what the data plane needs of one client connection. ASGI is one adapter.

The data plane never sees a web framework, so a server protocol of our own can take ASGI's
place where the figures ask for it.
"""

from collections.abc import Iterable
from typing import Protocol


class Exchange(Protocol):
    """One request and its answer."""

    method: str
    path: str
    """Without the query string."""
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    """Names in lower case."""

    async def read_body(self, limit_bytes: int) -> bytes:
        """The whole body. Raises BodyTooLargeError, or ClientGoneError if the client left."""
        ...

    async def start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Send status and headers. Raises ClientGoneError if the client left."""
        ...

    async def write(self, chunk: bytes) -> None:
        """Send a piece of the body; waits while the client is slow. Raises ClientGoneError."""
        ...

    async def finish(self) -> None:
        """The body is complete."""
        ...

    async def abort(self) -> None:
        """Break the connection so that the client can't take the answer for complete."""
        ...

    async def gone(self) -> None:
        """Return when the client has disconnected (call after `read_body`)."""
        ...
