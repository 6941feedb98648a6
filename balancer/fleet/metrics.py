"""Metrics of what fleet, ledger and router hold anyway: read when scraped, nothing has to leave them."""

from collections import Counter
from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from balancer.core.fleet.snapshot import Fleet, Role
from balancer.core.load.ledger import LoadLedger
from indexer.core.types import RankId, Trust


class FleetCollector(Collector):
    """Register it once."""

    def __init__(  # noqa: PLR0913 - what it reads, from all over the balancer
        self,
        *,
        fleet: Callable[[], Fleet],
        ledger: LoadLedger,
        unknown_ranks: Callable[[], int],
        silent_ranks: Callable[[], int],
        fleet_bugs: Callable[[], int],
        lost_reports: Callable[[], int],
        full_reports: Callable[[], int],
        trust: Callable[[RankId], Trust],
    ) -> None:
        self._lost_reports = lost_reports
        self._full_reports = full_reports
        self._trust = trust
        self._fleet = fleet
        self._ledger = ledger
        self._unknown_ranks = unknown_ranks
        self._silent_ranks = silent_ranks
        self._fleet_bugs = fleet_bugs

    def describe(self) -> Iterable[Metric]:
        """Name them without a scrape, so that registering asks nothing of the fleet."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Read everything."""
        yield CounterMetricFamily(
            "kvlb_index_unknown_ranks_total",
            "Ranks in the index's answers that the fleet doesn't have, summed over lookups.",
            self._unknown_ranks(),
        )
        yield GaugeMetricFamily(
            "kvlb_index_silent_ranks",
            "Ranks in the index that no indexer keeps up to date any more.",
            self._silent_ranks(),
        )
        yield CounterMetricFamily(
            "kvlb_fleet_bugs_total",
            "Bugs met while watching instances; the log has each. Any is worth a report.",
            self._fleet_bugs(),
        )
        yield CounterMetricFamily(
            "kvlb_reports_lost_total",
            "Reports of finished legs that could not be kept or handed to the indexer.",
            self._lost_reports(),
        )
        yield CounterMetricFamily(
            "kvlb_full_reports_total",
            "Requests that had their engine announce once more what it reused.",
            self._full_reports(),
        )
        yield from self._gauges()
        yield self._trusts()

    def _trusts(self) -> Metric:
        trusts = GaugeMetricFamily(
            "kvlb_routing_trust",
            "1 for how far routing believes what is known of a rank's cache.",
            labels=("instance", "rank", "trust"),
        )
        for instance in self._fleet().instances:
            if instance.role is Role.ENCODE:
                continue  # it has no such cache
            for rank in instance.rank_ids():
                believed = self._trust(rank)
                for level in Trust:
                    labels = (instance.alias, str(rank.rank), level.value)
                    trusts.add_metric(labels, float(level is believed))
        return trusts

    def _gauges(self) -> Iterable[Metric]:
        by_instance = ("instance", "role")
        by_rank = ("instance", "rank")
        healthy = GaugeMetricFamily(
            "kvlb_instance_healthy", "1 if probes find it healthy.", labels=by_instance
        )
        available = GaugeMetricFamily(
            "kvlb_instance_available", "1 if it may get new requests.", labels=by_instance
        )
        in_flight = GaugeMetricFamily("kvlb_instance_in_flight", "Legs in flight.", labels=by_rank)
        queued = GaugeMetricFamily(
            "kvlb_instance_queued_tokens",
            "Uncached prompt tokens of legs without a first token.",
            labels=by_rank,
        )
        for instance in self._fleet().instances:
            labels = (instance.alias, instance.role.value)
            healthy.add_metric(labels, float(instance.healthy))
            available.add_metric(labels, float(instance.is_available))
            for rank in instance.rank_ids():
                load = self._ledger.load(rank)
                in_flight.add_metric((instance.alias, str(rank.rank)), load.requests)
                queued.add_metric((instance.alias, str(rank.rank)), load.queued_tokens)
        yield from (healthy, available, in_flight, queued, self._models())

    def _models(self) -> Metric:
        models = GaugeMetricFamily(
            "kvlb_model_instances",
            "Instances that serve this model or adapter, healthy or not.",
            labels=("model",),
        )
        served = [each.models for each in self._fleet().instances if each.models is not None]
        counts = Counter(name for each in served for name in {each.base, *each.adapters})
        for name, instances in counts.items():
            models.add_metric((name,), instances)
        return models
