"""Plots of a comparison: an HTML page with SVG in it, and one picture; nothing is loaded from elsewhere."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

from jinja2 import Environment, PackageLoader, StrictUndefined

from kvlb.bench.figures import METRICS
from kvlb.bench.report import Column, mean_of

WIDTH, HEIGHT = 300, 170
COLORS = ("#9aa5b5", "#c99a2e", "#4f9d69", "#a35ab8", "#2864c7", "#d1495b", "#5ab4ac", "#7a5c3e")
SHOWN = ("ttft_mean", "ttft_p99", "e2e_mean", "goodput", "cached", "most_over_mean")
TITLES = {
    **{name: each.title for name, each in METRICS.items()},
    "cached": "cached share",
    "most_over_mean": "most loaded / mean",
}
LINEAR = frozenset({"goodput", "cached", "most_over_mean"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One policy in one plot."""

    policy: str
    color: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """One figure over load, a line per policy."""

    title: str
    lines: Sequence[Line]
    x_labels: Sequence[tuple[float, str]]
    y_labels: Sequence[tuple[float, str]]


def render_page(measured: Sequence[Column], *, title: str) -> str:
    """Every figure, as a page."""
    groups = _groups(measured)
    return _render(
        "plots.html.j2",
        title=title,
        legend=_legend(measured),
        groups=[
            (name, [_plot(columns, figure) for figure in SHOWN]) for name, columns in groups.items()
        ],
    )


def render_overview(measured: Sequence[Column]) -> str:
    """One figure of every fleet, as a picture for a document: a row per workload."""
    groups = _groups(measured)
    workloads = list(dict.fromkeys(columns[0].place.workload for columns in groups.values()))
    fleets = list(dict.fromkeys(columns[0].place.engines for columns in groups.values()))
    return _render(
        "overview.svg.j2",
        legend=_legend(measured),
        rows=len(workloads),
        columns=len(fleets),
        panels=[
            (
                name,
                workloads.index(columns[0].place.workload),
                fleets.index(columns[0].place.engines),
                _plot(columns, SHOWN[0]),
            )
            for name, columns in groups.items()
        ],
    )


def _groups(measured: Sequence[Column]) -> dict[str, list[Column]]:
    """Columns that differ in load only."""
    groups: dict[str, list[Column]] = {}
    for column in measured:
        place = column.place
        groups.setdefault(f"{place.workload}, {place.engines} engines", []).append(column)
    return groups


def _legend(measured: Sequence[Column]) -> list[tuple[str, str]]:
    return list(zip(measured[0].runs, COLORS, strict=False))


def _render(template: str, **values: object) -> str:
    environment = Environment(
        loader=PackageLoader("kvlb.bench", "."), autoescape=True, undefined=StrictUndefined
    )
    return environment.get_template(template).render(width=WIDTH, height=HEIGHT, **values)


def _plot(columns: Sequence[Column], figure: str) -> Plot:
    loads = [column.place.load for column in columns]
    values = {
        policy: [mean_of(column.runs[policy], figure) for column in columns]
        for policy in columns[0].runs
    }
    every = [each for series in values.values() for each in series]
    ticks = _linear_ticks(every) if figure in LINEAR else _decade_ticks(every)
    scale = (lambda value: value) if figure in LINEAR else (lambda value: log10(max(value, 1e-9)))
    low, high = scale(ticks[0]), scale(ticks[-1])

    def height(value: float) -> float:
        return round(HEIGHT * (1 - (scale(value) - low) / (high - low)), 1)

    def across(load: float) -> float:
        return round(WIDTH * (load - loads[0]) / ((loads[-1] - loads[0]) or 1), 1)

    return Plot(
        title=TITLES[figure] + ("" if figure in LINEAR else " (s)"),
        lines=[
            Line(
                policy=policy,
                color=COLORS[number % len(COLORS)],
                points=[(across(x), height(y)) for x, y in zip(loads, series, strict=True)],
            )
            for number, (policy, series) in enumerate(values.items())
        ],
        x_labels=[(across(load), f"{load:.0%}") for load in loads],
        y_labels=[(height(tick), f"{tick:g}") for tick in ticks],
    )


def _linear_ticks(values: Sequence[float]) -> list[float]:
    """From 0 to a round number."""
    most = max(*values, 1e-9)
    step = 10 ** floor(log10(most))
    step = next(part for part in (step / 5, step / 2, step, step * 2) if most <= 5 * part)
    return [round(step * number, 9) for number in range(ceil(most / step) + 1)]


def _decade_ticks(values: Sequence[float]) -> list[float]:
    """1, 2 and 5 of every decade, around all values."""
    low, high = max(min(values), 1e-9), max(*values, 1e-9)
    every = [
        part * 10**decade
        for decade in range(floor(log10(low)), ceil(log10(high)) + 1)
        for part in (1, 2, 5)
    ]
    first = max(number for number, each in enumerate(every) if each <= low)
    last = next(number for number, each in enumerate(every) if each >= high and number > first)
    return every[first : last + 1]
