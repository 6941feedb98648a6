"""Listens to engines that announce themselves: a ZMQ ROUTER around `core.fleet.registrations`.

Bytes move here, nothing is decided. What is refused is counted by reason, and logged at most once
per reason and interval; no message is answered.

An engine may give its connection a name (P2P-NCCL: its ZMQ address), and has it again when it returns. If
its host was lost the old connection still looks open here: the new one takes the name over, and peers that
don't answer pings are let go.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

import structlog
import zmq
import zmq.asyncio

from balancer.core.fleet.registrations import (
    MAX_MESSAGE_BYTES,
    RegistrationBook,
    RegistrationRefusedError,
)
from balancer.core.settings.errors import ConfigError
from balancer.fleet.draining import drain
from indexer.core.throttle import Throttle

_LOG_INTERVAL_S = 10.0
_TURN_S = 0.5
"""How often time is let pass, at least."""
_PING_S = 10.0
_UNANSWERED = 3
"""Pings without an answer after which a connection is let go."""

_logger = structlog.stdlib.get_logger(__name__)


class RegistrationService:
    """One port. `run` ends only by cancellation or a bug."""

    def __init__(
        self,
        book: RegistrationBook,
        *,
        bind: str,
        port: int,
        clock: Callable[[], float],
        on_change: Callable[[], None],
        ping_s: float = _PING_S,
    ) -> None:
        """Listen at once. Raises ConfigError if the port can't be had."""
        self.refused: Counter[str] = Counter()
        self.heard = 0
        self._book = book
        self._clock = clock
        self._on_change = on_change
        self._throttle = Throttle(_LOG_INTERVAL_S)
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.IPV6, 1)
        self._socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.set(zmq.ROUTER_HANDOVER, 1)
        self._socket.set(zmq.HEARTBEAT_IVL, int(ping_s * 1000))
        self._socket.set(zmq.HEARTBEAT_TIMEOUT, int(ping_s * 1000 * _UNANSWERED))
        host = f"[{bind}]" if ":" in bind else bind
        try:
            self._socket.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"`registration.port`: {bind}:{port}: {error.strerror}") from error
        endpoint = self._socket.get_string(zmq.LAST_ENDPOINT)
        self.port = int(endpoint.rpartition(":")[2])

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()

    async def run(self) -> None:
        """Take messages, and let time pass, until cancelled."""
        plain: zmq.Socket[bytes] = zmq.Socket.shadow(self._socket.underlying)
        while True:
            await self._socket.poll(int(_TURN_S * 1000))
            changes = [self._take(frames) for frames in drain(plain)]
            if self._book.on_time(self._clock()) or any(changes):
                self._on_change()
            await asyncio.sleep(0)  # whoever floods this port gets no more than a share

    def _take(self, frames: Sequence[bytes]) -> bool:
        """One message: identity, perhaps an empty frame, payload."""
        self.heard += 1
        try:
            if len(frames) not in {2, 3}:
                raise RegistrationRefusedError("frames")  # noqa: TRY301
            return self._book.on_message(frames[-1], self._clock())
        except RegistrationRefusedError as error:
            self.refused[error.reason] += 1
            if self._throttle.admits(error.reason, self._clock()):
                _logger.warning("registration_refused", reason=error.reason)
            return False
