"""One proxied request and its answer, written to the client's connection itself.

Rules:

1. A status line and its headers go out together with the first piece of the body.
2. Without `content-length` the body is chunked; to a client of HTTP/1.0, which knows no chunks, it
   ends with the connection.
3. An answer that isn't finished ends in a broken connection, never in an end that looks like one.
4. A client that leaves cancels the task that answers it, at once.
5. Of a body nobody reads yet no more than uvicorn's own limit waits here.
"""

import asyncio
import http
import socket
import struct
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Final, Protocol

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl

from balancer.core.errors import BodyTooLargeError, ClientGoneError, RequestLateError
from balancer.core.http.body import PiecedBody
from balancer.dataplane.exchange import Exchange, refuse_large

_PHRASES: Final = {each.value: each.phrase for each in http.HTTPStatus}
_STATUS_LINES: Final = {
    status: f"HTTP/1.1 {status} {_PHRASES.get(status, '')}\r\n".encode()
    for status in range(100, 600)
}
_NO_LINGERING: Final = struct.pack("ii", 1, 0)
_BODILESS: Final = frozenset({204, 304})


class Plane(Protocol):
    """Who answers the proxied paths."""

    @property
    def proxies(self) -> Callable[[str], bool]:
        """Tells whether `handle` answers a path."""
        ...

    @property
    def handle(self) -> Callable[[Exchange], Coroutine[Any, Any, None]]:
        """Answers one request. Raises nothing but cancellation."""
        ...


class Owner(Protocol):
    """What an exchange needs of the connection it came on."""

    plane: Plane
    parser: httptools.HttpRequestParser
    transport: asyncio.Transport
    flow: FlowControl
    tasks: set[asyncio.Task[None]]
    """Those that a server that stops waits for."""
    headers: list[tuple[bytes, bytes]]
    """Of the request whose headers have just come."""
    expect_100_continue: bool
    answering: "DirectExchange | None"

    def on_response_complete(self) -> None:
        """The next request may be answered."""
        ...

    def end_connection(self) -> None:
        """This answer was the last."""
        ...


