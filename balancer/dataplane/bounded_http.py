"""uvicorn's HTTP/1.1 protocol, where clients do other things than ask and wait.

Rules:

1. While a request is answered its client is listened to: it may leave. So reading never pauses then
   (an end that waits behind unread bytes isn't seen by anybody). What comes of the next requests is
   held; over `MAX_HELD_BYTES` it is dropped, and the connection ends with the answer, as HTTP allows.
2. A client that has sent its last byte has left, even if it could still read: so proxies and engines
   take it, too.
3. Nobody is waited for without an end: not for a first byte, for the rest of a head, for more of a
   body, or for another request. While the server stops, less so.
4. A head has a size limit, as have trailers. What else comes beside a body (chunk extensions) has it
   while nothing of the body does.
5. An upgrade to anything but a WebSocket is declined by going on in HTTP/1.1, body included. To a
   WebSocket it is one only where a handshake can be: a GET of HTTP/1.1 without a body.
6. What clients do wrong is told to them, in its turn, and to nobody else. Who is still sending then is listened to for
   a little while, so that the answer isn't lost (`dataplane.parting`).
"""

import asyncio
import http
from typing import Any, Final

import httptools
import structlog
from uvicorn._types import ASGI3Application
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from balancer.core.errors import (
    BadRequestError,
    BalancerError,
    HeadTooLargeError,
    RequestLateError,
    TargetTooLongError,
)
from balancer.core.http.cors import Cors
from balancer.core.http.headers import Headers
from balancer.core.http.openai_errors import render_error
from balancer.core.settings.dataplane import DataPlaneSettings
from balancer.dataplane.lookout import Lookout
from balancer.dataplane.parting import Parting, PartingTransport

MAX_HELD_BYTES: Final = 1024 * 1024
STOPPING_BODY_S: Final = 5.0
"""A body of which nothing comes for so long doesn't hold up a server that stops."""

_logger = structlog.stdlib.get_logger(__name__)


