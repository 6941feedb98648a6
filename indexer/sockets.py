"""ZMQ sockets of the write path: a live socket with its connection monitor, a replay request.

Bytes move here, nothing is decided. Bursts are drained without awaiting in between. The sockets are
ZMQ's plain ones, and the event loop watches their file descriptors itself: pyzmq's own futures ask
each socket for its state some twenty times for every message.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from errno import EADDRNOTAVAIL, ENODEV
from types import TracebackType
from typing import Self, cast

import zmq
from zmq.utils.monitor import recv_monitor_message

from indexer.config import Direction
from indexer.core.frames import replay_request

Frames = list[bytes]
ZmqContext = zmq.Context[zmq.Socket[bytes]]

_BURST_MESSAGES = 64
_BURST_BYTES = 1 << 20
"""Taken at once, whichever comes first: about a millisecond."""
_RECONNECT_MS = 100
_RECONNECT_MAX_MS = 2_000
# A peer that vanished without closing its connection is noticed, so that its return is checked.
_HEARTBEAT_MS = 5_000
_HEARTBEAT_TIMEOUT_MS = 15_000
_CONNECTED = zmq.Event.HANDSHAKE_SUCCEEDED
_DISCONNECTED = zmq.Event.DISCONNECTED


class SocketError(Exception):
    """A socket could not be opened: the endpoint is taken, or not ours."""


class _Readiness:
    """Waits on the event loop until one of some sockets has something to receive.

    A socket's descriptor tells only that its state may have changed, and tells it once: who was told asks
    the socket, and so does whoever is about to wait, as any call of the socket may have taken the news.
    """

    def __init__(self, *sockets: zmq.Socket[bytes]) -> None:
        self._sockets = sockets
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        """Return when there is something; others go on meanwhile, however much there is."""
        if self._is_ready():
            await asyncio.sleep(0)
            return
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            for socket in self._sockets:
                self._loop.add_reader(socket.fileno(), self._look)
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def close(self) -> None:
        """Before the sockets are."""
        if self._loop is not None:
            for socket in self._sockets:
                self._loop.remove_reader(socket.fileno())

    def _is_ready(self) -> bool:
        # Every one is asked: a descriptor stays readable until its socket was.
        states = [cast("int", socket.get(zmq.EVENTS)) for socket in self._sockets]
        return any(state & zmq.POLLIN for state in states)

    def _look(self) -> None:
        if self._is_ready() and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class LiveSocket:
    """A SUB socket that takes every topic, and knows when peers come and go."""

    def __init__(
        self,
        endpoint: str,
        *,
        direction: Direction,
        high_water: int,
        context: ZmqContext,
    ) -> None:
        """Open it. Raises SocketError. `high_water` is in messages, 0 for no limit."""
        self._socket = _open(context, zmq.SUB, high_water)
        self._socket.set(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._socket.set(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        self._socket.set(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        self._socket.set(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
        self._socket.set(zmq.SUBSCRIBE, b"")
        self._monitor = self._socket.get_monitor_socket(_CONNECTED | _DISCONNECTED)
        self._readiness = _Readiness(self._socket, self._monitor)
        try:
            with _translated(endpoint):
                if direction == "connect":
                    self._socket.connect(endpoint)
                else:
                    _bind(self._socket, endpoint)
        except SocketError:
            self.close()
            raise

    def close(self) -> None:
        self._readiness.close()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    async def wait(self) -> None:
        """Return when there is something to take."""
        await self._readiness.wait()

    def take_messages(self) -> Sequence[Frames]:
        """What has arrived, up to a burst."""
        return _drain(self._socket)

    def take_connections(self) -> Iterator[bool]:
        """Peers that came (True) and went (False), in order.

        Called after `take_messages` it covers at least the connections these came on: ZMQ tells
        the monitor before it reads from a new connection.
        """
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            yield event == _CONNECTED


class ReplaySocket:
    """A DEALER for one replay. Its answers can't be mixed up with those to another request."""

    def __init__(self, endpoint: str, *, high_water: int, context: ZmqContext) -> None:
        self._endpoint = endpoint
        self._socket = _open(context, zmq.DEALER, high_water)
        self._readiness = _Readiness(self._socket)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._readiness.close()
        self._socket.close(linger=0)

    def ask(self, from_seq: int) -> None:
        """Connect and ask; the request waits for the connection. Raises SocketError."""
        with _translated(self._endpoint):
            self._socket.connect(self._endpoint)
            self._socket.send_multipart(replay_request(from_seq), zmq.NOBLOCK)

    async def take_messages(self, timeout_s: float) -> Sequence[Frames]:
        """What has arrived, up to a burst; nothing if nothing came in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._readiness.wait()
        except TimeoutError:
            return []
        return _drain(self._socket)


def _open(context: ZmqContext, kind: int, high_water: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.set(zmq.RCVHWM, high_water)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.IPV6, 1)
    return socket


def _bind(socket: zmq.Socket[bytes], endpoint: str) -> None:
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        # Engines name us by an address that needn't be on an interface here (NAT, containers).
        if error.errno not in {EADDRNOTAVAIL, ENODEV} or not endpoint.startswith("tcp://"):
            raise
        socket.bind(f"tcp://*:{endpoint.rpartition(':')[2]}")


def _drain(socket: zmq.Socket[bytes]) -> list[Frames]:
    messages: list[Frames] = []
    taken_bytes = 0
    receive: Callable[[int], Frames] = socket.recv_multipart
    try:
        while len(messages) < _BURST_MESSAGES and taken_bytes < _BURST_BYTES:
            frames = receive(zmq.NOBLOCK)
            messages.append(frames)
            taken_bytes += len(frames[-1])
    except zmq.Again:
        pass
    return messages


@contextmanager
def _translated(endpoint: str) -> Iterator[None]:
    try:
        yield
    except zmq.ZMQError as error:
        raise SocketError(f"{endpoint}: {error}") from error
