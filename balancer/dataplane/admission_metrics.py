"""Metrics of the lines that requests wait in."""

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from balancer.series import Histogram

WAIT_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class AdmissionMetrics(Collector):
    """How many wait, read when scraped, and how long those waited that don't any more."""

    def __init__(
        self, registry: CollectorRegistry, waiting: Callable[[], Mapping[str, int]]
    ) -> None:
        """`waiting` counts by base model."""
        self._waiting = waiting
        waits = Histogram(
            "kvlb_admission_wait_seconds",
            "In the line for room on any rank, by what came of it: admitted, refused or left.",
            ("outcome",),
            buckets=WAIT_BUCKETS,
            registry=registry,
        )
        self._waits = {each: waits.labels(each) for each in ("admitted", "refused", "left")}
        registry.register(self)

    def observe(self, outcome: str, seconds: float) -> None:
        """Somebody doesn't wait any more."""
        self._waits[outcome].observe(seconds)

    def describe(self) -> list[Metric]:
        """Name them without a scrape."""
        return []

    def collect(self) -> list[Metric]:
        """Count the lines."""
        waiting = GaugeMetricFamily(
            "kvlb_admission_waiting",
            "Requests that wait until a rank has room.",
            labels=("model",),
        )
        for model, requests in self._waiting().items():
            waiting.add_metric((model,), requests)
        return [waiting]
