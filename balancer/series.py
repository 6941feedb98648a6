"""Counters and histograms of one event loop, read by Prometheus' client when it is scraped.

prometheus_client's own take a lock and three calls for each count; a request counts twenty times.
These are counted on the event loop alone, so they need no lock.

Rules:

1. Names, types and samples are those that prometheus_client's classes of the same name give.
2. A scrape may come from another thread: it copies what it walks.

Cost: one call and one addition; a histogram bisects its bounds.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

Labels = tuple[str, ...]


class CounterSeries:
    """One series of a counter."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        """Count `amount` more."""
        self.value += amount


class HistogramSeries:
    """One series of a histogram."""

    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """Per bucket, not added up; the last has no bound."""
        self.sum = 0.0

    def observe(self, amount: float) -> None:
        """Count one observation."""
        self.sum += amount
        self.counts[bisect_left(self._bounds, amount)] += 1


class Counter:
    """A counter and its series."""

    def __init__(
        self, name: str, help_: str, labels: Sequence[str] = (), *, registry: CollectorRegistry
    ) -> None:
        self._name, self._help, self.names = name, help_, labels
        self._series: dict[Labels, CounterSeries] = {}
        registry.register(self)

    def labels(self, *values: str) -> CounterSeries:
        """The series with these labels."""
        return self._series.setdefault(values, CounterSeries())

    def remove(self, *values: str) -> None:
        """Drop it."""
        del self._series[values]

    def describe(self) -> Iterable[Metric]:
        return (CounterMetricFamily(self._name, self._help, labels=self.names),)

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(self._name, self._help, labels=self.names)
        for values, series in list(self._series.items()):
            family.add_metric(values, series.value)
        return (family,)


class Histogram:
    """A histogram and its series."""

    def __init__(
        self,
        name: str,
        help_: str,
        labels: Sequence[str] = (),
        *,
        buckets: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self._name, self._help, self.names = name, help_, labels
        self._bounds = buckets
        spell: Callable[[float], str] = floatToGoString
        self._told = [spell(bound) for bound in (*buckets, float("inf"))]
        self._series: dict[Labels, HistogramSeries] = {}
        registry.register(self)

    def labels(self, *values: str) -> HistogramSeries:
        """The series with these labels."""
        return self._series.setdefault(values, HistogramSeries(self._bounds))

    def remove(self, *values: str) -> None:
        """Drop it."""
        del self._series[values]

    def describe(self) -> Iterable[Metric]:
        return (HistogramMetricFamily(self._name, self._help, labels=self.names),)

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._help, labels=self.names)
        for values, series in list(self._series.items()):
            total = 0
            buckets = []
            for told, count in zip(self._told, list(series.counts), strict=True):
                total += count
                buckets.append((told, total))
            family.add_metric(values, buckets, series.sum)
        return (family,)
