"""Series of one metric by their labels, looked up without a call of Python code, and who is forgotten."""

from collections.abc import Sequence, Set
from typing import Protocol, TypeVar

from balancer.series import CounterSeries, HistogramSeries

Series = TypeVar("Series", CounterSeries, HistogramSeries)
Made_co = TypeVar("Made_co", covariant=True)


class _Metric(Protocol[Made_co]):
    names: Sequence[str]

    def labels(self, *values: str) -> Made_co: ...
    def remove(self, *values: str) -> None: ...


class Labelled(dict[tuple[str, ...], Series]):
    """A metric's series by their labels, and who is to be forgotten."""

    def __init__(self, metric: _Metric[Series]) -> None:
        super().__init__()
        self._metric: _Metric[Series] = metric

    def __missing__(self, labels: tuple[str, ...]) -> Series:
        series = self[labels] = self._metric.labels(*labels)
        return series

    def forget(self, name: str, known: Set[str]) -> None:
        """Drop the series whose label `name`, if they have it, isn't known any more."""
        if name not in self._metric.names:
            return
        number = self._metric.names.index(name)
        for labels in [each for each in self if each[number] not in known]:
            self._metric.remove(*labels)
            del self[labels]
