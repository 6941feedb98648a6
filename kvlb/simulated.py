"""Simulated fleets as the commands use them: started with clear errors, shown with their addresses."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvlb.errors import SettingsError
from simulator.core.errors import SettingsError as SimulatorSettingsError
from simulator.core.settings import EngineSettings
from simulator.service import FleetSpec, RunningEngine, RunningFleet, running_fleet

FIRST_RELEASE_WITH_SOURCES = (0, 31, 0)
"""`/kv_event_sources` tells an engine's event sockets and ranks since then."""


def parse_fleet(text: str) -> FleetSpec:
    """Read `2p2d`, `4`, ... or say what a fleet looks like."""
    try:
        return FleetSpec.parse(text)
    except SimulatorSettingsError as error:
        raise SettingsError(str(error)) from error


@asynccontextmanager
async def simulated_fleet(
    spec: FleetSpec, settings: EngineSettings, *, host: str = "127.0.0.1", base_port: int = 0
) -> AsyncIterator[RunningFleet]:
    """Run simulated engines in this process until the block ends."""
    if not _is_free(host, 0):
        raise SettingsError(f"{host!r} is no IPv4 address of this machine; give one with --host")
    # HTTP, and for each rank events, replay and side channel.
    ports_per_engine = 1 + 3 * settings.dp_size
    for port in range(base_port, base_port + ports_per_engine * len(spec.roles)):
        if base_port and not _is_free(host, port):
            raise SettingsError(
                f"can't listen on {host}, port {port}; choose another --base-port, "
                "or leave it out to take free ones"
            )
    async with running_fleet(spec, engine=settings, host=host, base_port=base_port) as fleet:
        yield fleet


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        # A port that was served until a moment ago can be listened on again.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError):
            return False
    return True


def instance_option(engine: RunningEngine, connector: str | None = None) -> str:
    """The `--instance` value that reaches `engine`; its events are found by asking it if it tells.

    `connector` is named where it isn't the default.
    """
    parts = [engine.url]
    usual = None if engine.role == "mixed" else "nixl"
    if engine.role != "mixed":
        parts.append(f"role={engine.role}")
    if engine.role == "encode":
        if engine.settings.ec_connector != "example":
            parts.append(f"connector=ec_{engine.settings.ec_connector}")
        return ",".join((*parts, f"alias={engine.name}"))
    if connector not in {None, usual}:
        parts += [f"connector={connector}", *_transfer_parts(engine, connector)]
    if engine.ec_zmq_addrs:
        parts.append(f"ec_zmq_addrs={'+'.join(engine.ec_zmq_addrs)}")
    if not tells_its_sources(engine):
        parts += [f"events={engine.events_endpoint}", f"replay={engine.replay_endpoint}"]
        if engine.settings.dp_size > 1:
            parts.append(f"ranks={engine.settings.dp_size}")
    return ",".join((*parts, f"alias={engine.name}"))


def _transfer_parts(engine: RunningEngine, connector: str | None) -> list[str]:
    """What the engine doesn't tell of its side of transfers."""
    if connector == "mooncake" and engine.role == "prefill":
        return [f"transfer.bootstrap_port={engine.bootstrap_port}"]
    if connector == "offloading":
        return ["transfer.p2p_host=127.0.0.1", f"transfer.p2p_port={engine.side_port}"]
    return []


def tells_its_sources(engine: RunningEngine) -> bool:
    """An older one has to be described."""
    return engine.settings.release >= FIRST_RELEASE_WITH_SOURCES
