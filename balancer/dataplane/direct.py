"""The proxied paths without ASGI: an `Exchange` that writes to the client's connection itself.

uvicorn's own protocol reads connections, keeps them alive, ends them and serves every other path;
this one takes the proxied requests out of it between the request's headers and its application.
So a piece of an answer costs one call and one buffer, not a message, a coroutine and a header scan.

Rules:

1. A status line and its headers go out together with the first piece of the body.
2. Without `content-length` the body is chunked; to a client of HTTP/1.0, which knows no chunks, it
   ends with the connection.
3. An answer that isn't finished ends in a broken connection, never in an end that looks like one.
4. A client that leaves cancels the task that answers it, at once.
5. Of a body nobody reads yet no more than uvicorn's own limit waits here.

Measured: docs/decisions/0010-server-protocol.md.
"""

import asyncio
import http
import socket
import struct
from collections.abc import Coroutine, Iterable
from functools import partial
from typing import Any, Final, Protocol, cast
from urllib.parse import unquote

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from uvicorn.server import ServerState

from balancer.core.errors import BodyTooLargeError, ClientGoneError
from balancer.core.http.body import PiecedBody
from balancer.dataplane.exchange import Exchange, refuse_large
from balancer.dataplane.server_protocols import ExactHttp

_PHRASES: Final = {each.value: each.phrase for each in http.HTTPStatus}
_STATUS_LINES: Final = {
    status: f"HTTP/1.1 {status} {_PHRASES.get(status, '')}\r\n".encode()
    for status in range(100, 600)
}
_NO_LINGERING: Final = struct.pack("ii", 1, 0)
_BODILESS: Final = frozenset({204, 304})


class Plane(Protocol):
    """Who answers the proxied paths."""

    def proxies(self, path: str) -> bool: ...

    async def handle(self, exchange: Exchange) -> None:
        """Answer one request. Raises nothing but cancellation."""
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
        "_is_chunked",
        "_is_old",
        "_is_read",
        "_left_bytes",
        "_limit_bytes",
        "_owner",
        "_waiter",
        "_was_left",
        "_worker",
        "disconnected",
        "headers",
        "keep_alive",
        "method",
        "path",
        "query",
        "response_complete",
    )

    def __init__(self, owner: "DirectProtocol", target: tuple[str, bytes]) -> None:
        """`target` is path and query."""
        parser = owner.parser
        self.method: str = parser.get_method().decode("ascii")
        self.path, self.query = target
        self.headers: tuple[tuple[bytes, bytes], ...] = tuple(owner.headers)
        self.disconnected = False
        self.response_complete = False
        self._is_old = parser.get_http_version() == "1.0"
        self.keep_alive: bool = not self._is_old and parser.should_keep_alive()
        self._owner = owner
        self._expects_continue = owner.expect_100_continue
        self._body_pieces: list[bytes] = []
        self._body_size = 0
        self._limit_bytes = HIGH_WATER_LIMIT
        self._is_read = False
        self._waiter: asyncio.Future[None] | None = None
        self._worker: asyncio.Task[Any] | None = None
        self._was_left = False
        self._head: bytes | None = None
        self._has_body = False
        self._is_chunked = False
        self._ends_with_connection = False
        """The answer tells its end in no other way."""
        self._left_bytes = 0

    async def run_asgi(self, _app: object) -> None:
        """Answer; what uvicorn's protocol runs in a task of its own, whatever the answer is."""
        self._owner.answering = self
        try:
            await self._owner.plane.handle(self)
        finally:
            if not self.response_complete:
                self._break()

    async def read_body(self, limit_bytes: int) -> PiecedBody:
        refuse_large(self.headers, limit_bytes)
        self._limit_bytes = limit_bytes
        if not self._is_read:
            await self._rest_of_body()
        if self._body_size > limit_bytes:
            raise BodyTooLargeError(f"the body is over {limit_bytes} bytes")
        if not self._is_read:
            raise ClientGoneError("the client left while it sent its body")
        pieces, self._body_pieces = self._body_pieces, []
        return PiecedBody(tuple(pieces))

    async def start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self._check_present()
        lines = [_STATUS_LINES[status]]
        length: bytes | None = None
        for name, value in headers:
            if name == b"content-length":
                length = value
            elif name == b"connection":
                self.keep_alive = False  # engines' are dropped before: this is ours, and says close
                continue
            lines.append(b"%b: %b\r\n" % (name, value))
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
            owner.transport.close()
        owner.on_response_complete()

    async def abort(self) -> None:
        """Leave the answer open: `run_asgi` breaks the connection of an unfinished one."""

    async def while_present(self, work: Coroutine[Any, Any, None]) -> None:
        if self.disconnected:
            work.close()
            raise ClientGoneError("the client went away")
        self._worker = asyncio.current_task()
        # It may be paused for a request that came before its turn: nobody would see the end.
        self._owner.flow.resume_reading()
        try:
            await work
        except asyncio.CancelledError:
            if self._was_left and self._worker is not None and not self._worker.uncancel():
                raise ClientGoneError("the client went away") from None
            raise
        finally:
            self._worker = None

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

    def on_gone(self) -> None:
        """The client has closed the connection, or lost it."""
        self.disconnected = True
        self._wake()
        if self._worker is not None and not self.response_complete:
            self._was_left = True
            self._worker.cancel()

    async def _rest_of_body(self) -> None:
        owner = self._owner
        if self._expects_continue and not owner.transport.is_closing():
            owner.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        owner.flow.resume_reading()
        while not (self._is_read or self.disconnected or self._body_size > self._limit_bytes):
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def _break(self) -> None:
        transport = self._owner.transport
        if self._head is not None and not self.disconnected:
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