class BoundedHttp(HttpToolsProtocol):
    """One client connection. Who overrides a callback of the parser keeps what is public here."""

    cycle: Any
    """uvicorn's own, one that has all that uvicorn uses of it, or None."""

    def __init__(
        self,
        lookout: Lookout,
        limits: DataPlaneSettings,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.headers = []
        self.in_head = False
        self.in_body = False
        """The body of the newest request isn't complete."""
        self.has_body_moved = False
        self.head_bytes = 0
        """Of an unfinished head, in earlier pieces."""
        self.fed_bytes = 0
        """Of the piece that is read now."""
        self.max_head_bytes = limits.max_head_bytes
        self._limits = limits
        self._lookout = lookout
        self._head_since_s: float | None = None
        self._beside_bytes = 0
        self._is_stopping = False
        self._refusal: BalancerError | None = None
        self._later: BalancerError | None = None
        """Of a request whose turn hasn't come."""
        self.header_count = 0
        """Those that came before the body."""
        self._running: RequestResponseCycle | None = None
        """Of those that an application answers; uvicorn tells only the newest that its client has left."""
        self._held = bytearray()
        self._drops = False
        """Too much has come before its turn."""
        self._has_moved = True
        self._moved_s = 0.0
        self._parting: Parting | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._lookout.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lookout.remove(self)
        self._held.clear()
        running = self._running
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()
        super().connection_lost(exc)

    def handle_websocket_upgrade(self) -> None:
        self._lookout.remove(self)
        super().handle_websocket_upgrade()

    def _should_upgrade(self) -> bool:
        return (
            super()._should_upgrade()
            and self.parser.get_method() == b"GET"
            and self.parser.get_http_version() == "1.1"
            and not any(map(_announces_body, self.headers))
        )

    def data_received(self, data: bytes) -> None:
        self._has_moved = True
        if self._parting is not None:
            self._parting.drop(len(data))
        elif self._is_answering():
            self._hold(data)
        else:
            self._feed(data)

    def shutdown(self) -> None:
        self._is_stopping = True
        super().shutdown()

    def end_connection(self) -> None:
        """Close, once the client of an unfinished request has had time to read its answer."""
        if self.in_head or self.in_body:
            self._part()
        else:
            self.transport.close()

    def drop_cycle(self) -> None:
        """Tell who answers the newest request that nobody is there any more."""
        self.cycle.disconnected = True
        self.cycle.message_event.set()

    def _part(self) -> None:
        if self._is_stopping or self.transport.is_closing():
            self.transport.close()
        elif self._parting is None:
            self._parting = Parting(self.transport, self.loop.time())
            self.flow.resume_reading()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.begin_head()

    def begin_head(self) -> None:
        """A request begins."""
        self.in_head = True
        self.head_bytes = 0
        self._head_since_s = None

    def on_headers_complete(self) -> None:
        self.in_head = False
        self.in_body = True
        if self.fed_bytes + self.head_bytes > self.max_head_bytes:
            self.check_head()
        self.header_count = len(self.headers)
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is before:
            return  # an upgrade: nobody of ours answers it
        self.cycle.transport = PartingTransport(self.transport, self.cycle, self.end_connection)
        if self.expect_100_continue:
            self.cycle.keep_alive = False  # whoever answers without the body can't go on behind it

    def on_body(self, body: bytes) -> None:
        self.has_body_moved = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self.in_body = False
        super().on_message_complete()

    def check_trailers(self) -> None:
        """Break off a request whose trailers are too large, before it is complete."""
        trailers = self.headers[self.header_count :]
        if sum(len(name) + len(value) + 4 for name, value in trailers) > self.max_head_bytes:
            self._refusal = HeadTooLargeError(self._limit_message())
            raise self._refusal

    def check_head(self) -> None:
        """Break off the parsing of a head that is too large."""
        self._refusal = self._too_large()
        if self._refusal is not None:
            raise self._refusal

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.transport.is_closing() or self._parting is not None:
            return
        self._has_moved = True
        self.flow.resume_reading()
        if self.pipeline:
            cycle, app = self.pipeline.pop()
            self._start_asgi_task(cycle, app)
        if self._later is not None and not self._is_answering():
            self._refuse(self._later)
        elif self._held and not self._is_answering():
            held, self._held = bytes(self._held), bytearray()
            self._feed(held)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def look(self, now_s: float) -> None:
        """See whether the client's time is over."""
        if self._has_moved:
            self._has_moved = False
            self._moved_s = now_s
        if self._parting is not None:
            self._parting.look(now_s)
        elif not self.transport.is_closing() and not self._is_answering():
            self._look_after(now_s, quiet_s=now_s - self._moved_s)

    def on_late_body(self) -> None:
        """Nothing more has come of a body for too long."""
        self._refuse(RequestLateError("the rest of the body didn't come in time"))

    def _look_after(self, now_s: float, *, quiet_s: float) -> None:
        limits = self._limits
        if self.in_body:
            limit_s = limits.body_idle_timeout_s
            if self._is_stopping:
                limit_s = min(limit_s, STOPPING_BODY_S)
            if quiet_s > limit_s and not self.flow.read_paused:
                self._end_body()
        elif self.in_head:
            if self._head_since_s is None:
                self._head_since_s = now_s
            elif now_s - self._head_since_s > limits.head_timeout_s:
                self._refuse(RequestLateError("the rest of the head didn't come in time"))
        elif quiet_s > (limits.head_timeout_s if self.cycle is None else self.timeout_keep_alive):
            self.transport.close()

    def _end_body(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()  # its request has been answered without it
        else:
            self.on_late_body()

    def _feed(self, data: bytes) -> None:
        self.fed_bytes = len(data)
        headers, cycle = self.headers, self.cycle
        is_idle = not (self.in_head or self.in_body)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._upgrade(data[upgrade.args[0] :])
            return
        except httptools.HttpParserError:
            self._refuse(self._refusal or BadRequestError("this is no HTTP request"))
            return
        if self.in_head or self.in_body:
            self._check_unfinished(headers, is_alone=is_idle and cycle is self.cycle)

    def _check_unfinished(self, headers: list[tuple[bytes, bytes]], *, is_alone: bool) -> None:
        """`headers`: of the request that was read before this piece came. `is_alone`: it is all of a head."""
        is_same = headers is self.headers
        if self.in_head:
            if is_same or is_alone:
                self.head_bytes += self.fed_bytes
            if self.head_bytes > self.max_head_bytes:
                self._refuse(self._too_large() or HeadTooLargeError(self._limit_message()))
            return
        self._beside_bytes = self._beside_bytes + self.fed_bytes if self._is_beside(is_same) else 0
        self.has_body_moved = False
        if self._beside_bytes > self.max_head_bytes:
            self._refuse(HeadTooLargeError(self._limit_message()))

    def _is_beside(self, is_same: bool) -> bool:
        return is_same and not self.has_body_moved

    def _too_large(self) -> BalancerError | None:
        if len(self.url) > self.max_head_bytes:
            return TargetTooLongError(self._limit_message())
        size_bytes = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        return (
            HeadTooLargeError(self._limit_message()) if size_bytes > self.max_head_bytes else None
        )

    def _limit_message(self) -> str:
        return (
            f"the request's head is over {self.max_head_bytes} bytes (`dataplane.max_head_bytes`)"
        )

    def _refuse(self, error: BalancerError) -> None:
        """Answer, and end the connection."""
        if self._is_answering():
            self._later, self._drops = error, True
            return
        _logger.debug("connection_refused", status=error.status, reason=error.message)
        cycle = self.cycle
        is_answered = cycle is None or cycle.response_complete
        if not is_answered and cycle.response_started:
            self.transport.close()
            return
        if not is_answered:
            self.drop_cycle()
        self.transport.write(raw_error(error, self._cors_headers()))
        self._part()

    def _cors_headers(self) -> Headers:
        """What lets a page read why it was refused, as far as the head was read."""
        cors = Cors(self._limits.cors_origins)
        return cors.answer(tuple(self.headers), ()) if cors.is_on else ()

    def _upgrade(self, rest: bytes) -> None:
        if self.declines_upgrade():
            # The parser takes the rest for another protocol: another is given the head without that.
            self._feed(self._taken_back(is_plain=True) + rest)
        elif self._should_upgrade() and self._is_answering():
            self._hold(self._taken_back(is_plain=False) + rest)
        elif self._should_upgrade():
            self.handle_websocket_upgrade()

    def _taken_back(self, *, is_plain: bool) -> bytes:
        """The head, for a parser that hasn't seen it: this one may take the connection for closed."""
        head = self._head(is_plain=is_plain)
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return head

    def _head(self, *, is_plain: bool) -> bytes:
        """The head that was read. `is_plain`: without its wish for an upgrade."""
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        for name, value in self.headers:
            if not is_plain:
                lines.append(name + b": " + value)
            elif name == b"connection":
                kept = [each for each in value.split(b",") if each.strip().lower() != b"upgrade"]
                lines.append(b"connection: " + b",".join(kept))
            elif name != b"upgrade":
                lines.append(name + b": " + value)
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def declines_upgrade(self) -> bool:
        """Whether a head that asks for an upgrade is to be read again, as one that doesn't."""
        return not self._should_upgrade() and self.parser.get_method() != b"CONNECT"

    def _hold(self, data: bytes) -> None:
        if self._drops:
            return
        self._held += data
        if len(self._held) > MAX_HELD_BYTES:
            self._held.clear()
            self._drops = True
            self.cycle.keep_alive = False

    def _is_answering(self) -> bool:
        """Whether the next byte belongs to a request whose turn hasn't come."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return False
        return not self.in_body or bool(self.pipeline)


def _announces_body(header: tuple[bytes, bytes]) -> bool:
    name, value = header
    return name == b"transfer-encoding" or (name == b"content-length" and value.strip() != b"0")


def raw_error(error: BalancerError, more: Headers = ()) -> bytes:
    """A connection's last answer. `more`: further headers."""
    told = render_error(error)
    headers = (*told.headers, *more)
    lines = [b"HTTP/1.1 %d %b" % (told.status, http.HTTPStatus(told.status).phrase.encode())]
    lines += [name + b": " + value for name, value in headers if name != b"connection"]
    return b"\r\n".join([*lines, b"connection: close", b"", told.body])
