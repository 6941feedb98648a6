"""uvicorn's HTTP/1.1 protocol, where clients do other things than ask and wait.

Rules:

1. While a request is answered its client is listened to: it may leave. So reading never pauses then
   (an end that waits behind unread bytes isn't seen by anybody). What comes of the next requests is
   held; over `MAX_HELD_BYTES` it is dropped, and the connection ends with the answer, as HTTP allows.
2. A client that has sent its last byte has left, even if it could still read: so proxies and engines
   take it, too.
3. A connection on which nothing comes for as long as uvicorn keeps it alive is closed.
"""

import asyncio
from typing import Any, Final

from uvicorn._types import ASGI3Application
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from balancer.dataplane.lookout import Lookout

MAX_HELD_BYTES: Final = 1024 * 1024


class BoundedHttp(HttpToolsProtocol):
    """One client connection. Who overrides a callback of the parser keeps `in_head` and `in_body`."""

    cycle: Any
    """uvicorn's own, one that has all that uvicorn uses of it, or None."""

    def __init__(
        self,
        lookout: Lookout,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.in_body = False
        """The body of the newest request isn't complete."""
        self._lookout = lookout
        self._running: RequestResponseCycle | None = None
        """Of those that an application answers; uvicorn tells only the newest that its client has left."""
        self._held = bytearray()
        self._drops = False
        """Too much has come before its turn."""
        self._has_moved = True
        self._moved_s = 0.0

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

    def data_received(self, data: bytes) -> None:
        self._has_moved = True
        if self._is_answering():
            self._hold(data)
        else:
            super().data_received(data)

    def on_headers_complete(self) -> None:
        self.in_body = True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self.in_body = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self._has_moved = True
        self.flow.resume_reading()
        if self.pipeline:
            cycle, app = self.pipeline.pop()
            self._start_asgi_task(cycle, app)
        if self._held and not self._is_answering():
            held, self._held = bytes(self._held), bytearray()
            self.data_received(held)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def look(self, now_s: float) -> None:
        """See whether the client's time is over."""
        if self._has_moved:
            self._has_moved = False
            self._moved_s = now_s
        quiet_s = now_s - self._moved_s
        if self.transport.is_closing():
            return
        if self._is_idle() and quiet_s > self.timeout_keep_alive:
            self.transport.close()

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

    def _is_idle(self) -> bool:
        return not self.in_body and (self.cycle is not None and self.cycle.response_complete)
