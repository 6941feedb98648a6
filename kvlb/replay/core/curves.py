"""Lines and points of a report's plots, in the coordinates of an SVG of fixed size.

Rules: x and y are scaled to the plot's box; a scale begins at 0 and ends at a round number above the
largest value; nothing is drawn of an empty set. At most `MOST_POINTS` points per curve: a page of a
long replay must still open.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

WIDTH, HEIGHT = 560, 240
"""Of a plot's box, in pixels."""
MOST_POINTS = 2000
TICKS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """From 0 to `end`, with labels at equal distances."""

    end: float
    labels: Sequence[tuple[float, str]]
    """Position from 0 to 1, and text."""


def round_axis(most: float, unit: str) -> Axis:
    """An axis that holds `most`."""
    end = _round_up(most)
    labels = [
        (tick / TICKS, f"{end * tick / TICKS:.4g} {unit}".strip()) for tick in range(TICKS + 1)
    ]
    return Axis(end=end, labels=labels)


def _round_up(value: float) -> float:
    if value <= 0:
        return 1.0
    power: float = 10.0 ** floor(log10(value))
    return next(step * power for step in (1, 2, 4, 5, 8, 10, 20) if step * power >= value)


def distribution(values: Sequence[float], end: float) -> str:
    """The share of values up to x, as points of a polyline."""
    ordered = sorted(values)
    step = max(1, ceil(len(ordered) / MOST_POINTS))
    picked = sorted({*range(0, len(ordered), step), len(ordered) - 1}) if ordered else []
    return " ".join(_point(ordered[place] / end, (place + 1) / len(ordered)) for place in picked)


def scatter(pairs: Sequence[tuple[float, float]], x_end: float, y_end: float) -> list[str]:
    """Points as `x,y`."""
    step = max(1, ceil(len(pairs) / MOST_POINTS))
    return [_point(x / x_end, y / y_end) for x, y in pairs[::step]]


def _point(x: float, y: float) -> str:
    return f"{x * WIDTH:.1f},{(1 - y) * HEIGHT:.1f}"
