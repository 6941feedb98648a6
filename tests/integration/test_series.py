"""Our counters and histograms are scraped as Prometheus' own would be."""

import prometheus_client
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from balancer.series import Counter, Histogram

BUCKETS = (0.1, 1, 10)
amounts = st.floats(min_value=0, max_value=100) | st.sampled_from(BUCKETS)


@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), amounts)))
def test_scrape_is_that_of_prometheus_client(observed: list[tuple[str, float]]) -> None:
    """Byte for byte: names, types, buckets, sums."""
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
    pairs = (
        (
            Counter("things_total", "Things.", ("kind",), registry=ours),
            Histogram("waits_seconds", "Waits.", ("kind",), buckets=BUCKETS, registry=ours),
        ),
        (
            prometheus_client.Counter("things_total", "Things.", ("kind",), registry=theirs),
            prometheus_client.Histogram(
                "waits_seconds", "Waits.", ("kind",), buckets=BUCKETS, registry=theirs
            ),
        ),
    )

    for counter, histogram in pairs:
        for kind, amount in observed:
            counter.labels(kind).inc(amount)
            counter.labels(kind).inc()
            histogram.labels(kind).observe(amount)

    assert generate_latest(ours) == generate_latest(theirs)


def test_removed_series_is_gone() -> None:
    """And starts anew when it comes back."""
    registry = CollectorRegistry()
    counter = Counter("things_total", "Things.", ("kind",), registry=registry)
    histogram = Histogram("waits", "Waits.", ("kind",), buckets=BUCKETS, registry=registry)
    counter.labels("a").inc(5)
    histogram.labels("a").observe(5)

    counter.remove("a")
    histogram.remove("a")

    assert registry.get_sample_value("things_total", {"kind": "a"}) is None
    assert registry.get_sample_value("waits_count", {"kind": "a"}) is None
    counter.labels("a").inc()
    assert registry.get_sample_value("things_total", {"kind": "a"}) == 1
