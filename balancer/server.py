"""Serves the balancer with uvicorn: one socket, one drain, no signal magic of its own.

Whoever starts it owns the event loop and the signals, so that the balancer, the indexer and
simulated engines can share one process.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator

import structlog
import uvicorn

from balancer.asgi import App
from balancer.dataplane.direct import direct_protocol
from balancer.dataplane.server_protocols import MAX_MESSAGE_BYTES, PatientWebSocket
from balancer.server_log import through_structlog

BACKLOG = 4096
CLIENT_KEEP_ALIVE_S = 75
"""Above the idle limits of common clients, so that they close idle connections, not we."""

ACCEPTED_PER_TURN = 16
"""libuv takes one connection per listening socket and turn of the loop. In a crowd, whose requests make
turns long, who came last would not be read before nearly everybody else had an answer."""

logger = structlog.stdlib.get_logger(__name__)


class ListenError(Exception):
    """The address can't be listened on. The message names it."""


class BalancerBrokenError(Exception):
    """Something ended that the balancer can't do without. The log says what."""


class EmbeddedServer(uvicorn.Server):
    """Leaves signals to its owner, and says when it accepts connections."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.accepts = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.accepts.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(
    app: App,
    *,
    host: str,
    port: int,
    drain_s: float,
    stop: asyncio.Event,
    on_listening: Callable[[int], None] | None = None,
) -> None:
    """`serve_on` an address of its own. `port` 0 takes any free one. Raises ListenError, too."""
    with listen(host, port) as listener:
        await serve_on(listener, app, drain_s=drain_s, stop=stop, on_listening=on_listening)


async def serve_on(
    listener: socket.socket,
    app: App,
    *,
    drain_s: float,
    stop: asyncio.Event,
    on_listening: Callable[[int], None] | None = None,
) -> None:
    """Serve until `stop` is set, then let running answers finish for up to `drain_s`.

    `on_listening` gets the port once connections are accepted. Raises BalancerBrokenError if it had
    to end by itself.
    """
    server = EmbeddedServer(
        uvicorn.Config(
            app,
            loop="none",
            http=direct_protocol(app.entry, app.entry.settings),
            ws=PatientWebSocket,
            ws_max_size=MAX_MESSAGE_BYTES,
            ws_per_message_deflate=False,
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_keep_alive=CLIENT_KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(1, round(drain_s)),
        )
    )
    with through_structlog(), several(listener) as listeners:
        async with asyncio.TaskGroup() as group:
            watchers = [
                group.create_task(_watch(server, app, stop, listener, on_listening)),
                group.create_task(_watch_broken(server, app)),
            ]
            try:
                await server.serve(sockets=listeners)
            except asyncio.CancelledError:
                # No time for running answers, but the application closes what it opened.
                server.config.timeout_graceful_shutdown = 0
                if server.started:
                    await server.shutdown(listeners)
                raise
            for watcher in watchers:
                watcher.cancel()
    logger.info("draining_ended", cut=app.cut)
    if app.broken.is_set():
        raise BalancerBrokenError("the balancer can't go on; its last log lines say why")


async def _watch(
    server: EmbeddedServer,
    app: App,
    stop: asyncio.Event,
    listener: socket.socket,
    on_listening: Callable[[int], None] | None,
) -> None:
    """Tell when the server is up, and ask it to leave when `stop` is set."""
    await server.accepts.wait()
    if on_listening is not None:
        on_listening(listener.getsockname()[1])
    await stop.wait()
    logger.info("draining_started", running=app.running)
    app.start_draining()
    server.should_exit = True


async def _watch_broken(server: EmbeddedServer, app: App) -> None:
    """Leave when the application can't go on: running answers may finish, nothing new begins."""
    await app.broken.wait()
    app.start_draining()
    server.should_exit = True


@contextlib.contextmanager
def several(listener: socket.socket) -> Iterator[list[socket.socket]]:
    """The socket by several descriptors, each of which the loop accepts from in every turn."""
    with contextlib.ExitStack() as opened:
        others = [opened.enter_context(listener.dup()) for _ in range(ACCEPTED_PER_TURN - 1)]
        yield [listener, *others]


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket, or raise ListenError."""
    try:
        family = _family(host, port)
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ListenError(f"can't listen on {host} port {port}: {error.strerror}") from error
    return _prepared(listener)


def bind_shared(host: str, port: int, *, is_first: bool = False) -> socket.socket:
    """A socket for one of several processes on `port`, which listens once it is served on.

    `is_first` refuses a port that others listen on, as `listen` does; the other sockets join the first.
    Raises ListenError.
    """
    try:
        family = _family(host, port)
        if is_first and port:
            # A socket that shares its port would join whoever is there, unnoticed.
            socket.create_server((host, port), family=family).close()
        shared = socket.socket(family, socket.SOCK_STREAM)
        shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            shared.setsockopt(
                socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1
            )  # as `create_server` has it
        shared.bind((host, port))
    except OSError as error:
        raise ListenError(f"can't listen on {host} port {port}: {error.strerror}") from error
    return _prepared(shared)


def _family(host: str, port: int) -> int:
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]


def _prepared(listener: socket.socket) -> socket.socket:
    # Handed down to each connection. uvloop sets it itself, asyncio doesn't for such a socket,
    # and head and body of an answer are two writes: 40 ms each time.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setblocking(False)
    return listener
