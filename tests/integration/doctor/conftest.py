"""Simulated engines, what an operator tells of them, and the doctor's diagnosis."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
import pytest

from kvlb.doctor.core.examination import examine
from kvlb.doctor.core.facts import FleetFacts
from kvlb.doctor.core.findings import Finding
from kvlb.doctor.gather import Patience, gather_facts
from kvlb.settings import KvlbSettings, Overrides, load_settings
from kvlb.simulated import parse_fleet, simulated_fleet
from simulator.core.settings import EngineSettings
from simulator.service import RunningEngine

QUICK = Patience(connect_s=1.0, event_s=1.0, replay_s=0.5)
IDLE_S = 0.1
"""Our pool's keep-alive in these tests: as long as a healthy engine is waited for."""


@pytest.fixture
def told() -> Callable[..., KvlbSettings]:
    """Settings as the command reads them, with a short keep-alive."""

    def read(*instances: str, keep_alive_s: float = IDLE_S, **changes: Any) -> KvlbSettings:
        settings = load_settings(None, Overrides(instances=instances), {})
        dataplane = msgspec.structs.replace(settings.dataplane, keep_alive_s=keep_alive_s)
        return msgspec.structs.replace(settings, dataplane=dataplane, **changes)

    return read


@pytest.fixture
def engines() -> Callable[..., AbstractAsyncContextManager[list[RunningEngine]]]:
    """Simulated fleets, each with settings of its own; `async with` is all their engines."""

    @asynccontextmanager
    async def start(*fleets: tuple[str, EngineSettings]) -> AsyncIterator[list[RunningEngine]]:
        async with AsyncExitStack() as stack:
            running: list[RunningEngine] = []
            for spec, settings in fleets:
                fleet = await stack.enter_async_context(
                    simulated_fleet(parse_fleet(spec), settings)
                )
                running += fleet.engines
            yield running

    return start


@pytest.fixture
def diagnose() -> Callable[..., Awaitable[tuple[FleetFacts, list[Finding]]]]:
    """What is gathered of a fleet, and what is found of it."""

    async def examined(settings: KvlbSettings, **options: Any) -> tuple[FleetFacts, list[Finding]]:
        facts = await gather_facts(settings, nonce="test", patience=QUICK, **options)
        return facts, examine(facts)

    return examined
