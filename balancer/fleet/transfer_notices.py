"""Listens to LMCache's notices: a ZMQ PULL around `core.fleet.transfer_notices`.

A sender whose notices nobody takes stops sending, so they are taken whether anybody waits or not.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import zmq
import zmq.asyncio

from balancer.connectors.contract import Notice
from balancer.core.fleet.transfer_notices import (
    MAX_MESSAGE_BYTES,
    Expected,
    NoticeBook,
    NoticeRefusedError,
)
from balancer.core.settings.errors import ConfigError
from balancer.core.settings.notices import NoticeSettings
from balancer.fleet.draining import drain

_TURN_S = 0.5


class TransferNotices:
    """One port. `run` ends only by cancellation or a bug."""

    def __init__(self, settings: NoticeSettings) -> None:
        """Listen at once. Raises ConfigError if the port can't be had."""
        self.heard = 0
        self.missed = 0
        """Requests that waited in vain."""
        self.refused: Counter[str] = Counter()
        self._wait_s = settings.wait_s
        self._book = NoticeBook()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.IPV6, 1)
        self._socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        host = f"[{settings.bind}]" if ":" in settings.bind else settings.bind
        try:
            self._socket.bind(f"tcp://{host}:{settings.port or '*'}")
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                f"`lmcache_notices.port`: {settings.bind}:{settings.port}: {error.strerror}"
            ) from error
        endpoint = self._socket.get_string(zmq.LAST_ENDPOINT)
        self.port = int(endpoint.rpartition(":")[2])

    @contextmanager
    def expecting(self, notice: Notice) -> Iterator["Arrival"]:
        """From before the prefill leg is sent: a notice may be faster than the leg's answer."""
        came = asyncio.Event()
        expected = Expected(notice.name, notice.times, came.set)
        self._book.expect(expected)
        try:
            yield Arrival(self, came)
        finally:
            self._book.forget(expected)

    async def wait(self, came: asyncio.Event) -> None:
        """Until it has come, or too long."""
        try:
            async with asyncio.timeout(self._wait_s):
                await came.wait()
        except TimeoutError:
            self.missed += 1

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()

    async def run(self) -> None:
        """Take messages until cancelled."""
        plain: zmq.Socket[bytes] = zmq.Socket.shadow(self._socket.underlying)
        while True:
            await self._socket.poll(int(_TURN_S * 1000))
            for frames in drain(plain):
                self._take(frames)
            await asyncio.sleep(0)

    def _take(self, frames: Sequence[bytes]) -> None:
        self.heard += 1
        try:
            self._book.on_message(frames[-1])
        except NoticeRefusedError as error:
            self.refused[error.reason] += 1


class Arrival:
    """What one request waits for."""

    __slots__ = ("_came", "_notices")

    def __init__(self, notices: TransferNotices, came: asyncio.Event) -> None:
        self._notices = notices
        self._came = came

    async def wait(self) -> None:
        """Until every notice has come, or too long."""
        await self._notices.wait(self._came)
