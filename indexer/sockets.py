"""ZMQ sockets of the write path: a live socket with its connection monitor, a replay request.

Bytes move here, nothing is decided. Bursts are drained without awaiting in between.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from errno import EADDRNOTAVAIL, ENODEV
from types import TracebackType
from typing import Self

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from indexer.config import Direction
from indexer.core.frames import replay_request

Frames = list[bytes]

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


class LiveSocket:
    """A SUB socket that takes every topic, and knows when peers come and go."""

    def __init__(
        self,
        endpoint: str,
        *,
        direction: Direction,
        high_water: int,
        context: zmq.asyncio.Context,
    ) -> None:
        """Open it. Raises SocketError. `high_water` is in messages, 0 for no limit."""
        self._socket = _open(context, zmq.SUB, high_water)
        self._plain = _plain(self._socket)
        self._plain.set(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._plain.set(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        self._plain.set(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        self._plain.set(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
        self._plain.set(zmq.SUBSCRIBE, b"")
        self._monitor = self._socket.get_monitor_socket(_CONNECTED | _DISCONNECTED)
        self._plain_monitor = _plain(self._monitor)
        self._poller = zmq.asyncio.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        try:
            with _translated(endpoint):
                if direction == "connect":
                    self._plain.connect(endpoint)
                else:
                    _bind(self._plain, endpoint)
        except SocketError:
            self.close()
            raise

    def close(self) -> None:
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
        await self._poller.poll()

    def take_messages(self) -> Sequence[Frames]:
        """What has arrived, up to a burst."""
        return _drain(self._plain)

    def take_connections(self) -> Iterator[bool]:
        """Peers that came (True) and went (False), in order.

        Called after `take_messages` it covers at least the connections these came on: ZMQ tells
        the monitor before it reads from a new connection.
        """
        while self._plain_monitor.poll(0):
            event = recv_monitor_message(self._plain_monitor)["event"]
            yield event == _CONNECTED


class ReplaySocket:
    """A DEALER for one replay. Its answers can't be mixed up with those to another request."""

    def __init__(self, endpoint: str, *, high_water: int, context: zmq.asyncio.Context) -> None:
        self._endpoint = endpoint
        self._socket = _open(context, zmq.DEALER, high_water)
        self._plain = _plain(self._socket)
        self._poller = zmq.asyncio.Poller()
        self._poller.register(self._socket, zmq.POLLIN)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._socket.close(linger=0)

    def ask(self, from_seq: int) -> None:
        """Connect and ask; the request waits for the connection. Raises SocketError."""
        with _translated(self._endpoint):
            self._plain.connect(self._endpoint)
            self._plain.send_multipart(replay_request(from_seq), zmq.NOBLOCK)

    async def take_messages(self, timeout_s: float) -> Sequence[Frames]:
        """What has arrived, up to a burst; nothing if nothing came in time."""
        if not await self._poller.poll(timeout_s * 1000):
            return []
        return _drain(self._plain)


def _open(context: zmq.asyncio.Context, kind: int, high_water: int) -> zmq.asyncio.Socket:
    socket = context.socket(kind)
    socket.set(zmq.RCVHWM, high_water)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.IPV6, 1)
    return socket


def _plain(socket: zmq.asyncio.Socket) -> zmq.Socket[bytes]:
    """The same socket without futures: draining it costs no loop turn."""
    return zmq.Socket.shadow(socket.underlying)


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
