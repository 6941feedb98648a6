"""Simulated engines, one process each, that are restarted between measurements.

Each one looks every 20 ms how late it looks: an engine that doesn't get its share of a core isn't as
fast as it claims, and what is measured on it says nothing of routers.
"""

import asyncio
import multiprocessing
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.overhead.engine import EngineAddress
from kvlb.demo.counters import count_fleet
from kvlb.demo.report import EngineCounts
from kvlb.replay.core.outcomes import spread
from simulator.core.settings import EngineSettings
from simulator.service import FleetSpec, RunningEngine, running_fleet

ENGINES = 4
ANSWER_S = 60.0
LOOK_S = 0.02


class EngineProcess:
    """One engine in a process of its own."""

    def __init__(self, number: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_run_engine, args=(theirs,), daemon=True)
        self._process.start()
        ports: tuple[int, int, int] = self._receive()
        self.address = EngineAddress(http=ports[0], events=ports[1], replay=ports[2], number=number)

    def restart(self, settings: EngineSettings) -> None:
        """A new life on the same ports: an empty cache, counters at 0, perhaps another model."""
        self._pipe.send(settings)
        self._receive()

    def late_p99_s(self) -> float:
        """Since it was restarted."""
        self._pipe.send(None)
        late_s: list[float] = self._receive()
        found = spread(late_s)
        return found.p99 if found else 0.0

    def counts(self) -> EngineCounts:
        """Of its life, from its own /metrics."""
        with urllib.request.urlopen(f"{self.address.url}/metrics", timeout=ANSWER_S) as answer:  # noqa: S310 - ours
            return count_fleet([answer.read().decode()], [])

    def stop(self) -> None:
        self._process.terminate()
        self._process.join()

    def _receive(self) -> Any:
        if not self._pipe.poll(ANSWER_S):
            raise RuntimeError("a simulated engine doesn't answer")
        return self._pipe.recv()


@contextmanager
def running_engines() -> Iterator[Sequence[EngineProcess]]:
    """Four of them, until the block ends."""
    with ExitStack() as stack:
        engines = []
        for number in range(ENGINES):
            engine = EngineProcess(number)
            stack.callback(engine.stop)
            engines.append(engine)
        yield engines


def _run_engine(pipe: Connection) -> None:
    asyncio.run(_serve(pipe))


async def _serve(pipe: Connection) -> None:
    late_s: list[float] = []
    async with running_fleet(FleetSpec(("mixed",))) as fleet, asyncio.TaskGroup() as group:
        group.create_task(_watch_lateness(late_s))
        (engine,) = fleet.engines
        pipe.send(_ports(engine))
        while True:
            settings = await asyncio.to_thread(pipe.recv)
            if settings is None:
                pipe.send(late_s)
                continue
            await fleet.restart(engine, settings)
            late_s.clear()
            pipe.send(_ports(engine))


async def _watch_lateness(late_s: list[float]) -> None:
    while True:
        due_s = time.monotonic() + LOOK_S
        await asyncio.sleep(LOOK_S)
        late_s.append(time.monotonic() - due_s)


def _ports(engine: RunningEngine) -> tuple[int, ...]:
    endpoints = (engine.url, engine.events_endpoint, engine.replay_endpoint or "")
    return tuple(int(each.rpartition(":")[2]) for each in endpoints)
