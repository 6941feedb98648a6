"""Starts fleets of simulated engines in this process: `async with running_fleet(spec, ...)`."""

import asyncio
import random
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, Self

import msgspec
import zmq.asyncio

from simulator.core.errors import SettingsError
from simulator.core.event_faults import EventFaults
from simulator.core.history import Condition, FleetHistory
from simulator.core.settings import EngineSettings
from simulator.core.transfer import TransferDirectory
from simulator.engine import Places, SimulatedEngine, Surroundings
from simulator.life import EngineLife, RenderedSources
from simulator.life_counts import LifeCounts
from simulator.ports import Ports, choose_ports, find_free_ports

Role = Literal["prefill", "decode", "mixed", "encode"]

_ROLES: dict[str, Role] = {"p": "prefill", "d": "decode", "m": "mixed", "e": "encode"}
_LARGEST_FLEET = 256


@dataclass(frozen=True, slots=True)
class FleetSpec:
    """How many engines of which role, e.g. `2p2d`, `4`, `1p1d2m` or `1e1p1d`."""

    roles: tuple[Role, ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a spec; a plain number is that many mixed engines."""
        cleaned = text.strip().lower()
        if cleaned.isdecimal():
            cleaned += "m"
        if not re.fullmatch(r"(\d{1,3}[pdme])+", cleaned):
            raise SettingsError(f"{text!r} is not a fleet; write e.g. 4, 2p2d, 1p1d2m or 1e1p1d")
        counts = re.findall(r"(\d+)([pdme])", cleaned)
        roles = tuple(_ROLES[letter] for count, letter in counts for _ in range(int(count)))
        if not 0 < len(roles) <= _LARGEST_FLEET:
            raise SettingsError(f"{text!r}: a fleet has 1 to {_LARGEST_FLEET} engines")
        return cls(roles)

    @property
    def needs_transfer(self) -> bool:
        """Whether blocks go from one engine to another."""
        return any(role in {"prefill", "decode"} for role in self.roles)


class RunningEngine:
    """One engine of a fleet: where it is, and how to stop and restart it."""

    def __init__(
        self,
        name: str,
        role: Role,
        settings: EngineSettings,
        ports: Ports,
        surroundings: Surroundings,
    ) -> None:
        self.name = name
        self.role: Role = role
        self.settings = settings
        self._ports = ports
        self._surroundings = surroundings
        self._life: EngineLife | None = None
        self._past = LifeCounts()

    @property
    def url(self) -> str:
        return f"http://{self._surroundings.dialable_host}:{self._ports.http}"

    @property
    def bootstrap_port(self) -> int:
        """Mooncake: where a prefill engine's bootstrap server listens."""
        return self._ports.bootstrap

    @property
    def side_port(self) -> int:
        """NIXL, offloading: of the first rank's side channel."""
        return self._places.side_port

    @property
    def ec_zmq_addrs(self) -> tuple[str, ...]:
        """Where each rank receives what encode engines push."""
        if self.settings.ec_connector != "mooncake" or self.role == "encode":
            return ()
        host, port = self._surroundings.dialable_host, self._ports.side_channel
        return tuple(f"tcp://{host}:{port + rank}" for rank in range(self.settings.dp_size))

    @property
    def zmq_address(self) -> str:
        """MoRI-IO, P2P-NCCL: as it would register itself."""
        host, port = self._surroundings.dialable_host, self.side_port
        if self.settings.kv_connector == "p2p_nccl":
            return f"{host}:{port}"
        return f"host:{host},handshake:{port},notify:{port}"

    @property
    def _places(self) -> Places:
        return Places(
            name=self.name,
            side_port=self._ports.side_channel,
            prefills=self.role == "prefill",
            decodes=self.role == "decode",
            encodes=self.role == "encode",
            ec_address=f"{self._surroundings.dialable_host}:{self._ports.side_channel}",
            ec_zmq_addrs=self.ec_zmq_addrs,
            bootstrap_url=f"http://{self._surroundings.dialable_host}:{self._ports.bootstrap}",
        )

    @property
    def events_endpoint(self) -> str:
        """Where subscribers of rank 0 connect; rank r is r ports further."""
        return f"tcp://{self._surroundings.dialable_host}:{self._ports.events}"

    @property
    def replay_endpoint(self) -> str | None:
        if not self.settings.replay:
            return None
        return f"tcp://{self._surroundings.dialable_host}:{self._ports.replay_of(self.settings)}"

    @property
    def is_running(self) -> bool:
        return self._life is not None

    @property
    def engine(self) -> SimulatedEngine:
        """The engine in its present life; raises RuntimeError while it is stopped."""
        return self._alive.engine

    @property
    def _alive(self) -> EngineLife:
        if self._life is None:
            raise RuntimeError(f"{self.name} is stopped")
        return self._life

    def drop_live_batches(self, every: int | None) -> None:
        """Withhold every k-th event batch from live subscribers until the engine restarts."""
        self.set_event_faults(EventFaults(drop_every=every))

    def set_event_faults(self, faults: EventFaults) -> None:
        """What goes wrong with its events from now on, until the engine restarts."""
        self.engine.set_event_faults(faults)

    async def start(self, group: asyncio.TaskGroup) -> None:
        """Begin a new life: empty caches, sequence numbers from 0, the same ports."""
        engine = SimulatedEngine(self.settings, self._surroundings, self._places)
        life = EngineLife(engine, self._surroundings, self._ports)
        await life.begin(group, self._render_sources())
        self._life = life
        self._note("started", Condition.WELL)

    async def stop(self) -> None:
        """Die as a killed process does: connections are cut, caches are gone."""
        if self._life is None:
            return
        self._note("killed", Condition.DOWN)
        try:
            await self._life.die()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close what is open without waiting, as after a stop that was interrupted."""
        life, self._life = self._life, None
        if life is not None:
            self._past += LifeCounts.of(life.engine)
            life.end()

    def freeze(self) -> None:
        """Hang: connections are accepted, nothing is read, computed or answered."""
        self._note("frozen", Condition.FROZEN)
        self._alive.freeze()

    def thaw(self) -> None:
        """Go on where it hung."""
        self._alive.thaw()
        self._note("thawed", Condition.WELL)

    async def cut_off(self) -> None:
        """Its HTTP is off the network: refused, and what was open is broken. It lives on."""
        self._note("cut_off", Condition.CUT_OFF)
        await self._alive.cut_off()

    async def connect(self) -> None:
        """It is reached again."""
        await self._alive.connect()
        self._note("connected", Condition.WELL)

    def cut(self) -> None:
        """Break every connection that is open at this moment."""
        self._note("cut", Condition.WELL)
        self._alive.cut()

    @property
    def counts(self) -> LifeCounts:
        """Of all its lives."""
        return self._past + LifeCounts.of(None if self._life is None else self._life.engine)

    def _note(self, what: str, condition: Condition) -> None:
        surroundings = self._surroundings
        surroundings.history.note(self.name, what, condition, surroundings.clock())

    def _render_sources(self) -> RenderedSources:
        """What /kv_event_sources says: wildcards for the sockets we listen on, as vLLM does."""
        if not self.settings.events:
            return {}
        return {
            str(rank): {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": f"tcp://{self.settings.events_host}:{self._ports.events + rank}",
                "replay_endpoint": (
                    f"tcp://*:{self._ports.replay_of(self.settings) + rank}"
                    if self.settings.replay
                    else None
                ),
                "buffer_steps": self.settings.buffer_steps,
                "hwm": 100_000,
                "max_queue_size": 100_000,
                "topic": self.settings.topic,
            }
            for rank in range(self.settings.dp_size)
        }


class RunningFleet:
    """Engines that run in this process."""

    def __init__(
        self,
        engines: tuple[RunningEngine, ...],
        group: asyncio.TaskGroup,
        history: FleetHistory | None = None,
    ) -> None:
        self.engines = engines
        self.history = history or FleetHistory()
        self._group = group

    async def stop(self, engine: RunningEngine) -> None:
        """Kill one engine; its ports are refused until it is started again."""
        await engine.stop()

    async def start(self, engine: RunningEngine) -> None:
        """Start a stopped engine on its old ports."""
        await engine.start(self._group)

    async def restart(self, engine: RunningEngine, settings: EngineSettings | None = None) -> None:
        """Kill and start one engine: the same address, a new life; `settings` may name another model."""
        await engine.stop()
        engine.settings = settings or engine.settings
        await engine.start(self._group)


@asynccontextmanager
async def running_fleet(
    spec: FleetSpec,
    *,
    engine: EngineSettings | None = None,
    host: str = "127.0.0.1",
    base_port: int = 0,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[RunningFleet]:
    """Run a fleet until the block ends; `base_port` 0 takes free ports."""
    settings = engine if engine is not None else EngineSettings()
    if spec.needs_transfer and settings.kv_connector is None:
        settings = msgspec.structs.replace(settings, kv_connector="nixl")
    if "encode" in spec.roles and settings.ec_connector is None:
        settings = msgspec.structs.replace(settings, ec_connector="example")
    context = zmq.asyncio.Context()
    surroundings = Surroundings(
        host=host,
        directory=TransferDirectory(),
        context=context,
        clock=clock,
        wall_clock=lambda: datetime.now(UTC).timestamp(),
        randomness=random.SystemRandom(),
    )
    engines = _create_engines(spec, settings, surroundings, base_port)
    try:
        async with asyncio.TaskGroup() as group:
            fleet = RunningFleet(engines, group, surroundings.history)
            surroundings.misfortunes.victims = {each.name: each for each in engines}
            befalling = group.create_task(surroundings.misfortunes.run(group))
            try:
                for one in fleet.engines:
                    await one.start(group)
                yield fleet
            finally:
                befalling.cancel()
                for one in fleet.engines:
                    await one.stop()
    finally:
        # Whoever interrupts the stopping above must not wait for ever here.
        for one in engines:
            one.abandon()
        context.destroy(linger=0)


def _create_engines(
    spec: FleetSpec, settings: EngineSettings, surroundings: Surroundings, base_port: int
) -> tuple[RunningEngine, ...]:
    # One stretch for the whole fleet, so that no two of its engines can pick the same port.
    first_port = base_port or find_free_ports(
        surroundings.host,
        len(spec.roles) * (2 + 3 * settings.dp_size),
        surroundings.randomness,
    )
    numbers = dict.fromkeys(_ROLES.values(), 0)
    engines = []
    for index, role in enumerate(spec.roles):
        name = f"{role[0]}{numbers[role]}"
        numbers[role] += 1
        ports = choose_ports(settings, first_port, index, len(spec.roles))
        own = settings.of_encoder() if role == "encode" else settings
        engines.append(RunningEngine(name, role, own, ports, surroundings))
    return tuple(engines)
