"""The result: one table per column and what it says of our policy, for people and for programs."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvlb.bench.compare import Difference, compare, geometric_mean
from kvlb.bench.figures import METRICS, Figures
from kvlb.bench.oracle import OracleResult
from kvlb.bench.run import OURS, Job

LEAST_RATIO = 0.01
"""Of a share that is 0 somewhere, for geometric means."""
SUMMARY_TITLES = ("metric", "better", "level", "worse", "than a slow one", "ratio", "worst")
_MARKS = {"better": "[green]better[/]", "level": "level", "worse": "[bold red]worse[/]"}


class Place(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """A column of the comparison."""

    workload: str
    engines: int
    load: float
    """Share of saturation."""
    one_slow: bool = False

    def __str__(self) -> str:
        slow = ", one slow" if self.one_slow else ""
        return f"{self.workload}, {self.engines} engines{slow}, {self.load:.0%}"


class Column(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was measured at one place."""

    place: Place
    speed: float
    runs: Mapping[str, Sequence[Figures]]
    """By policy, in the order of seeds."""

    @property
    def differences(self) -> list[Difference]:
        """Ours against the best other; none if there is nothing to compare."""
        return compare(self.runs, OURS) if OURS in self.runs and len(self.runs) > 1 else []


def columns(
    places: Mapping[Place, float], results: Iterable[tuple[Job, Figures]], policies: Sequence[str]
) -> list[Column]:
    """Results put in order. `places`: with the speed of each."""
    found: dict[tuple[str, int, bool, float, str], dict[int, Figures]] = {}
    for job, figures in results:
        each = job.scenario
        key = (each.workload, each.engines, each.one_slow, each.speed, job.policy)
        found.setdefault(key, {})[each.seed] = figures
    made = []
    for place, speed in places.items():
        begin = (place.workload, place.engines, place.one_slow, speed)
        runs = {policy: found[*begin, policy] for policy in policies}
        by_seed = {policy: [each[seed] for seed in sorted(each)] for policy, each in runs.items()}
        made.append(Column(place=place, speed=speed, runs=by_seed))
    return made


def mean_of(runs: Iterable[Figures], name: str) -> float:
    """Of one figure over runs."""
    return fmean(getattr(each, name) for each in runs)


def show_column(column: Column, console: Console) -> None:
    """One table: policies, and how ours stands beside the best other."""
    table = Table(title=f"\n{column.place}", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("policy", no_wrap=True)
    for title in (*(each.title for each in METRICS.values()), "cached", "most / mean"):
        table.add_column(title, justify="right", no_wrap=True)
    for policy, runs in column.runs.items():
        cells = [render_figure(name, mean_of(runs, name)) for name in (*METRICS, "cached")]
        table.add_row(policy, *cells, f"{mean_of(runs, 'most_over_mean'):.2f}")
    differences = column.differences
    if differences:
        table.add_section()
        table.add_row(f"{OURS} is", *(_MARKS[each.standing] for each in differences))
        table.add_row("than", *(each.other for each in differences))
        table.add_row("by", *(f"{each.mean:+.3f}" for each in differences))
        table.add_row("± 95 %", *(f"{each.half_width:.3f}" for each in differences))
    console.print(table)


def show_summary(measured: Sequence[Column], console: Console) -> None:
    """Over all columns: how often ours is better, level, worse, and by how much."""
    rows = metric_rows(measured)
    if not rows:
        return
    table = Table(
        title=f"\n{OURS} against the best other policy, over {len(measured)} columns",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    for title in SUMMARY_TITLES:
        table.add_column(title, justify="left" if title == "metric" else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print(unevenness(measured))


def unevenness(measured: Sequence[Column]) -> str:
    """Where our policy spread work least evenly."""
    most, place = max(
        (mean_of(each.runs[OURS], "most_over_mean"), str(each.place)) for each in measured
    )
    return f"Most loaded engine over the mean, under {OURS}: at most {most:.2f} ({place})."


def metric_rows(measured: Sequence[Column]) -> list[tuple[str, ...]]:
    """Per metric: columns where ours is better, level, worse; mean and worst ratio to the best."""
    judged = [each.differences for each in measured if each.differences]
    if not judged:
        return []
    rows = []
    for number, metric in enumerate(METRICS.values()):
        each = [differences[number] for differences in judged]
        standings = Counter(one.standing for one in each)
        ratios = [max(one.ours, LEAST_RATIO) / max(one.theirs, LEAST_RATIO) for one in each]
        worst = min(ratios) if metric.more_is_better else max(ratios)
        counts = (str(standings[name]) for name in ("better", "level", "worse"))
        to_slow = sum(one.standing == "worse" and one.other_is_slow for one in each)
        rows.append(
            (metric.title, *counts, str(to_slow), f"{geometric_mean(ratios):.3f}", f"{worst:.3f}")
        )
    return rows


def show_oracle(found: Sequence[OracleResult], console: Console) -> None:
    """Cached shares beside what a clairvoyant found."""
    if not found:
        return
    table = Table(
        title="\nCached share beside the best placement that a search found",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    for title in ("column", OURS, "found", "share of it", "endless", "most / mean"):
        table.add_column(title, justify="left" if title == "column" else "right")
    for row in oracle_rows(found):
        table.add_row(*row)
    console.print(table)


def oracle_rows(found: Sequence[OracleResult]) -> list[tuple[str, ...]]:
    """One per search: ours, what it found, ours over that, the bound, how even it is."""
    return [
        (
            f"{each.scenario.workload}, {each.scenario.engines} engines, {each.load:.0%}",
            f"{each.ours:.3f}",
            f"{each.cached:.3f}",
            f"{each.ours / each.cached:.3f}" if each.cached else "",
            f"{each.endless:.3f}",
            f"{each.most_over_mean:.2f}",
        )
        for each in found
    ]


def as_json(measured: Sequence[Column]) -> list[dict[str, Any]]:
    """Everything, for programs."""
    return [
        {
            **msgspec.to_builtins(each),
            "differences": msgspec.to_builtins(each.differences),
        }
        for each in measured
    ]


def render_figure(name: str, value: float) -> str:
    """Seconds with three digits, shares with three decimals."""
    if name in {"goodput", "cached"} or value < 10:
        return f"{value:.3f}"
    return f"{value:.1f}"
