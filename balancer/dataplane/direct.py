"""The proxied paths without ASGI: uvicorn's own protocol, but for who answers them.

It reads connections, keeps them alive, ends them and serves every other path; this one takes the
proxied requests out of it between the request's headers and its application, and makes each a
`DirectExchange`. So a piece of an answer costs one call and one buffer, not a message, a coroutine and
a header scan.

Rule: requests of one connection are answered one after the other, in their order.

Measured: docs/decisions/0010-server-protocol.md.
"""

import asyncio
from functools import partial
from typing import Any, cast
from urllib.parse import unquote

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from uvicorn.server import ServerState

from balancer.core.settings.dataplane import DataPlaneSettings
from balancer.dataplane.direct_exchange import DirectExchange, Plane
from balancer.dataplane.lookout import LOOK_S, Lookout
from balancer.dataplane.server_protocols import ExactHttp


class DirectProtocol(ExactHttp):
    """One client connection."""

    cycle: Any
    """uvicorn's own, a DirectExchange (which has all that uvicorn uses of a cycle), or None."""

    def __init__(
        self,
        plane: Plane,
        lookout: Lookout,
        limits: DataPlaneSettings,
        *,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(lookout, limits, config, server_state, app_state, _loop)
        self.plane = plane
        self.answering: DirectExchange | None = None
        """Behind it others may wait: requests that came before their turn."""

    def connection_lost(self, exc: Exception | None) -> None:
        for exchange in {self.answering, self.cycle}:
            if isinstance(exchange, DirectExchange):
                exchange.on_gone()
        if isinstance(self.cycle, DirectExchange):
            self.cycle = None
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        # The scope is put together only for an application.
        self.url = b""
        self.expect_100_continue = False
        self.headers = []
        self.begin_head()

    def on_headers_complete(self) -> None:
        if self.fed_bytes + self.head_bytes > self.max_head_bytes:
            self.check_head()
        if self.parser.should_upgrade():
            self._on_upgrade()
            return
        target = self._target()
        if target is None:
            self._hand_to_application()
            return
        before = self.cycle
        self.in_head, self.in_body = False, True
        self.header_count = len(self.headers)
        self.cycle = DirectExchange(self, target)
        if before is None or before.response_complete:
            self._start_asgi_task(self.cycle, self.app)
        else:
            self.pipeline.appendleft((self.cycle, self.app))

    def on_body(self, body: bytes) -> None:
        self.has_body_moved = True
        if not isinstance(self.cycle, DirectExchange):
            super().on_body(body)
        elif not self.cycle.response_complete:
            self.cycle.on_body(body)

    def on_message_complete(self) -> None:
        if not self.in_body:
            return  # a head that is read again
        if len(self.headers) > self.header_count:
            self.check_trailers()
        self.in_body = False
        if not isinstance(self.cycle, DirectExchange):
            super().on_message_complete()
        elif not self.cycle.response_complete:
            self.cycle.on_body_complete()

    def drop_cycle(self) -> None:
        if isinstance(self.cycle, DirectExchange):
            self.cycle.on_gone()
        else:
            super().drop_cycle()

    def on_late_body(self) -> None:
        if isinstance(self.cycle, DirectExchange):
            self.cycle.on_late()
        else:
            super().on_late_body()

    def _target(self) -> tuple[str, bytes] | None:
        """Path and query of a proxied request, None for any other."""
        raw_path, _, query = self.url.partition(b"?")
        if raw_path.startswith(b"/") and b"%" not in raw_path and b"#" not in self.url:
            path = raw_path.decode("ascii")
        else:
            parsed = httptools.parse_url(self.url)
            path, query = unquote(parsed.path.decode("ascii")), parsed.query or b""
        return (path, query) if self.plane.proxies(path) else None

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        if not isinstance(cycle, DirectExchange):
            super()._start_asgi_task(cycle, app)
            return
        # It takes itself out of the tasks that a stop waits for: a callback would cost a turn of its own.
        cycle.task = self.loop.create_task(cycle.run())
        self.tasks.add(cycle.task)

    def _on_upgrade(self) -> None:
        if self.declines_upgrade():
            self.in_head = False
        else:
            self._hand_to_application()

    def _hand_to_application(self) -> None:
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.headers, self.expect_100_continue = url, headers, expects
        self.scope["headers"] = headers
        super().on_headers_complete()


def direct_protocol(plane: Plane, limits: DataPlaneSettings) -> type[asyncio.Protocol]:
    """What uvicorn calls for each connection (`http=`)."""
    shortest_s = min(limits.head_timeout_s, limits.body_idle_timeout_s)
    lookout = Lookout(min(LOOK_S, shortest_s / 4))
    return cast("type[asyncio.Protocol]", partial(DirectProtocol, plane, lookout, limits))
