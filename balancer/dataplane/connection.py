"""One connection to an engine: an asyncio protocol around httptools' parser.

`UpstreamAnswer` is what the caller reads; `Connection` is what asyncio drives. Rules:

1. Bytes wait in the answer, at most about 256 KiB: then reading from the engine pauses until
   they are taken, so a slow client holds back its engine and nothing else.
2. A connection is handed back for reuse when an answer is complete, the engine keeps it open and
   the request was sent whole. In every other case it is closed.
3. An answer without a length ends with the connection. The parser can't be told of the end of the
   file, or that an answer has no body (HEAD, 204, 304), so that framing is decided here.
4. Silence is found by whoever calls `look` now and then for all connections, not by a timer of
   each: a limit strikes up to two looks late, never early. The clock stands still while *we*
   don't read.
5. One parser serves all answers of a connection. Bytes that nobody asked for, a second answer
   behind the first one included, end it: the next request would get what wasn't meant for it.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, cast

import httptools

from balancer.core.errors import (
    EngineClosedError,
    EngineError,
    EngineLostError,
    EngineProtocolError,
    EngineTimeoutError,
    StreamCutError,
)
from balancer.core.http.body import Body, pieces

_MAX_BUFFERED_BYTES: Final = 256 * 1024
_MAX_HEADER_BYTES: Final = 256 * 1024
_BODILESS: Final = frozenset({204, 304})


class UpstreamAnswer:
    """An engine's answer. Whoever holds it calls `close`, complete or not."""

    def __init__(
        self, connection: "Connection", *, first_byte_timeout_s: float, idle_timeout_s: float
    ) -> None:
        self.status = 0
        self.headers: tuple[tuple[bytes, bytes], ...] = ()
        self.is_event_stream = False
        """One that can be read: nobody has encoded it."""
        self.is_encoded = False
        self.is_complete = False
        self.ends_with_connection = False
        """Nothing else says where its end is."""
        self._connection = connection
        self._loop = connection.loop
        self._chunks: deque[bytes] = deque()
        self._buffered_bytes = 0
        self._error: EngineError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Callable[[bytes], bool] | None = None
        self._is_held = False
        self._bug: Exception | None = None
        self._idle_timeout_s = idle_timeout_s
        self._limit_s = first_byte_timeout_s
        self.has_body = False
        self._has_news = False
        self._quiet_since_s = self._loop.time()

    def news(self) -> asyncio.Future[None]:
        """Done when something has come; `status` is 0 until the headers have. Raises EngineError.

        Headers of an event stream alone are nothing yet.
        """
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        return self._waiter

    @property
    def piece(self) -> bytes:
        """What of the body comes next, if it is here."""
        return self._chunks[0] if self._chunks else b""

    @property
    def is_over(self) -> bool:
        """It is complete, and all of it has been taken."""
        return self.is_complete and not self._chunks

    def take(self) -> bytes:
        """What of the body has arrived by now; it may be nothing."""
        if not self._chunks:
            return b""
        chunk = self._chunks.popleft() if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        self._buffered_bytes = 0
        if self._connection.is_paused:
            self._has_news = True
            self._connection.resume(self)
        return chunk

    async def next_chunk(self) -> bytes:
        """Return what has arrived, or wait for it; b"" at the end of a complete answer."""
        while not self._chunks:
            if self._error is not None:
                raise self._error
            if self.is_complete:
                return b""
            await self._wait()
        return self.take()

    async def hand_to(self, sink: Callable[[bytes], bool]) -> bool:
        """Give `sink` every piece of the body at once as it arrives, in the connection's callback.

        True: the answer is complete. False: `sink` returned False for a piece, and gets no more
        until it is handed in again. What it raises is raised here.
        """
        if self._chunks and not sink(self.take()):
            return False
        if self._error is None and not self.is_complete:
            self._sink = sink
            try:
                await self._wait()
            finally:
                self._sink = None
        if self._bug is not None:
            raise self._bug
        if self._is_held:
            self._is_held = False
            return False
        if self._error is not None:
            raise self._error
        return self.is_complete

    async def read(self, limit_bytes: int) -> bytes:
        """Return the (rest of the) body. Raises EngineProtocolError if it is over the limit."""
        parts = []
        size = 0
        while chunk := await self.next_chunk():
            size += len(chunk)
            if size > limit_bytes:
                raise EngineProtocolError("the engine's answer is too large to be read whole")
            parts.append(chunk)
        return b"".join(parts)

    def close(self) -> None:
        """Break the connection unless the answer is complete; the engine sees it and stops."""
        if not self.is_complete:
            self._connection.abort()

    def on_head(self, status: int, headers: tuple[tuple[bytes, bytes], ...]) -> None:
        self.status = status
        self.headers = headers
        self._has_news = True
        kind = encoding = None
        for name, value in headers:
            if name == b"content-type" and kind is None:
                kind = value
            elif name == b"content-encoding" and encoding is None:
                encoding = value
        self.is_encoded = encoding is not None and encoding != b"identity"
        if kind is not None and not self.is_encoded:
            self.is_event_stream = kind.lower().startswith(b"text/event-stream")
        if self._waiter is not None and not self.is_event_stream:
            self._wake()  # of a stream the first bytes are waited for, too: what it is is said there

    def on_body(self, chunk: bytes) -> bool:
        """Take a piece of the body; False if the engine should be held back."""
        self._has_news = True
        if self._sink is not None:
            try:
                if self._sink(chunk):
                    return True
                self._is_held = True
            except Exception as error:  # noqa: BLE001 - the parser above would take it for its own
                self._bug = error
            self._sink = None
            self._wake()
            return True
        self._chunks.append(chunk)
        self._buffered_bytes += len(chunk)
        if not self.has_body:
            self.has_body = True
            self._limit_s = self._idle_timeout_s
        if self._waiter is not None:
            self._wake()
        return self._buffered_bytes <= _MAX_BUFFERED_BYTES

    def on_complete(self) -> None:
        self.is_complete = True
        if self._waiter is not None:
            self._wake()

    def on_error(self, error: EngineError) -> None:
        """The rest will not come. What has arrived is still handed out first."""
        if self.is_complete or self._error is not None:
            return
        self._error = error
        self._wake()

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def look(self, now_s: float) -> None:
        """End it if nothing has come for too long."""
        if self._has_news or self._connection.is_paused:
            self._has_news = False
            self._quiet_since_s = now_s
        elif now_s - self._quiet_since_s >= self._limit_s and not self.is_complete:
            self.on_error(EngineTimeoutError(f"the engine was silent for {self._limit_s:g} s"))
            self._connection.abort()


