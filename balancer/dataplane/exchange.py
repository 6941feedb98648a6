"""`Exchange`: what the data plane needs of one client connection. ASGI is one adapter.

The data plane never sees a web framework, so a server protocol of our own can take ASGI's
place where the figures ask for it.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any, Protocol

from balancer.core.body import PiecedBody
from balancer.core.errors import BadRequestError, BodyTooLargeError, ClientGoneError
from balancer.core.http_headers import find_header

Message = MutableMapping[str, Any]


class Exchange(Protocol):
    """One request and its answer."""

    method: str
    path: str
    """Without the query string."""
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    """Names in lower case."""

    async def read_body(self, limit_bytes: int) -> PiecedBody:
        """The whole body. Raises BodyTooLargeError, or ClientGoneError if the client left.

        One that says how large it is is refused before any of it is read.
        """
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


class AsgiExchange:
    """An Exchange over ASGI's `scope`, `receive` and `send`."""

    def __init__(
        self,
        scope: Mapping[str, Any],
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query: bytes = scope["query_string"]
        self.headers: tuple[tuple[bytes, bytes], ...] = tuple(scope["headers"])
        self._receive = receive
        self._send = send

    async def read_body(self, limit_bytes: int) -> PiecedBody:
        self._refuse_large(limit_bytes)
        pieces: list[bytes] = []
        size_bytes = 0
        while True:
            message = await self._receive()
            if message["type"] != "http.request":
                raise ClientGoneError("the client left while it sent its body")
            piece: bytes = message.get("body", b"")
            size_bytes += len(piece)
            if size_bytes > limit_bytes:
                raise BodyTooLargeError(f"the body is over {limit_bytes} bytes")
            if piece:
                pieces.append(piece)
            if not message.get("more_body", False):
                return PiecedBody(tuple(pieces))

    async def start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        await self._pass(
            {"type": "http.response.start", "status": status, "headers": list(headers)}
        )

    async def write(self, chunk: bytes) -> None:
        await self._pass({"type": "http.response.body", "body": chunk, "more_body": True})

    async def finish(self) -> None:
        await self._pass({"type": "http.response.body", "body": b"", "more_body": False})

    async def abort(self) -> None:
        """Leave the answer open: an ASGI server closes the connection of an unfinished answer."""

    async def gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def _refuse_large(self, limit_bytes: int) -> None:
        length = find_header(self.headers, b"content-length")
        if length is None:
            return
        if not length.isdigit():
            raise BadRequestError("`content-length` is not a number")
        if int(length) > limit_bytes:
            raise BodyTooLargeError(f"the body is over {limit_bytes} bytes")

    async def _pass(self, message: Message) -> None:
        try:
            await self._send(message)
        except OSError as error:
            raise ClientGoneError("the client went away") from error
