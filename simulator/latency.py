"""Latencies of one rank as the histograms an engine exports."""

from bisect import bisect_left

_BOUNDS_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
)


class LatencyHistogram:
    """Counts durations by upper bound."""

    def __init__(self) -> None:
        self.sum_s = 0.0
        self._counts = [0] * (len(_BOUNDS_S) + 1)

    def observe(self, duration_s: float) -> None:
        self.sum_s += duration_s
        self._counts[bisect_left(_BOUNDS_S, duration_s)] += 1

    def buckets(self) -> list[tuple[str, float]]:
        """Return cumulative counts by upper bound, as Prometheus wants them."""
        total = 0
        rendered: list[tuple[str, float]] = []
        for bound_s, count in zip((*map(str, _BOUNDS_S), "+Inf"), self._counts, strict=True):
            total += count
            rendered.append((bound_s, total))
        return rendered
