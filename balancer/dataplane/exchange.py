"""`Exchange`: what the data plane needs of one client connection.

The data plane never sees a web framework. `balancer.dataplane.direct` writes to the connection
itself, which is what kvlb serves with; `AsgiExchange` is the adapter for any ASGI server.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, MutableMapping
from typing import Any, Protocol

from balancer.core.errors import (
    BadRequestError,
    BalancerError,
    BodyTooLargeError,
    ClientGoneError,
)
from balancer.core.http.body import PiecedBody
from balancer.core.http.headers import find_header

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

    def push(self, chunk: bytes) -> bool:
        """Send a piece of the body without waiting. False: `drain` before the next one.

        Never raises: of a client that has left, `drain` and `while_present` tell.
        """
        ...

    async def drain(self) -> None:
        """Wait until the client has taken enough of what was pushed. Raises ClientGoneError."""
        ...

    async def finish(self) -> None:
        """The body is complete."""
        ...

    async def answer(
        self, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes
    ) -> None:
        """Send an answer that is here as a whole: `start`, `write` and `finish` in one."""
        ...

    async def abort(self) -> None:
        """Break the connection so that the client can't take the answer for complete."""
        ...

    async def while_present(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` (after `read_body`), and cancel it as soon as the client leaves.

        Raises ClientGoneError then, unless the answer was already finished.
        """
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
        self._pushed: list[bytes] = []
        self._is_finished = False

    async def read_body(self, limit_bytes: int) -> PiecedBody:
        refuse_large(self.headers, limit_bytes)
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

    def push(self, chunk: bytes) -> bool:
        """ASGI can't send without waiting: it is sent by `drain`."""
        self._pushed.append(chunk)
        return False

    async def drain(self) -> None:
        pushed, self._pushed = self._pushed, []
        for chunk in pushed:
            await self.write(chunk)

    async def finish(self) -> None:
        self._is_finished = True
        await self._pass({"type": "http.response.body", "body": b"", "more_body": False})

    async def answer(
        self, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes
    ) -> None:
        await self.start(status, headers)
        await self.write(body)
        await self.finish()

    async def abort(self) -> None:
        """Leave the answer open: an ASGI server closes the connection of an unfinished answer."""

    async def gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def while_present(self, work: Coroutine[Any, Any, None]) -> None:
        async def watch() -> None:
            await self.gone()
            if not self._is_finished:
                raise ClientGoneError("the client went away")

        failed: BalancerError | None = None
        try:
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(watch())
                try:
                    await work
                except BalancerError as error:
                    failed = error
                watching.cancel()
        except BaseExceptionGroup as errors:
            gone = errors.subgroup(ClientGoneError)
            raise (gone or errors).exceptions[0] from None
        if failed is not None:
            raise failed

    async def _pass(self, message: Message) -> None:
        try:
            await self._send(message)
        except OSError as error:
            raise ClientGoneError("the client went away") from error


def refuse_large(headers: Iterable[tuple[bytes, bytes]], limit_bytes: int) -> None:
    """Refuse a body that says that it is too large, before it comes."""
    length = find_header(headers, b"content-length")
    if length is None:
        return
    if not length.isdigit():
        raise BadRequestError("`content-length` is not a number")
    if int(length) > limit_bytes:
        raise BodyTooLargeError(f"the body is over {limit_bytes} bytes")
