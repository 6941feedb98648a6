"""Runs one scenario: engines in this process, `kvlb up` in another, clients over loopback."""

import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import yaml

from benchmarks.chaos.client import Outcome, send
from benchmarks.chaos.judge import FleetEnd, Verdict, judge
from benchmarks.chaos.machine import STARVED, watch_machine
from benchmarks.chaos.requests import Ask, draw_requests
from benchmarks.chaos.scenario import DEADLINE_S, FLEET, Scenario
from benchmarks.chaos.schedule import Fault, draw_faults
from simulator.life_counts import LifeCounts
from simulator.service import FleetSpec, RunningFleet, running_fleet

READY_S = 30.0
SETTLE_S = 4.0
_POLL_S = 0.05
_CONNECTIONS = 256
_KEPT_CONNECTIONS = 16
_END_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One scenario, played."""

    scenario: Scenario
    faults: Sequence[Fault]
    verdict: Verdict
    took_s: float
    starved: int
    """How often the machine kept this process from running for a while."""


async def play(scenario: Scenario, folder: Path) -> Run:
    """Play one scenario; the balancer's log is left in `folder`."""
    began_s = time.monotonic()
    async with running_fleet(FleetSpec.parse(FLEET), engine=scenario.engine()) as fleet:
        roles = _roles(fleet)
        chance = random.Random(scenario.seed)  # noqa: S311 - a schedule, no secret
        faults = draw_faults(chance, roles, scenario.duration_s)
        asks = draw_requests(
            chance,
            scenario.seed,
            scenario.requests,
            scenario.rate_per_s,
            spares_storage=scenario.connector == "example",
        )
        async with _balancer(scenario, fleet, folder) as (url, pid):
            outcomes = await _ask_all(url, asks, fleet, faults, (os.getpid(), pid))
            end = replace(
                await _settle(fleet, scenario.lease_s + SETTLE_S), legs_left=await _legs_left(url)
            )
        return Run(
            scenario=scenario,
            faults=faults,
            verdict=judge(outcomes, fleet.history, end, scenario.needed(roles)),
            took_s=time.monotonic() - began_s,
            starved=sum(each.what == STARVED for each in fleet.history.changes)
            // len(fleet.engines),
        )


def _roles(fleet: RunningFleet) -> dict[str, list[str]]:
    roles: dict[str, list[str]] = {}
    for engine in fleet.engines:
        roles.setdefault(engine.role, []).append(engine.name)
    return roles


@asynccontextmanager
async def _balancer(
    scenario: Scenario, fleet: RunningFleet, folder: Path
) -> AsyncIterator[tuple[str, int]]:
    """`kvlb up` as its operator would run it: its address and process, once it knows all engines."""
    file = folder / f"seed-{scenario.seed}.yaml"
    file.write_text(yaml.safe_dump(scenario.settings(fleet.engines)))
    with (folder / f"seed-{scenario.seed}.log").open("w") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvlb", "up", "--config", str(file), "--port", "0"),
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env={**os.environ, "COLUMNS": "200", "PYTHONUNBUFFERED": "1"},
        )
        try:
            url = await _listening(process)
            await _until_ready(url, len(fleet.engines))
            yield url, process.pid
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(_END_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()


async def _listening(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None  # noqa: S101 - it was asked for
    async with asyncio.timeout(READY_S):
        async for line in process.stdout:
            found = [word for word in line.decode().split() if word.startswith("http://")]
            if b"listens on" in line and found:
                return found[0].rstrip(".,")
    raise RuntimeError("the balancer ended before it listened; its log says why")


async def _until_ready(url: str, engines: int) -> None:
    async with asyncio.timeout(READY_S), httpx.AsyncClient(trust_env=False) as http:
        while True:
            instances = (await http.get(f"{url}/status")).json()["instances"]
            if sum(bool(each["healthy"]) for each in instances) == engines:
                return
            await asyncio.sleep(_POLL_S)


async def _ask_all(
    url: str,
    asks: Sequence[Ask],
    fleet: RunningFleet,
    faults: Sequence[Fault],
    pids: Sequence[int],
) -> list[Outcome]:
    limits = httpx.Limits(max_connections=_CONNECTIONS, max_keepalive_connections=_KEPT_CONNECTIONS)
    began_s = time.monotonic()
    async with (
        httpx.AsyncClient(base_url=url, trust_env=False, timeout=None, limits=limits) as http,  # noqa: S113 - each request has its deadline
        asyncio.TaskGroup() as group,
    ):
        watch = group.create_task(watch_machine(fleet, pids))
        befalling = [group.create_task(_befall(fleet, each, began_s)) for each in faults]
        tasks = [group.create_task(_ask_at(http, ask, began_s)) for ask in asks]
        await asyncio.wait([*befalling, *tasks])
        watch.cancel()
    return [task.result() for task in tasks]


async def _ask_at(http: httpx.AsyncClient, ask: Ask, began_s: float) -> Outcome:
    await asyncio.sleep(began_s + ask.at_s - time.monotonic())
    return await send(http, ask, time.monotonic, DEADLINE_S)


async def _befall(fleet: RunningFleet, fault: Fault, began_s: float) -> None:
    engine = next(each for each in fleet.engines if each.name == fault.engine)
    await asyncio.sleep(began_s + fault.at_s - time.monotonic())
    match fault.kind:
        case "kill":
            await fleet.stop(engine)
            await asyncio.sleep(fault.lasts_s)
            await fleet.start(engine)
        case "restart":
            await fleet.restart(engine)
        case "hang":
            engine.freeze()
            await asyncio.sleep(fault.lasts_s)
            engine.thaw()
        case "cut_off":
            await engine.cut_off()
            await asyncio.sleep(fault.lasts_s)
            await engine.connect()
        case "cut":
            engine.cut()


async def _settle(fleet: RunningFleet, limit_s: float) -> FleetEnd:
    """Wait until nothing is left, at most until every lease is over."""
    until_s = time.monotonic() + limit_s
    end = _end_of(fleet)
    while (end.stranded or end.held_share) and time.monotonic() < until_s:
        await asyncio.sleep(_POLL_S)
        end = _end_of(fleet)
    return end


async def _legs_left(url: str) -> int:
    async with httpx.AsyncClient(trust_env=False) as http:
        instances = (await http.get(f"{url}/status")).json()["instances"]
    return sum(rank["load"]["requests"] for each in instances for rank in each["ranks"])


def _end_of(fleet: RunningFleet) -> FleetEnd:
    ranks = [rank for engine in fleet.engines for rank in engine.engine.ranks]
    for rank in ranks:
        rank.core.expire(time.monotonic())
    loads = [rank.core.load() for rank in ranks]
    left = sum(rank.in_flight for rank in ranks) + sum(each.open_reservations for each in loads)
    return FleetEnd(
        counts=sum((each.counts for each in fleet.engines), LifeCounts()),
        stranded=left,
        held_share=max(each.cache_usage for each in loads),
    )
