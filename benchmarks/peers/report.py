"""Tables of the comparison: every router's means, then ours less each of the others'.

Rules:

1. Figures are means over valid repetitions; a router without any has none.
2. Differences are paired: the same calls at the same times in one repetition, and only repetitions that
   are valid for both. The interval is Student's, 95 %; with one repetition there is none.
3. `better` and `worse` are differences whose interval leaves out 0.
"""

from collections.abc import Sequence
from math import isinf
from statistics import fmean

from benchmarks.peers.cells import Cell
from benchmarks.peers.routers import OURS
from kvlb.bench.compare import paired
from kvlb.bench.figures import METRICS, Figures, Metric


def render(cells: Sequence[Cell], missing: dict[str, str], notes: Sequence[str]) -> str:
    """Everything, as markdown."""
    parts = []
    for workload in dict.fromkeys(each.workload for each in cells):
        own = [each for each in cells if each.workload == workload]
        parts += [f"### {workload}", _means(own), _differences(own)]
    if missing:
        parts.append("\n".join(f"- {name}: left out, {why}" for name, why in missing.items()))
    parts.append("\n".join(f"- {note}" for note in notes))
    return "\n\n".join(part for part in parts if part)


def _means(cells: Sequence[Cell]) -> str:
    titles = [each.title for each in METRICS.values()]
    head = [
        "router",
        *titles,
        "cached",
        "most / mean",
        "client, engines late p99 ms",
        "cores busy",
        "valid",
        "failed",
    ]
    return _table(head, [_mean_row(name, cells) for name in _routers(cells)])


def _mean_row(name: str, cells: Sequence[Cell]) -> list[str]:
    own = [each for each in cells if each.router == name]
    valid = [each.figures for each in own if each.is_valid]
    figures = [
        *(_mean(valid, metric) for metric in METRICS),
        _mean(valid, "cached"),
        _mean(valid, "most_over_mean"),
    ]
    late = ", ".join(
        f"{max(seconds) * 1e3:.0f}"
        for seconds in (
            [each.late_p99_s for each in own],
            [each.engines_late_p99_s for each in own],
        )
    )
    return [
        name,
        *figures,
        late,
        f"{max(each.busy for each in own):.0%}",
        f"{len(valid)} of {len(own)}",
        str(sum(sum(each.failed.values()) for each in own)),
    ]


def _differences(cells: Sequence[Cell]) -> str:
    others = [name for name in _routers(cells) if name != OURS]
    rows = []
    for name in others:
        pairs = _pairs(cells, name)
        if pairs:
            rows.append([name, *(_difference(metric, pairs) for metric in METRICS.values())])
    if not rows:
        return ""
    return _table([f"{OURS} less", *(each.title for each in METRICS.values())], rows)


def _pairs(cells: Sequence[Cell], other: str) -> list[tuple[Figures, Figures]]:
    """Ours and theirs of every repetition that is valid for both."""
    found = {(each.router, each.repeat): each.figures for each in cells if each.is_valid}
    repeats = sorted({each.repeat for each in cells})
    return [
        (found[OURS, repeat], found[other, repeat])
        for repeat in repeats
        if (OURS, repeat) in found and (other, repeat) in found
    ]


def _difference(metric: Metric, pairs: Sequence[tuple[Figures, Figures]]) -> str:
    mean, half = paired(
        [getattr(ours, metric.name) - getattr(theirs, metric.name) for ours, theirs in pairs]
    )
    if isinf(half):
        return f"{mean:+.3f}"
    if abs(mean) <= half:
        return f"{mean:+.3f} ± {half:.3f}, level"
    is_better = (mean > 0) is metric.more_is_better
    return f"{mean:+.3f} ± {half:.3f}, **{'better' if is_better else 'worse'}**"


def _routers(cells: Sequence[Cell]) -> list[str]:
    return list(dict.fromkeys(each.router for each in cells))


def _mean(runs: Sequence[Figures], name: str) -> str:
    return f"{fmean(getattr(each, name) for each in runs):.3f}" if runs else "-"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"| --- |{' ---: |' * (len(head) - 1)}"]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])