class Connection(asyncio.Protocol):
    """Carries one request after the other. `on_reusable` gets it back between them."""

    def __init__(
        self,
        *,
        on_reusable: Callable[["Connection"], None],
        on_lost: Callable[["Connection"], None],
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.idle_since_s = 0.0
        self.is_paused = False
        self._on_reusable = on_reusable
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._answer: UpstreamAnswer | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._got_bytes = False
        self._is_head_request = False
        self._keeps_alive = False
        self._is_informational = False
        self._header_bytes = 0
        self._headers: list[tuple[bytes, bytes]] = []

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, answer: UpstreamAnswer, method: str, head: bytes, body: Body) -> None:
        """Write a request whose answer goes to `answer`."""
        self._answer = answer
        if self._parser is None:
            self._parser = httptools.HttpResponseParser(self)
        self._got_bytes = False
        self._is_head_request = method == "HEAD"
        self._header_bytes = 0
        self._headers = []
        if self._transport is None or self._transport.is_closing():
            self._fail_closed(answer)
        elif isinstance(body, bytes) and len(body) <= _MAX_BUFFERED_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            for piece in pieces(body):
                self._transport.write(piece)

    def abort(self) -> None:
        """Break the connection at once, unsent bytes and all."""
        if self._transport is not None:
            self._transport.abort()

    def look(self, now_s: float) -> None:
        """Look for silence."""
        if self._answer is not None:
            self._answer.look(now_s)

    def give_up(self) -> None:
        """Break it if nothing of its answer's body has come."""
        if self._answer is not None and not self._answer.has_body:
            self._answer.on_error(EngineLostError("the engine doesn't answer any more"))
            self.abort()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def resume(self, answer: UpstreamAnswer) -> None:
        """`answer` has room again."""
        if self.is_paused and self._answer is answer and self._transport is not None:
            self.is_paused = False
            self._transport.resume_reading()

    # Calls of asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A stream by construction; uvloop's transports are no subclasses of asyncio's.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self._answer is None or self._parser is None:
            self.abort()  # bytes that nobody asked for
            return
        self._got_bytes = True
        answer = self._answer
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            answer.on_error(EngineProtocolError("the engine's answer was not understood"))
            self.abort()
            return
        if answer.is_complete and self._answer is answer:
            # Complete for us, not for the parser: the rest of its bytes would be misread.
            self._answer = None
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_lost(self)
        answer, self._answer = self._answer, None
        self._parser = None
        if answer is not None and not answer.is_complete:
            if exc is None and answer.status and answer.ends_with_connection:
                answer.on_complete()
            else:
                self._fail_closed(answer)

    # Calls of the parser

    def on_message_begin(self) -> None:
        if self._answer is None:
            raise ValueError("an answer that nobody asked for")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > _MAX_HEADER_BYTES:
            # An exception in a callback ends the parsing as a parser error.
            raise ValueError("headers too large")
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._parser is None or self._answer is None:
            return
        status = self._parser.get_status_code()
        if not 100 <= status <= 599:
            raise ValueError("status out of range")
        if status < 200:
            self._is_informational = True
            self._headers = []
            return
        headers = tuple(self._headers)
        self._keeps_alive = self._parser.should_keep_alive()
        for name, value in headers:
            if name == b"content-length" or (
                name == b"transfer-encoding" and b"chunked" in value.lower()
            ):
                break
        else:
            self._answer.ends_with_connection = not self._is_head_request
        self._answer.on_head(status, headers)
        if self._is_head_request or status in _BODILESS:
            self._answer.on_complete()

    def on_body(self, body: bytes) -> None:
        answer = self._answer
        if answer is None or answer.is_complete or answer.on_body(body) or self.is_paused:
            return
        if self._transport is not None and not self._transport.is_closing():
            self.is_paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self._is_informational:
            self._is_informational = False
            return
        answer, self._answer = self._answer, None
        if answer is None or self._transport is None:
            return
        answer.on_complete()
        if not self._keeps_alive or self._transport.get_write_buffer_size():
            self.close()
            return
        if self.is_paused:
            self.is_paused = False
            self._transport.resume_reading()
        self._on_reusable(self)

    def _fail_closed(self, answer: UpstreamAnswer) -> None:
        if not self._got_bytes:
            answer.on_error(EngineClosedError("the engine closed the connection unanswered"))
        elif answer.status == 0:
            answer.on_error(EngineProtocolError("the engine's answer ended in its headers"))
        else:
            answer.on_error(StreamCutError("the engine's answer was cut"))
