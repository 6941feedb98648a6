"""`python -m benchmarks.peers [--quick]`: every router in turn, tables on stdout.

Loopback only. About an hour and a half, `--quick` twenty minutes. Each repetition is sent through every
router before the next one begins, and begins with another router.
"""

import argparse
import os
import platform
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import product
from pathlib import Path

import msgspec

from benchmarks.overhead.proxies import Proxy
from benchmarks.peers.cells import Cell, measure
from benchmarks.peers.engines import ENGINES, EngineProcess, running_engines
from benchmarks.peers.play import write_script
from benchmarks.peers.report import render
from benchmarks.peers.routers import routers
from benchmarks.peers.sizes import SIZES, first_calls
from benchmarks.peers.virtual import REPEATS as REPEATS_VIRTUALLY
from benchmarks.peers.virtual import run_virtually
from kvlb.bench.saturation import SATURATION
from kvlb.bench.workloads import WORKLOADS

REPEATS = 3
LOAD = 0.85


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured."""

    workloads: Sequence[str]
    only: str
    repeats: int
    is_quick: bool
    calls: int | None
    """Of each workload; None: as `SIZES` says."""
    load: float
    slowdown: float | None


def main() -> None:
    """Measure and print."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started is stopped
    options = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    options.add_argument("--quick", action="store_true", help="one repetition of fewer calls")
    options.add_argument("--workloads", nargs="+", choices=SIZES, default=list(SIZES))
    options.add_argument("--only", default="", help="of the routers, those whose name holds this")
    options.add_argument("--repeats", type=int, help=f"{REPEATS} if not said, with --quick 1")
    options.add_argument("--calls", type=int, help="of each workload; whole sessions")
    options.add_argument("--load", type=float, default=LOAD, help="share of saturation")
    options.add_argument("--slowdown", type=float, help="of engines and calls; for slow machines")
    options.add_argument("--out", type=Path, help="every cell as a line of JSON, as it is measured")
    options.add_argument("--tables", type=Path, help="no measurement: tables of such a file")
    options.add_argument(
        "--virtual", action="store_true", help="in virtual time: decisions, not programs"
    )
    asked = options.parse_args()
    if asked.tables is not None:
        decoder = msgspec.json.Decoder(Cell)
        lines = asked.tables.read_text().splitlines()
        print(render([decoder.decode(line) for line in lines], {}, []))
        return
    if asked.virtual:
        repeats = asked.repeats or REPEATS_VIRTUALLY
        found = list(run_virtually(asked.workloads, repeats, asked.load, asked.calls))
        print(render(found, {}, [f"Virtual time, {repeats} repetitions, load {asked.load:.0%}."]))
        return
    plan = Plan(
        workloads=asked.workloads,
        only=asked.only,
        repeats=asked.repeats or (1 if asked.quick else REPEATS),
        is_quick=asked.quick,
        calls=asked.calls,
        load=asked.load,
        slowdown=asked.slowdown,
    )
    begun_s = time.monotonic()
    missing: dict[str, str] = {}
    cells = []
    for cell in run(plan, missing):
        cells.append(cell)
        if asked.out is not None:
            with asked.out.open("ab") as file:
                file.write(msgspec.json.encode(cell) + b"\n")
    print(render(cells, missing, _notes(plan, time.monotonic() - begun_s)))


def run(plan: Plan, missing: dict[str, str]) -> Iterator[Cell]:
    """Every cell, as it is measured; why routers are left out goes into `missing`."""
    with running_engines() as engines:
        for repeat, workload in product(range(plan.repeats), plan.workloads):
            settings = WORKLOADS[workload].engine
            present = [
                each
                for each in routers(settings.model, settings.block_size)
                if plan.only in each.name and _is_present(each, missing)
            ]
            first = repeat % len(present) if present else 0
            for router in (*present[first:], *present[:first]):
                print(f"repetition {repeat + 1}, {workload}, {router.name} ...", file=sys.stderr)
                try:
                    yield _measure(plan, router, engines, workload, repeat)
                except RuntimeError as error:
                    missing[router.name] = str(error)


def _is_present(router: Proxy, missing: dict[str, str]) -> bool:
    if router.name not in missing and (why := router.missing()):
        missing[router.name] = why
    return router.name not in missing


def _measure(
    plan: Plan, router: Proxy, engines: Sequence[EngineProcess], workload: str, repeat: int
) -> Cell:
    size = SIZES[workload]
    settings = WORKLOADS[workload].engine
    speed = plan.load * SATURATION[workload, ENGINES]
    limit = plan.calls or (size.quick_calls if plan.is_quick else size.calls)
    script = write_script(
        first_calls(WORKLOADS[workload].calls(ENGINES, speed, repeat), limit),
        model=settings.model,
        block_size=settings.block_size,
        takes_ids=router.takes_ids,
        seed=repeat,
        slowdown=plan.slowdown or size.slowdown,
    )
    return measure(router, engines, settings, script, workload=workload, repeat=repeat)


def _notes(plan: Plan, took_s: float) -> list[str]:
    sizes = ", ".join(
        f"{name} {plan.slowdown or SIZES[name].slowdown:g}" for name in plan.workloads
    )
    machine = (
        f"{datetime.now(UTC):%Y-%m-%d}, {platform.system()} {platform.machine()}, {os.cpu_count()} "
        f"cores shared by client, router and {ENGINES} engines, Python {platform.python_version()}"
    )
    return [
        f"{machine}; {plan.repeats} repetition(s), {took_s / 60:.0f} minutes.",
        f"Load {plan.load:.0%} of saturation (`kvlb.bench.saturation`). Slowdown: {sizes}.",
    ]


if __name__ == "__main__":
    main()
