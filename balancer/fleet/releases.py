"""Asks for the releases of engines that may have to announce again what they reuse."""

import asyncio
from collections.abc import Callable
from typing import Final

from balancer.core.control_errors import EngineCallError
from balancer.core.routing.full_reports import FullReports
from balancer.fleet.engine_client import EngineClient

_INTERVAL_S: Final = 1.0


async def run_releases(
    full_reports: FullReports, engines: EngineClient, clock: Callable[[], float]
) -> None:
    """Until cancelled."""
    while True:
        await asyncio.sleep(_INTERVAL_S)
        for instance in full_reports.take_unknown():
            try:
                release = await engines.find_release(instance)
            except EngineCallError:
                continue  # it is put down again with the next request
            full_reports.learn(instance, release, clock())
