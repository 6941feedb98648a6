"""Live ports: one socket, one or more ranks behind it, and who gets which message.

Rules:

1. Where we connect to an engine's socket the connection is the identity: the topic is ignored.
   The same goes for a port that we bind for one rank alone.
2. On a port that several ranks share, the topic names the rank. A topic nobody has is counted and
   dropped. Whose connection came or went there nobody tells, so it vouches for nobody: a lost one
   puts every rank of the port in doubt, and each counts as connected once it is heard.
3. A bad message costs that message. A port that can't be opened is tried again for ever.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

import structlog

from indexer.claims import Claims
from indexer.config import Direction, IndexerConfig, RankSource
from indexer.core.frames import FrameError, parse_live
from indexer.core.rank_status import PortStatus
from indexer.core.throttle import Throttle
from indexer.sockets import Frames, LiveSocket, SocketError, ZmqContext

_logger = structlog.get_logger(__name__)

_RETRY_S = 1.0


class Listener(Protocol):
    """One rank, as a port sees it."""

    async def on_live(self, seq: int, payload: bytes) -> None: ...
    async def on_connection(self, *, is_up: bool) -> None: ...
    async def on_some_connection(self, *, is_up: bool) -> None:
        """Of a port that others share: perhaps this rank's."""
        ...

    def on_rejected(self, reason: str) -> None: ...


class TopicTakenError(SocketError):
    """Two ranks claim the same messages of one port."""


class LivePort:
    """Owns a live socket while `run` runs."""

    def __init__(
        self,
        endpoint: str,
        *,
        direction: Direction,
        config: IndexerConfig,
        context: ZmqContext,
        clock: Callable[[], float],
    ) -> None:
        self.endpoint = endpoint
        self.rejected: Counter[str] = Counter()
        """Messages that belong to no rank, by reason."""
        self.problem: str | None = None
        """Why the port is not open."""
        self._direction = direction
        self._config = config
        self._context = context
        self._clock = clock
        self._throttle = Throttle(config.log_interval_s)
        self._routes: dict[str | None, Listener] = {}
        self._peers = 0

    @property
    def status(self) -> PortStatus:
        return PortStatus(
            endpoint=self.endpoint,
            topics=tuple(self._routes),
            is_connected=self._peers > 0,
            problem=self.problem,
            rejected=dict(self.rejected),
        )

    @property
    def _is_shared(self) -> bool:
        is_meant_to_be = self.endpoint == self._config.shared_bind
        return self._direction == "bind" and (is_meant_to_be or len(self._routes) > 1)

    @property
    def is_unused(self) -> bool:
        return not self._routes

    async def add(self, topic: str | None, listener: Listener) -> None:
        """From now on `listener` gets the messages under `topic`. Raises TopicTakenError."""
        if topic in self._routes:
            raise TopicTakenError(f"{self.endpoint}: two ranks share the topic {topic!r}")
        self._routes[topic] = listener
        if self._peers:
            await self._tell(listener, is_up=True)

    def remove(self, topic: str | None) -> None:
        self._routes.pop(topic, None)

    async def run(self) -> None:
        """Move messages until cancelled."""
        while True:
            try:
                with LiveSocket(
                    self.endpoint,
                    direction=self._direction,
                    high_water=self._config.receive_high_water,
                    context=self._context,
                ) as socket:
                    self.problem = None
                    await self._listen(socket)
            except SocketError as error:
                self.problem = str(error)
                self._warn("live_port_not_opened", error=self.problem)
                await asyncio.sleep(_RETRY_S)
            finally:
                self._peers = 0

    async def _listen(self, socket: LiveSocket) -> None:
        while True:
            await socket.wait()
            messages = socket.take_messages()
            has_lost = False
            for is_up in socket.take_connections():
                # A connection that fails in its handshake goes without ever having come.
                self._peers = self._peers + 1 if is_up else max(0, self._peers - 1)
                has_lost = has_lost or not is_up
                await self._tell_all(is_up=is_up)
            for frames in messages:
                await self._forward(frames)
            if has_lost and messages and self._is_shared:
                await self._tell_all(is_up=False)  # they may have been the last words of who went

    async def _tell_all(self, *, is_up: bool) -> None:
        for listener in tuple(self._routes.values()):
            await self._tell(listener, is_up=is_up)

    async def _tell(self, listener: Listener, *, is_up: bool) -> None:
        if self._is_shared:
            await listener.on_some_connection(is_up=is_up)
        else:
            await listener.on_connection(is_up=is_up)

    async def _forward(self, frames: Frames) -> None:
        only = next(iter(self._routes.values())) if len(self._routes) == 1 else None
        try:
            batch = parse_live(frames)
        except FrameError as error:
            self._reject(error.reason, only)
            return
        listener = self._routes.get(batch.topic.decode(errors="replace"))
        if listener is None and (only is not None or not batch.topic):
            listener = self._routes.get(None)
        if listener is None:
            self._reject("unmapped_topic", None)
            return
        await listener.on_live(batch.seq, batch.payload)

    def _reject(self, reason: str, listener: Listener | None) -> None:
        if listener is not None:
            listener.on_rejected(reason)
        else:
            self.rejected[reason] += 1
        self._warn("message_rejected", reason=reason)

    def _warn(self, event: str, **fields: str) -> None:
        if self._throttle.admits((event, fields.get("reason")), self._clock()):
            _logger.warning(event, endpoint=self.endpoint, **fields)


class Ports:
    """Opens a port for a rank for as long as it is followed; ranks share the ones we bind."""

    def __init__(
        self,
        *,
        config: IndexerConfig,
        context: ZmqContext,
        clock: Callable[[], float],
        group: asyncio.TaskGroup,
    ) -> None:
        """Bound ports run in `group`."""
        self.claims = Claims()
        self._config = config
        self._context = context
        self._clock = clock
        self._group = group
        self._bound: dict[str, tuple[LivePort, asyncio.Task[None]]] = {}

    def status(self) -> Sequence[PortStatus]:
        """Ports that we bind."""
        return [port.status for port, _ in self._bound.values()]

    @asynccontextmanager
    async def listening(self, source: RankSource, listener: Listener) -> AsyncIterator[LivePort]:
        """Messages of `source` go to `listener`. Raises TopicTakenError."""
        if source.direction == "connect":
            port = self._new_port(source)
            await port.add(source.topic, listener)
            async with asyncio.TaskGroup() as group:
                running = group.create_task(port.run())
                yield port
                running.cancel()
            return
        port = self._bound_port(source)
        await port.add(source.topic, listener)
        try:
            yield port
        finally:
            port.remove(source.topic)
            if port.is_unused:
                _, running = self._bound.pop(port.endpoint)
                running.cancel()

    def _new_port(self, source: RankSource) -> LivePort:
        return LivePort(
            source.events,
            direction=source.direction,
            config=self._config,
            context=self._context,
            clock=self._clock,
        )

    def _bound_port(self, source: RankSource) -> LivePort:
        opened = self._bound.get(source.events)
        if opened is None:
            port = self._new_port(source)
            opened = port, self._group.create_task(self._keep_open(port))
            self._bound[source.events] = opened
        return opened[0]

    async def _keep_open(self, port: LivePort) -> None:
        """Run a bound port; a bug in it costs its peers a reconnect, not the service."""
        while True:
            try:
                await port.run()
            except Exception:
                _logger.exception("live_port_failed", endpoint=port.endpoint)
                await asyncio.sleep(_RETRY_S)
