"""Simulated fleets as the commands use them: started with clear errors, shown with their addresses."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvlb.errors import SettingsError
from simulator.core.errors import SettingsError as SimulatorSettingsError
from simulator.core.settings import EngineSettings
from simulator.service import FleetSpec, RunningEngine, RunningFleet, running_fleet


def parse_fleet(text: str) -> FleetSpec:
    """Read `2p2d`, `4`, ... or say what a fleet looks like."""
    try:
        return FleetSpec.parse(text)
    except SimulatorSettingsError as error:
        raise SettingsError(str(error)) from error


@asynccontextmanager
async def simulated_fleet(
    spec: FleetSpec, settings: EngineSettings, *, base_port: int = 0
) -> AsyncIterator[RunningFleet]:
    """Run simulated engines on this machine until the block ends."""
    started = False
    try:
        async with running_fleet(spec, engine=settings, base_port=base_port) as fleet:
            started = True
            yield fleet
    except BaseExceptionGroup as group:
        if started or group.subgroup((OSError, TimeoutError)) is None:
            raise
        last = base_port + 3 * len(spec.roles) - 1
        raise SettingsError(
            f"a port from {base_port} to {last} is in use; choose another --base-port, "
            "or leave it out to take free ones"
        ) from group


def instance_option(engine: RunningEngine) -> str:
    """The `--instance` value that reaches `engine`; its events are found by asking it."""
    role = "" if engine.role == "mixed" else f",role={engine.role}"
    return f"{engine.url}{role},alias={engine.name}"
