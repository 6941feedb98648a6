"""Whether our policy differs from the best other one by more than chance.

In every column (workload, engines, load) and for every metric, our policy is held against the one
of the others whose mean over all seeds is best there: chosen after the fact, anew for each metric.
Differences are paired by seed, so what a seed makes hard is hard for both. The interval is
Student's, 95 %.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import exp, inf, log, sqrt
from statistics import fmean, stdev
from typing import Literal

import msgspec

from kvlb.bench.figures import METRICS, Figures, Metric

SLOW = 2.0
Standing = Literal["better", "level", "worse"]

# Two-sided 95 % points of Student's t, by degrees of freedom; then close to the normal's.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_T95_MANY = 2.1


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Ours less the best other one's, of one metric in one column."""

    metric: str
    other: str
    """The policy that is best there without us."""
    ours: float
    theirs: float
    mean: float
    half_width: float
    """Of the 95 % interval; infinite with one seed."""
    standing: Standing
    """`level`: the interval includes 0."""
    other_is_slow: bool
    """Its mean TTFT is over `SLOW` times ours: it is best in this metric and no choice all the same."""

    @property
    def ratio(self) -> float:
        """Ours over theirs."""
        return self.ours / self.theirs if self.theirs else inf


def paired(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half width of its 95 % interval."""
    if len(values) < 2:
        return fmean(values), inf
    freedom = len(values) - 1
    point = _T95[freedom - 1] if freedom <= len(_T95) else _T95_MANY
    return fmean(values), point * stdev(values) / sqrt(len(values))


def compare(runs: Mapping[str, Sequence[Figures]], ours: str) -> list[Difference]:
    """Of one column: results by policy, in the order of seeds. Others than `ours` are needed."""
    others = {name: each for name, each in runs.items() if name != ours}
    return [_difference(metric, runs[ours], others) for metric in METRICS.values()]


def _difference(
    metric: Metric, ours: Sequence[Figures], others: Mapping[str, Sequence[Figures]]
) -> Difference:
    sign = -1 if metric.more_is_better else 1
    mine = _values(metric, ours)
    theirs = {name: _values(metric, each) for name, each in others.items()}
    best = min(theirs, key=lambda name: sign * fmean(theirs[name]))
    mean, half_width = paired([a - b for a, b in zip(mine, theirs[best], strict=True)])
    standing: Standing = "level"
    if abs(mean) > half_width:
        standing = "better" if sign * mean < 0 else "worse"
    return Difference(
        metric=metric.name,
        other=best,
        ours=fmean(mine),
        theirs=fmean(theirs[best]),
        mean=mean,
        half_width=half_width,
        standing=standing,
        other_is_slow=_mean_ttft(others[best]) > SLOW * _mean_ttft(ours),
    )


def _values(metric: Metric, runs: Iterable[Figures]) -> list[float]:
    return [getattr(each, metric.name) for each in runs]


def _mean_ttft(runs: Sequence[Figures]) -> float:
    return fmean(each.ttft_mean for each in runs)


def geometric_mean(values: Iterable[float]) -> float:
    """Of positive values."""
    return exp(fmean(log(value) for value in values))