class DirectProtocol(ExactHttp):
    """One client connection."""

    def __init__(
        self,
        plane: Plane,
        *,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.plane = plane
        self.answering: DirectExchange | None = None
        """Behind it others may wait: requests that came before their turn."""

    def connection_lost(self, exc: Exception | None) -> None:
        for exchange in {self.answering, self.cycle}:
            if isinstance(exchange, DirectExchange):
                exchange.on_gone()
        if isinstance(self.cycle, DirectExchange):
            self.cycle = None  # type: ignore[assignment]  # uvicorn's own has no type for it either
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        # The scope is put together only for an application.
        self.url = b""
        self.expect_100_continue = False
        self.headers = []

    def on_headers_complete(self) -> None:
        target = self._target()
        if target is None:
            self._hand_to_application()
            return
        before = cast("RequestResponseCycle | None", self.cycle)
        exchange = DirectExchange(self, target)
        # Of a cycle, uvicorn uses what DirectExchange has, too.
        self.cycle = cast("RequestResponseCycle", exchange)
        if before is None or before.response_complete:
            self._start_asgi_task(self.cycle, self.app)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self.app))

    def on_body(self, body: bytes) -> None:
        if not isinstance(self.cycle, DirectExchange):
            super().on_body(body)
        elif not self.cycle.response_complete:
            self.cycle.on_body(body)

    def on_message_complete(self) -> None:
        if not isinstance(self.cycle, DirectExchange):
            super().on_message_complete()
        elif not self.cycle.response_complete:
            self.cycle.on_body_complete()

    def _target(self) -> tuple[str, bytes] | None:
        """Path and query of a proxied request, None for any other."""
        if self.parser.should_upgrade():
            return None
        raw_path, _, query = self.url.partition(b"?")
        if not raw_path.startswith(b"/") or b"%" in raw_path or b"#" in self.url:
            parsed = httptools.parse_url(self.url)
            raw_path, query = parsed.path, parsed.query or b""
        path = unquote(raw_path.decode("ascii"))
        return (path, query) if self.plane.proxies(path) else None

    def _hand_to_application(self) -> None:
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.headers, self.expect_100_continue = url, headers, expects
        self.scope["headers"] = headers
        super().on_headers_complete()


def _reset(transport: asyncio.Transport) -> None:
    raw = transport.get_extra_info("socket")
    if raw is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGERING)
    transport.abort()


def direct_protocol(plane: Plane) -> type[asyncio.Protocol]:
    """What uvicorn calls for each connection (`http=`)."""
    return cast("type[asyncio.Protocol]", partial(DirectProtocol, plane))
