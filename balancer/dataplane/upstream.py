"""The client side of the proxied paths: connections to engines, kept and reused.

Rules:

1. Idle connections are dropped before the engine drops them (vLLM: 5 s). The race that remains is
   met by one repetition on a new connection, if the reused one died at once and before any answer
   byte: an engine that dies while it computes isn't asked the same again here.
2. Limits: connecting, first byte, silence. No total limit: agent turns may take an hour. One timer
   looks at everybody who waits (`_look`): two timers of each request's own cost as much as its
   parsing. It looks often enough for a limit to strike late by a fifth at most.
3. Proxies of the environment are ignored on purpose: engines are neighbours.
4. Every foreign error becomes one of `balancer.core.errors`, without the engine's address.
5. A pool lives as long as it has connections. What comes back to one that was given up is closed.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final
from urllib.parse import urlsplit

from balancer.core.errors import (
    ConnectTimeoutError,
    EngineClosedError,
    EngineUnreachableError,
    NoFilesError,
)
from balancer.core.http.body import Body
from balancer.dataplane.connection import Connection, UpstreamAnswer
from balancer.fleet.engine_sockets import NO_FILES_LEFT, tls_context

_LONGEST_LOOK_S: Final = 1.0
_STALE_S: Final = 1.0
"""A connection that the engine had retired shows it within a round trip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Origin:
    """Where a base URL leads."""

    host: str
    port: int
    tls: bool
    prefix: str
    host_line: bytes
    """Between the request line and the other headers."""


class _Pool:
    """Connections to one origin."""

    __slots__ = ("base_url", "connecting", "idle", "is_sweeping", "origin", "outdated", "used")

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url
        self.origin = _read_origin(base_url)
        self.connecting = 0
        self.idle: list[Connection] = []
        self.used: set[Connection] = set()
        self.is_sweeping = False
        self.outdated: set[Connection] = set()
        """In use, and not to be used again."""