class DirectExchange:
    """One request and its answer. To uvicorn's protocol it is a `RequestResponseCycle`."""

    __slots__ = (
        "_body_pieces",
        "_body_size",
        "_ends_with_connection",
        "_expects_continue",
        "_has_body",
        "_head",
        "_is_cancelled_if_left",
        "_is_chunked",
        "_is_late",
        "_is_old",
        "_is_read",
        "_left_bytes",
        "_limit_bytes",
        "_owner",
        "_waiter",
        "_was_left",
        "disconnected",
        "headers",
        "keep_alive",
        "method",
        "path",
        "query",
        "response_complete",
        "response_started",
        "task",
    )

    def __init__(self, owner: Owner, target: tuple[str, bytes]) -> None:
        """`target` is path and query."""
        parser = owner.parser
        self.method: str = parser.get_method().decode("ascii")
        self.path, self.query = target
        self.headers: tuple[tuple[bytes, bytes], ...] = tuple(owner.headers)
        self.disconnected = False
        self.response_complete = False
        self.response_started = False
        self._is_old = parser.get_http_version() == "1.0"
        self.keep_alive: bool = not self._is_old and parser.should_keep_alive()
        self._owner = owner
        self._expects_continue = owner.expect_100_continue
        self._body_pieces: list[bytes] = []
        self._body_size = 0
        self._limit_bytes = HIGH_WATER_LIMIT
        self._is_read = False
        self._is_late = False
        self._waiter: asyncio.Future[None] | None = None
        self.task: asyncio.Task[None] | None = None
        """The one that runs `run`."""
        self._is_cancelled_if_left = False
        self._was_left = False
        self._head: bytes | None = None
        self._has_body = False
        self._is_chunked = False
        self._ends_with_connection = False
        """The answer tells its end in no other way."""
        self._left_bytes = 0

    async def run(self) -> None:
        """Answer, in a task of its own."""
        owner = self._owner
        owner.answering = self
        try:
            await owner.plane.handle(self)
        finally:
            if not self.response_complete:
                self._break()
            if self.task is not None:
                owner.tasks.discard(self.task)

    async def read_body(self, limit_bytes: int) -> PiecedBody:
        self._limit_bytes = limit_bytes
        if not self._is_read:
            refuse_large(self.headers, limit_bytes)
            await self._rest_of_body()
        if self._body_size > limit_bytes:
            raise BodyTooLargeError(f"the body is over {limit_bytes} bytes")
        if self._is_late:
            raise RequestLateError("the rest of the body didn't come in time")
        if not self._is_read:
            raise ClientGoneError("the client left while it sent its body")
        pieces, self._body_pieces = self._body_pieces, []
        return PiecedBody(tuple(pieces))

    async def start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self._check_present()
        self._begin(status, headers)

    async def answer(
        self, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes
    ) -> None:
        if self.disconnected:
            raise ClientGoneError("the client went away")
        self._begin(status, headers)
        if not self.push(body):
            await self.drain()
        self._end()

    def _begin(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self.response_started = True
        # Whether a body comes that wasn't asked for is up to its client: nothing can follow it.
        self.keep_alive = self.keep_alive and (self._is_read or not self._expects_continue)
        lines = [_STATUS_LINES[status]]
        length: bytes | None = None
        for name, value in headers:
            if name == b"content-length":
                length = value
            elif name == b"connection":
                self.keep_alive = False  # engines' are dropped before: this is ours, and says close
                continue
            lines.append(name + b": " + value + b"\r\n")
        self._has_body = self.method != "HEAD" and status >= 200 and status not in _BODILESS
        self._left_bytes = int(length) if length is not None and self._has_body else 0
        if length is None and self._has_body:
            if self._is_old:
                self.keep_alive = False
                self._ends_with_connection = True
            else:
                self._is_chunked = True
                lines.append(b"transfer-encoding: chunked\r\n")
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        head = b"".join(lines)
        if not head.count(b"\n") == head.count(b"\r") == len(lines):
            raise ValueError("a header holds a line break")
        self._head = head + b"\r\n"

    async def write(self, chunk: bytes) -> None:
        self._check_present()
        if not self.push(chunk):
            await self.drain()

    def push(self, chunk: bytes) -> bool:
        owner = self._owner
        if self.disconnected or not chunk or not self._has_body:
            return True
        if self._is_chunked:
            chunk = b"%x\r\n%b\r\n" % (len(chunk), chunk)
        else:
            self._left_bytes -= len(chunk)
        if self._head is not None:
            chunk, self._head = self._head + chunk, None
        owner.transport.write(chunk)
        return not owner.flow.write_paused

    async def drain(self) -> None:
        if not self.disconnected:
            await self._owner.flow.drain()
        self._check_present()

    async def finish(self) -> None:
        self._end()

    def _end(self) -> None:
        owner = self._owner
        if self.disconnected or self._left_bytes > 0:
            return  # shorter than its own length: the connection breaks
        end = b"0\r\n\r\n" if self._is_chunked else b""
        if self._head is not None:
            end, self._head = self._head + end, None
        self.response_complete = True
        owner.answering = None
        if end:
            owner.transport.write(end)
        if not self.keep_alive:
            owner.end_connection()
        owner.on_response_complete()

    async def abort(self) -> None:
        """Leave the answer open: `run` breaks the connection of an unfinished one."""

    async def while_present(self, work: Coroutine[Any, Any, None]) -> None:
        if self.disconnected:
            work.close()
            raise ClientGoneError("the client went away")
        self._is_cancelled_if_left = True
        # It may be paused for a request that came before its turn: nobody would see the end.
        self._owner.flow.resume_reading()
        try:
            await work
        except asyncio.CancelledError:
            if self._was_left and self.task is not None and not self.task.uncancel():
                raise ClientGoneError("the client went away") from None
            raise
        finally:
            self._is_cancelled_if_left = False

    def on_body(self, piece: bytes) -> None:
        """Some of the request's body has come."""
        self._body_pieces.append(piece)
        self._body_size += len(piece)
        if self._body_size > self._limit_bytes:
            self._owner.flow.pause_reading()
            self._wake()

    def on_body_complete(self) -> None:
        self._is_read = True
        self._wake()

    def on_late(self) -> None:
        """Nothing more has come of the body for too long."""
        self._is_late = True
        self._wake()

    def on_gone(self) -> None:
        """The client has closed the connection, or lost it, or isn't worked for any more."""
        if self.disconnected:
            return
        self.disconnected = True
        self._wake()
        if self._is_cancelled_if_left and self.task is not None and not self.response_complete:
            self._was_left = True
            self.task.cancel()

    async def _rest_of_body(self) -> None:
        owner = self._owner
        if self._expects_continue and not owner.transport.is_closing():
            owner.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._expects_continue = False
        owner.flow.resume_reading()
        while not (self._is_read or self._is_late or self.disconnected or self._is_too_large):
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    @property
    def _is_too_large(self) -> bool:
        return self._body_size > self._limit_bytes

    def _break(self) -> None:
        if self.disconnected:
            return
        transport = self._owner.transport
        if self._head is not None:
            transport.write(self._head)
        if self._ends_with_connection:
            _reset(transport)  # its orderly end would be the answer's
        else:
            transport.close()

    def _check_present(self) -> None:
        if self.disconnected:
            raise ClientGoneError("the client went away")

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _reset(transport: asyncio.Transport) -> None:
    raw = transport.get_extra_info("socket")
    if raw is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGERING)
    transport.abort()
