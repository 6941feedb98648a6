"""`kvlb bench routing`: what to run, with a progress bar, and what came of it."""

import json
import time
from collections.abc import Sequence
from itertools import pairwise, product
from pathlib import Path

import msgspec
from rich.console import Console

from kvlb.bench.markdown import render_markdown
from kvlb.bench.oracle import OracleJob, OracleResult, search
from kvlb.bench.plots import render_overview, render_page
from kvlb.bench.pool import Task, spread
from kvlb.bench.progress import watched
from kvlb.bench.report import (
    Column,
    Place,
    as_json,
    columns,
    show_column,
    show_oracle,
    show_summary,
)
from kvlb.bench.run import Job, Scenario, run
from kvlb.bench.saturation import SATURATION, find_saturation
from kvlb.errors import SettingsError

PER_CENT = 100
PAGE = "routing-benchmark"
"""Files that `out` gets, whatever they end in."""
FILE_WIDTH = 150
"""Columns of what is printed into a file."""


class BenchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for."""

    workloads: Sequence[str]
    engines: Sequence[int]
    loads: Sequence[int]
    """Per cent of saturation."""
    policies: Sequence[str]
    seeds: int
    first_seed: int = 0
    processes: int = 1
    one_slow: bool = False
    limit: int | None = None
    """Calls of each run, from the first one; None: all."""
    oracle_moves: int = 0
    """Of each search: smallest fleet, highest load, first seed of each workload; 0: no search."""
    out: Path | None = None
    command: str = "kvlb bench routing"
    """To be written onto the page."""


def without_out(arguments: Sequence[str]) -> list[str]:
    """What was asked for, but for the folder: where somebody's results lie is nobody's business."""
    kept: list[str] = []
    for before, each in pairwise(("", *arguments)):
        if before != "--out" and each != "--out" and not each.startswith("--out="):
            kept.append(each)
    return kept


def calibrate(options: BenchOptions, console: Console) -> None:
    """Find what fleets carry, and print it as `saturation` keeps it."""
    places = product(options.workloads, options.engines)
    tasks = [Task(find_saturation, place) for place in places]
    found = watched(tasks, options.processes)
    for (name, engines), speed in found:
        console.print(f'    ("{name}", {engines}): {speed:.4g},', highlight=False)


def bench(options: BenchOptions, console: Console) -> list[Column]:
    """Run all of it, print tables, write files if a folder was named."""
    started_s = time.monotonic()
    places = _places(options)
    tasks = spread(_searches(options, places), _runs(options, places))
    done = list(watched(tasks, options.processes))
    runs = [(job, result) for job, result in done if isinstance(job, Job)]
    found = sorted(
        (result for job, result in done if isinstance(job, OracleJob)),
        key=lambda result: list(places).index(_place(result)),
    )
    measured = columns(places, runs, options.policies)
    for column in measured:
        show_column(column, console)
    show_summary(measured, console)
    show_oracle(found, console)
    took_s = time.monotonic() - started_s
    console.print(f"{len(runs)} runs in {took_s:.0f} s, {options.seeds} seeds.", style="dim")
    if options.out is not None:
        _write(options, measured, found, took_s)
    return measured


def _places(options: BenchOptions) -> dict[Place, float]:
    """Every column, with its speed."""
    places = {}
    for workload, engines, load in product(options.workloads, options.engines, options.loads):
        if (workload, engines) not in SATURATION:
            known = sorted({count for name, count in SATURATION if name == workload})
            raise SettingsError(
                f"--engines: {workload} was calibrated for {known} engines, not for {engines}"
            )
        place = Place(
            workload=workload, engines=engines, load=load / PER_CENT, one_slow=options.one_slow
        )
        places[place] = SATURATION[workload, engines] * place.load
    return places


def _scenario(options: BenchOptions, place: Place, speed: float, seed: int) -> Scenario:
    return Scenario(
        workload=place.workload,
        engines=place.engines,
        speed=speed,
        seed=seed,
        one_slow=place.one_slow,
        limit=options.limit,
    )


def _runs(options: BenchOptions, places: dict[Place, float]) -> list[Task]:
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    return [
        Task(run, Job(scenario=_scenario(options, place, speed, seed), policy=policy))
        for (place, speed), seed, policy in product(places.items(), seeds, options.policies)
    ]


def _searches(options: BenchOptions, places: dict[Place, float]) -> list[Task]:
    """They take longest, so none of them comes last."""
    if not options.oracle_moves or options.one_slow:
        return []
    highest, fewest = max(options.loads) / PER_CENT, min(options.engines)
    return [
        Task(
            search,
            OracleJob(
                scenario=_scenario(options, place, speed, options.first_seed),
                load=place.load,
                policies=options.policies,
                moves=options.oracle_moves,
            ),
            "searches",
        )
        for place, speed in places.items()
        if place.load == highest and place.engines == fewest
    ]


def _place(result: OracleResult) -> Place:
    scenario = result.scenario
    return Place(workload=scenario.workload, engines=scenario.engines, load=result.load)


def _write(
    options: BenchOptions, measured: Sequence[Column], found: Sequence[OracleResult], took_s: float
) -> None:
    assert options.out is not None  # noqa: S101 - asked before
    options.out.mkdir(parents=True, exist_ok=True)
    whole = {"columns": as_json(measured), "oracle": msgspec.to_builtins(found)}
    page = render_markdown(measured, found, command=options.command, minutes=took_s / 60)
    files = {
        "json": json.dumps(whole, indent=1),
        "md": page,
        "html": render_page(measured, title=options.command),
        "svg": render_overview(measured),
    }
    for ending, text in files.items():
        (options.out / f"{PAGE}.{ending}").write_text(text, "utf-8")