class Upstream:
    """HTTP/1.1 to engines. One object per process, bound to its event loop."""

    def __init__(
        self,
        *,
        connect_timeout_s: float,
        first_byte_timeout_s: float,
        idle_timeout_s: float,
        keep_alive_s: float = 4.0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._first_byte_timeout_s = first_byte_timeout_s
        self._idle_timeout_s = idle_timeout_s
        self._keep_alive_s = keep_alive_s
        self._tls = tls
        self._pools: dict[str, _Pool] = {}
        self._is_closed = False
        self._look_s = min(first_byte_timeout_s / 10, idle_timeout_s / 10, _LONGEST_LOOK_S)
        self._is_looking = False

    async def send(
        self,
        base_url: str,
        method: str,
        target: str,
        headers: Sequence[tuple[bytes, bytes]],
        body: Body,
        *,
        on_ready: Callable[[], None] | None = None,
    ) -> UpstreamAnswer:
        """Send a request, return its answer once status and headers are there, of a stream also more.

        `target` is path and query. `host` and `content-length` are added here. `on_ready` is called
        when there is a connection, before anything is written; what it raises ends the attempt.
        Raises EngineError.
        """
        pool = self._pools.get(base_url) or self._pools.setdefault(base_url, _Pool(base_url))
        length = len(body) if isinstance(body, bytes) else body.size_bytes
        head = _write_head(pool.origin, method, target, headers, length)
        connection = self._take_idle(pool)
        is_reused = connection is not None
        while True:
            if connection is None:
                connection = await self._connect(pool)
            if on_ready is not None:
                _ask(on_ready, connection)
            sent_s = connection.loop.time()
            answer = self._write(pool, connection, method, head, body)
            try:
                while answer.status == 0:
                    await answer.news()
            except BaseException as error:
                answer.close()
                is_quick = connection.loop.time() - sent_s <= _STALE_S
                if not (is_reused and is_quick and isinstance(error, EngineClosedError)):
                    raise
                # The engine retired the connection just now: it saw no request.
                connection, is_reused = None, False
            else:
                return answer

    def connect_anew(self, base_url: str) -> None:
        """Its name leads elsewhere now: what runs goes on, no connection is used again."""
        pool = self._pools.get(base_url)
        if pool is not None:
            pool.outdated = set(pool.used)
            for connection in pool.idle:
                connection.close()
            pool.idle.clear()

    def give_up(self, base_url: str) -> None:
        """Nobody answers there any more: who waits for an answer's first byte waits in vain."""
        pool = self._pools.get(base_url)
        for connection in list(pool.used) if pool is not None else ():
            connection.give_up()

    async def close(self) -> None:
        """Break every connection, and make no other."""
        self._is_closed = True
        for pool in self._pools.values():
            for connection in [*pool.idle, *pool.used]:
                connection.abort()
        self._pools.clear()
        await asyncio.sleep(0)  # the loop closes the sockets in its next turn

    def _write(
        self, pool: _Pool, connection: Connection, method: str, head: bytes, body: Body
    ) -> UpstreamAnswer:
        """Send a request over this connection; its answer has to be waited for, and closed."""
        answer = UpstreamAnswer(
            connection,
            first_byte_timeout_s=self._first_byte_timeout_s,
            idle_timeout_s=self._idle_timeout_s,
        )
        pool.used.add(connection)
        if not self._is_looking:
            self._is_looking = True
            connection.loop.call_later(self._look_s, self._look)
        connection.send(answer, method, head, body)
        return answer

    def _look(self) -> None:
        """End what has been silent for too long, as long as anybody waits."""
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        waiting = [each for pool in self._pools.values() for each in pool.used]
        for connection in waiting:
            connection.look(now_s)
        self._is_looking = bool(waiting)
        if waiting:
            loop.call_later(self._look_s, self._look)

    async def _connect(self, pool: _Pool) -> Connection:
        pool.connecting += 1
        try:
            connection = await self._open(pool)
            pool.used.add(connection)
        finally:
            pool.connecting -= 1
            self._give_up_if_empty(pool)
        if self._is_closed:  # meanwhile
            connection.abort()
        return connection

    async def _open(self, pool: _Pool) -> Connection:
        if self._is_closed:
            raise EngineUnreachableError("this balancer is shutting down")
        origin = pool.origin
        loop = asyncio.get_running_loop()

        def make() -> Connection:
            return Connection(on_reusable=partial(self._keep, pool), on_lost=pool.used.discard)

        try:
            async with asyncio.timeout(self._connect_timeout_s):
                transport, connection = await loop.create_connection(
                    make,
                    origin.host,
                    origin.port,
                    ssl=self._tls_context() if origin.tls else None,
                    server_hostname=origin.host if origin.tls else None,
                )
        except TimeoutError as error:
            raise ConnectTimeoutError("the engine did not accept a connection in time") from error
        except ssl.SSLCertVerificationError as error:
            raise EngineUnreachableError("the engine's certificate isn't trusted") from error
        except (OSError, UnicodeError) as error:
            if isinstance(error, OSError) and error.errno in NO_FILES_LEFT:
                raise NoFilesError from error
            raise EngineUnreachableError("no connection to the engine") from error
        _tune(transport)
        return connection

    def _tls_context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = tls_context()
        return self._tls

    def _take_idle(self, pool: _Pool) -> Connection | None:
        """Return the connection used last, if any is fit."""
        while pool.idle:
            connection = pool.idle.pop()
            oldest_s = connection.loop.time() - self._keep_alive_s
            if connection.is_open and connection.idle_since_s > oldest_s:
                return connection
            connection.close()
        return None

    def _keep(self, pool: _Pool, connection: Connection) -> None:
        loop = connection.loop
        pool.used.discard(connection)
        if connection in pool.outdated or self._pools.get(pool.base_url) is not pool:
            pool.outdated.discard(connection)
            connection.close()
            return
        connection.idle_since_s = loop.time()
        pool.idle.append(connection)
        if not pool.is_sweeping:
            pool.is_sweeping = True
            loop.call_later(self._keep_alive_s, self._sweep, pool)

    def _sweep(self, pool: _Pool) -> None:
        """Close what has been idle for too long; oldest first in the list."""
        loop = asyncio.get_running_loop()
        oldest_s = loop.time() - self._keep_alive_s
        fit = [each for each in pool.idle if each.is_open and each.idle_since_s > oldest_s]
        for connection in set(pool.idle) - set(fit):
            connection.close()
        pool.idle[:] = fit
        pool.is_sweeping = bool(fit)
        if fit:
            loop.call_later(fit[0].idle_since_s - oldest_s, self._sweep, pool)
        else:
            self._give_up_if_empty(pool)

    def _give_up_if_empty(self, pool: _Pool) -> None:
        """Instances come and go: nothing is kept for those that nobody speaks to."""
        is_empty = not pool.idle and not pool.used and not pool.connecting
        if is_empty and self._pools.get(pool.base_url) is pool:
            del self._pools[pool.base_url]


def _ask(on_ready: Callable[[], None] | None, connection: Connection) -> None:
    """Call `on_ready`; a connection it doesn't want any more is closed."""
    if on_ready is None:
        return
    try:
        on_ready()
    except BaseException:
        connection.close()
        raise


def _read_origin(base_url: str) -> _Origin:
    parts = urlsplit(base_url)
    tls = parts.scheme == "https"
    return _Origin(
        host=parts.hostname or "",
        port=parts.port or (443 if tls else 80),
        tls=tls,
        prefix=parts.path.rstrip("/"),
        host_line=b"\r\nhost: %b\r\n" % parts.netloc.rpartition("@")[2].encode("latin-1"),
    )


def _write_head(
    origin: _Origin,
    method: str,
    target: str,
    headers: Sequence[tuple[bytes, bytes]],
    body_bytes: int,
) -> bytes:
    head = f"{method} {origin.prefix}{target} HTTP/1.1".encode("ascii") + origin.host_line
    if body_bytes or method not in {"GET", "HEAD"}:
        head += b"content-length: %d\r\n" % body_bytes
    for name, value in headers:
        head += name + b": " + value + b"\r\n"
    return head + b"\r\n"


def _tune(transport: asyncio.BaseTransport) -> None:
    raw = transport.get_extra_info("socket")
    if raw is not None and raw.family in {socket.AF_INET, socket.AF_INET6}:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A vanished host is noticed during a long silent prefill, without a total limit.
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
