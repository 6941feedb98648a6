"""One life of one simulated engine: its servers, sockets and tasks, opened and closed as one.

Rule: `end` leaves nothing open, at any moment and whatever was interrupted before. A ZMQ socket
left open would keep its context, and so the whole process, from ever ending.
"""

import asyncio
import socket

from simulator.application import BootstrapApplication, EngineApplication
from simulator.engine import SimulatedEngine, Surroundings
from simulator.http_server import HttpServer
from simulator.ports import Ports, listen

RenderedSources = dict[str, dict[str, object]]
"""What /kv_event_sources says, by rank."""


class EngineLife:
    """Begins once, ends once."""

    def __init__(self, engine: SimulatedEngine, surroundings: Surroundings, ports: Ports) -> None:
        self.engine = engine
        self._settings = engine.settings
        self._surroundings = surroundings
        self._ports = ports
        self._servers: list[tuple[HttpServer, int]] = []
        self._side_channels: list[socket.socket] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def begin(self, group: asyncio.TaskGroup, sources: RenderedSources) -> None:
        """Open everything, or nothing if anything can't be had."""
        try:
            await self._open(sources)
        except BaseException:
            self.end()
            raise
        for rank in self.engine.ranks:
            self._tasks.append(group.create_task(rank.run()))
            self._tasks.append(group.create_task(rank.publisher.run_replay()))

    async def die(self) -> None:
        """Cut the connections, stop computing, and wait until that is so."""
        try:
            for server, _ in self._servers:
                await server.stop()
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)
        finally:
            self.end()

    def end(self) -> None:
        """Close what is open without waiting for anybody; a second time does nothing."""
        for task in self._tasks:
            task.cancel()
        for server, _ in self._servers:
            server.close()
        for channel in self._side_channels:
            channel.close()
        self._tasks, self._servers, self._side_channels = [], [], []
        self.engine.close()

    def freeze(self) -> None:
        for server, _ in self._servers:
            server.freeze()
        for rank in self.engine.ranks:
            rank.freeze()

    def thaw(self) -> None:
        for server, _ in self._servers:
            server.thaw()
        for rank in self.engine.ranks:
            rank.thaw()

    async def cut_off(self) -> None:
        for server, _ in self._servers:
            await server.cut_off()

    async def connect(self) -> None:
        for server, port in self._servers:
            await server.start(listen(self._surroundings.host, port))

    def cut(self) -> None:
        for server, _ in self._servers:
            server.cut()

    async def _open(self, sources: RenderedSources) -> None:
        # Its address first: whether it can be had says whether there is room for this life at all.
        application = EngineApplication(self.engine, sources)
        listener = listen(self._surroundings.host, self._ports.http)
        try:
            if self._settings.kv_connector:
                self._listen_for_peers()
            if self._settings.events:
                await self._open_publishers()
            await self._serve(application, listener, self._ports.http)
        except BaseException:
            listener.close()
            raise
        if self._has_bootstrap:
            bootstrap = listen(self._surroundings.host, self._ports.bootstrap)
            await self._serve(BootstrapApplication(self.engine), bootstrap, self._ports.bootstrap)

    async def _serve(
        self,
        application: EngineApplication | BootstrapApplication,
        listener: socket.socket,
        port: int,
    ) -> None:
        server = HttpServer(application, keep_alive_s=self._settings.keep_alive_s)
        self._servers.append((server, port))
        await server.start(listener)

    @property
    def _has_bootstrap(self) -> bool:
        """Mooncake: a server that tells a prefill engine's ids."""
        return self._settings.kv_connector == "mooncake" and self.engine.places.prefills

    def _listen_for_peers(self) -> None:
        """Accept connections to the side channels; blocks go another way here."""
        for rank in range(self._settings.dp_size):
            channel = listen(self._surroundings.host, self._ports.side_channel + rank)
            self._side_channels.append(channel)
            channel.listen()

    async def _open_publishers(self) -> None:
        settings, host, taken = self._settings, self._surroundings.host, set[int]()
        first_replay_port = self._ports.replay_of(settings)
        for index, rank in enumerate(self.engine.ranks):
            events_port = self._ports.events + index
            replay_port = first_replay_port + index if settings.replay else None
            if not taken.isdisjoint({events_port, replay_port}):
                continue
            taken.update({events_port} if replay_port is None else {events_port, replay_port})
            if settings.events_host == "*":
                await rank.publisher.listen(host, events_port)
            else:
                rank.publisher.dial(settings.events_host, events_port)
            if replay_port is not None:
                await rank.publisher.offer_replay(host, replay_port)
