"""A replay's result as one HTML page: tables and plots drawn as SVG, nothing loaded from elsewhere."""

from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import Environment, PackageLoader, StrictUndefined

from kvlb.replay.core import curves
from kvlb.replay.core.curves import Axis, distribution, round_axis, scatter
from kvlb.replay.core.outcomes import Outcome, Report
from kvlb.replay.core.report_rows import engine_rows, figure_rows, lateness_warning, time_rows
from kvlb.replay.show import ENGINE_COLUMNS, TIME_COLUMNS


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plot:
    """One plot: a curve, or points."""

    title: str
    x: Axis
    y: Axis
    curve: str = ""
    points: Sequence[tuple[str, str]] = ()
    """Centre of each point (x, y)."""


def render_page(report: Report, outcomes: Sequence[Outcome], *, title: str) -> str:
    """The whole page."""
    environment = Environment(
        loader=PackageLoader("kvlb.replay", "."), autoescape=True, undefined=StrictUndefined
    )
    return environment.get_template("report.html.j2").render(
        title=title,
        width=curves.WIDTH,
        height=curves.HEIGHT,
        plots=_plots(outcomes),
        figures=figure_rows(report),
        time_columns=TIME_COLUMNS,
        times=time_rows(report),
        engine_columns=ENGINE_COLUMNS,
        engines=engine_rows(report),
        shares=[(each.engine, each.share) for each in report.engines],
        errors=sorted(report.errors.items()),
        warning=lateness_warning(report),
    )


def _plots(outcomes: Sequence[Outcome]) -> list[_Plot]:
    whole = [each for each in outcomes if each.error is None]
    if not whole:
        return []
    return [
        _shares("TTFT: share of requests up to", [each.ttft_s for each in whole]),
        _shares(
            "ITL: share of pauses between tokens up to",
            [gap for each in whole for gap in each.gaps_s],
        ),
        _shares("E2E: share of requests up to", [each.e2e_s for each in whole]),
        _over_time("TTFT over time", [(each.at_s, each.ttft_s) for each in whole]),
        _over_time("Sent late by, over time", [(each.at_s, each.late_s) for each in whole]),
    ]


def _shares(title: str, values: Sequence[float]) -> _Plot:
    milliseconds = [value * 1e3 for value in values]
    x = round_axis(max(milliseconds, default=0.0), "ms")
    return _Plot(title=title, x=x, y=round_axis(1, ""), curve=distribution(milliseconds, x.end))


def _over_time(title: str, pairs: Sequence[tuple[float, float]]) -> _Plot:
    x = round_axis(max(at_s for at_s, _ in pairs), "s")
    y = round_axis(max(value_s for _, value_s in pairs) * 1e3, "ms")
    scaled = [(at_s, value_s * 1e3) for at_s, value_s in pairs]
    points = [tuple(each.split(",")) for each in scatter(scaled, x.end, y.end)]
    return _Plot(title=title, x=x, y=y, points=[(left, top) for left, top in points])
