"""A fleet keeper that probes, and a way to wait for what it sees."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

from balancer.core.fleet.snapshot import Fleet, Instance
from balancer.core.fleet.transfer_facts import Inquiry
from balancer.core.settings.control import InstanceSettings, ProbeSettings
from balancer.fleet.engine_client import EngineClient
from balancer.fleet.keeper import FleetKeeper

FAST = ProbeSettings(interval_s=0.02, timeout_s=5.0, unhealthy_after=2)


@pytest.fixture
def keeping() -> Callable[..., AbstractAsyncContextManager[FleetKeeper]]:
    """A keeper that probes while the block runs."""

    @asynccontextmanager
    async def run(
        *instances: InstanceSettings,
        settings: ProbeSettings = FAST,
        keys: dict[Any, str] | None = None,
        inquiry: Callable[[Instance], Inquiry | None] = lambda _: None,
        on_change: Callable[[Fleet], None] | None = None,
    ) -> AsyncIterator[FleetKeeper]:
        async with EngineClient(api_keys=keys or {}, timeout_s=5.0) as client:
            keeper = FleetKeeper(
                instances, prober=client, settings=settings, inquiry=inquiry, on_change=on_change
            )
            async with asyncio.TaskGroup() as group:
                running = group.create_task(keeper.run())
                yield keeper
                running.cancel()

    return run


@pytest.fixture
def wait() -> Callable[[FleetKeeper, Callable[[Instance], object]], Awaitable[Instance]]:
    """Wait until the first instance fulfils `condition`."""

    async def see(keeper: FleetKeeper, condition: Callable[[Instance], object]) -> Instance:
        async with asyncio.timeout(20):
            fleet = await keeper.wait_for(
                lambda fleet: bool(fleet.instances) and bool(condition(fleet.instances[0]))
            )
        return fleet.instances[0]

    return see
