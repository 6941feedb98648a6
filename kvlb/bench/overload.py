"""`kvlb bench overload`: what is left of a fleet's goodput when more comes than it can serve.

Goodput: answers per second whose first token came within `promise_s` more than the whole prompt takes on
an idle engine, and whose tokens took at most three times an idle engine's time.
"""

from collections.abc import Sequence
from itertools import product
from statistics import fmean

import msgspec
from rich.console import Console
from rich.table import Table

from balancer.core.routing.policies import named_policy
from balancer.core.settings.admission import AdmissionSettings
from kvlb.bench.admitted_play import AdmittedPlay
from kvlb.bench.clock import VirtualClock
from kvlb.bench.figures import keeps_promise, percentile
from kvlb.bench.fleet import VirtualFleet, equal_engines
from kvlb.bench.pool import Task
from kvlb.bench.progress import watched
from kvlb.bench.saturation import SATURATION
from kvlb.bench.workloads import WORKLOADS

FULL, OVER = 100, 150
LEAST_KEPT = 0.9
"""Of the goodput at FULL per cent, what has to be left at OVER."""


class OverloadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for."""

    workloads: Sequence[str]
    loads: Sequence[int] = (70, 85, FULL, OVER, 200)
    """Per cent of saturation; FULL and OVER are among them."""
    engines: int = 4
    seeds: int = 3
    promise_s: float = AdmissionSettings().promise_s
    processes: int = 1
    streamed: int = 100
    """Per cent of the calls."""


class OverloadJob(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    workload: str
    engines: int
    load: int
    seed: int
    promise_s: float
    has_line: bool
    """False: everything is sent at once."""
    streamed: int = 100


class OverloadFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it."""

    good_per_s: float
    refused: float
    """Share of calls."""
    ttft_mean_s: float
    ttft_p99_s: float


def run_overload(job: OverloadJob) -> OverloadFigures:
    """Play it."""
    workload = WORKLOADS[job.workload]
    fleet = VirtualFleet(
        VirtualClock(),
        engines=equal_engines(workload.engine, job.engines, one_slow=False),
        policy=named_policy("kvlb"),
        seed=job.seed,
    )
    speed = SATURATION[job.workload, job.engines] * job.load / FULL
    calls = workload.calls(job.engines, speed, job.seed)
    settings = AdmissionSettings(promise_s=job.promise_s if job.has_line else 0.0)
    play = AdmittedPlay(fleet, calls, settings=settings, streamed=job.streamed)
    outcomes = play.run()
    good = sum(keeps_promise(each, workload.engine, job.promise_s) for each in outcomes)
    arrivals_s = [each.arrived_s for each in outcomes]
    firsts_s = sorted(each.first_s - each.arrived_s for each in outcomes)
    return OverloadFigures(
        good_per_s=good / (max(arrivals_s) - min(arrivals_s)),
        refused=play.refused / len(calls),
        ttft_mean_s=fmean(firsts_s),
        ttft_p99_s=percentile(firsts_s, 0.99),
    )


def bench_overload(options: OverloadOptions, console: Console) -> bool:
    """Print a table per workload; True if every one keeps what it has to."""
    jobs = [
        OverloadJob(
            workload=workload,
            engines=options.engines,
            load=load,
            seed=seed,
            promise_s=options.promise_s,
            has_line=has_line,
            streamed=options.streamed,
        )
        for workload, load, seed, has_line in product(
            options.workloads, options.loads, range(options.seeds), (False, True)
        )
    ]
    found = dict(watched([Task(run_overload, job) for job in jobs], options.processes))
    table = Table(
        *("workload", "load", "line", "good/s", "of 100 %", "refused", "TTFT mean, p99 (s)")
    )
    kept = {}
    for workload, has_line in product(options.workloads, (False, True)):
        rows = {
            load: _mean([found[job] for job in jobs if _is_of(job, workload, load, has_line)])
            for load in options.loads
        }
        for load, row in rows.items():
            table.add_row(
                workload,
                f"{load} %",
                "yes" if has_line else "no",
                f"{row.good_per_s:.2f}",
                f"{row.good_per_s / rows[FULL].good_per_s:.2f}",
                f"{row.refused:.1%}",
                f"{row.ttft_mean_s:.2f}, {row.ttft_p99_s:.1f}",
            )
        kept[workload, has_line] = rows[OVER].good_per_s / rows[FULL].good_per_s
    console.print(table)
    for workload in options.workloads:
        share, verdict = kept[workload, True], "kept"
        if share < LEAST_KEPT:
            verdict = "LOST"
        console.print(
            f"{workload}: {share:.2f} of the goodput at {FULL} % is left at {OVER} % "
            f"({kept[workload, False]:.2f} without a line); at least {LEAST_KEPT}: {verdict}",
            highlight=False,
        )
    return all(kept[workload, True] >= LEAST_KEPT for workload in options.workloads)


def _is_of(job: OverloadJob, workload: str, load: int, has_line: bool) -> bool:
    return (job.workload, job.load, job.has_line) == (workload, load, has_line)


def _mean(found: Sequence[OverloadFigures]) -> OverloadFigures:
    return OverloadFigures(
        **{
            name: fmean(getattr(each, name) for each in found)
            for name in OverloadFigures.__struct_fields__
        }
    )
