"""Shows the indexer: Prometheus metrics, and a small HTTP surface of its own.

Metrics are read off the service when they are scraped, so the write path pays nothing for them
and the series of a rank that left are gone with it. Labels are instance (its alias), rank and
reasons out of fixed sets.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Protocol

import msgspec
from fastapi import Depends, FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from indexer.core.index import IndexSize
from indexer.core.rank_status import InstanceStatus, PortStatus, RankStatus
from indexer.core.types import Trust

_RANK_LABELS = ("instance", "rank")
_TRUST_LEVELS = tuple(Trust)


class StatusSource(Protocol):
    """What is shown: `service.IndexerService`."""

    index_size: IndexSize

    @property
    def index_problem(self) -> str | None: ...
    @property
    def is_ready(self) -> bool: ...
    @property
    def dropped_reports(self) -> Mapping[str, int]: ...
    def status(self) -> Sequence[RankStatus]: ...
    def instances(self) -> Sequence[InstanceStatus]: ...
    def ports(self) -> Sequence[PortStatus]: ...
    async def measure(self) -> None: ...


class IndexerCollector(Collector):
    """Register it once: `registry.register(IndexerCollector(service))`."""

    def __init__(self, source: StatusSource) -> None:
        self._source = source

    def describe(self) -> Iterable[Metric]:
        """No names beforehand: registering must not need a running service."""
        return ()

    def collect(self) -> Iterable[Metric]:
        ranks = self._source.status()
        yield from _totals(ranks)
        yield from _reasons(ranks)
        yield _rejections(ranks, self._source.ports())
        yield from _gauges(ranks)
        dropped = CounterMetricFamily(
            "kvlb_reports_dropped",
            "Reports of balancers, or attempts to take some, that came to nothing.",
            labels=("reason",),
        )
        for reason, number in self._source.dropped_reports.items():
            dropped.add_metric([reason], number)
        yield dropped
        size = self._source.index_size

        yield GaugeMetricFamily(
            "kvlb_index_entries",
            "Block keys times their holders, over tiers and groups.",
            value=size.entries,
        )
        entries = GaugeMetricFamily(
            "kvlb_index_rank_entries", "Block keys one rank holds.", labels=_RANK_LABELS
        )
        for rank in ranks:
            entries.add_metric(_labels(rank), size.entries_by_rank.get(rank.rank, 0))
        yield entries


def indexer_status_app(
    source: StatusSource,
    registry: CollectorRegistry,
    guard: Callable[[Request], Awaitable[None]] | None = None,
) -> FastAPI:
    """`/health`, `/ready`, `/metrics`, `/status`.

    `/status` tells addresses: `guard` raises for those who may not read it.
    """
    app = FastAPI(title="kvlb indexer", openapi_url=None)
    guarded = [Depends(guard)] if guard else []

    @app.get("/health")
    async def health() -> Mapping[str, str]:
        return {"status": "ok"}

    @app.get("/ready")
    async def ready(response: Response) -> Mapping[str, str]:
        if source.is_ready:
            ranks = source.status()
            is_spare = bool(ranks) and all(rank.is_standing_by for rank in ranks)
            return {"status": "standing_by" if is_spare else "ready"}
        response.status_code = HTTPStatus.SERVICE_UNAVAILABLE
        return {"status": "searching"}

    @app.get("/metrics")
    async def metrics() -> Response:
        await source.measure()
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/status", dependencies=guarded)
    async def status() -> Response:
        body = msgspec.json.encode(render_status(source))
        return Response(body, media_type="application/json")

    return app


def render_status(source: StatusSource) -> dict[str, Any]:
    """The whole state as JSON values."""
    size = source.index_size
    return {
        "instances": [msgspec.to_builtins(engine) for engine in source.instances()],
        "ranks": [msgspec.to_builtins(rank, str_keys=True) for rank in source.status()],
        "ports": [msgspec.to_builtins(port) for port in source.ports()],
        "index": {"entries": size.entries, "problem": source.index_problem},
    }


def _labels(rank: RankStatus) -> list[str]:
    return [rank.alias, str(rank.rank.rank)]


def _totals(ranks: Sequence[RankStatus]) -> Iterable[Metric]:
    batches = CounterMetricFamily("kvlb_event_batches", "Batches applied.", labels=_RANK_LABELS)
    events = CounterMetricFamily("kvlb_events_applied", "Events applied.", labels=_RANK_LABELS)
    lost = CounterMetricFamily(
        "kvlb_event_batches_lost", "Batches that never came.", labels=_RANK_LABELS
    )
    connections = CounterMetricFamily(
        "kvlb_event_connections", "Connections of the live socket.", labels=_RANK_LABELS
    )
    failures = CounterMetricFamily(
        "kvlb_rank_failures", "Times following a rank had to start anew.", labels=_RANK_LABELS
    )
    wrong_rank = CounterMetricFamily(
        "kvlb_event_batches_wrong_rank",
        "Batches applied that name another rank: crossed ports, or a wrong rank_base.",
        labels=_RANK_LABELS,
    )
    pruned = CounterMetricFamily(
        "kvlb_pruned_blocks",
        "Copies of blocks taken out because the engine turned out not to have them.",
        labels=_RANK_LABELS,
    )
    for rank in ranks:
        pruned.add_metric(_labels(rank), rank.counts.pruned_blocks)
        batches.add_metric(_labels(rank), rank.counts.batches)
        wrong_rank.add_metric(_labels(rank), rank.counts.wrong_rank)
        events.add_metric(_labels(rank), rank.counts.events)
        lost.add_metric(_labels(rank), rank.counts.lost_batches)
        connections.add_metric(_labels(rank), rank.counts.connections)
        failures.add_metric(_labels(rank), rank.counts.failures)
    return batches, events, lost, wrong_rank, pruned, connections, failures


def _reasons(ranks: Sequence[RankStatus]) -> Iterable[Metric]:
    gaps = CounterMetricFamily(
        "kvlb_event_gaps", "Holes in the numbering.", labels=(*_RANK_LABELS, "outcome")
    )
    replays = CounterMetricFamily(
        "kvlb_replays", "Replays asked for.", labels=(*_RANK_LABELS, "outcome")
    )
    epochs = CounterMetricFamily(
        "kvlb_epochs", "Lives of a rank's cache.", labels=(*_RANK_LABELS, "reason")
    )
    set_aside = CounterMetricFamily(
        "kvlb_blocks_set_aside", "Blocks not used, or not yet.", labels=(*_RANK_LABELS, "reason")
    )
    index_faults = CounterMetricFamily(
        "kvlb_index_faults",
        "Writes and renewals that the index failed, refused or had lost.",
        labels=(*_RANK_LABELS, "reason"),
    )
    contradictions = CounterMetricFamily(
        "kvlb_mispredictions",
        "Finished legs whose cached tokens were not what the index had predicted, by cause.",
        labels=(*_RANK_LABELS, "cause"),
    )
    for rank in ranks:
        for family, counted in (
            (contradictions, rank.counts.contradictions),
            (index_faults, rank.counts.index_faults),
            (gaps, rank.counts.gaps),
            (replays, rank.counts.replays),
            (epochs, rank.counts.epochs),
            (set_aside, rank.counts.set_aside),
        ):
            for reason, number in counted.items():
                family.add_metric([*_labels(rank), reason], number)
    return gaps, replays, epochs, set_aside, index_faults, contradictions


def _rejections(ranks: Sequence[RankStatus], ports: Sequence[PortStatus]) -> Metric:
    rejected = CounterMetricFamily(
        "kvlb_events_rejected",
        "Messages, batches and events not applied.",
        labels=(*_RANK_LABELS, "reason"),
    )
    for rank in ranks:
        for reason, number in rank.counts.rejected.items():
            rejected.add_metric([*_labels(rank), reason], number)
    for port in ports:
        for reason, number in port.rejected.items():
            rejected.add_metric([port.endpoint, "", reason], number)
    return rejected


def _gauges(ranks: Sequence[RankStatus]) -> Iterable[Metric]:
    lag = GaugeMetricFamily(
        "kvlb_event_lag_seconds", "Age of the newest live batch when applied.", labels=_RANK_LABELS
    )
    held = GaugeMetricFamily(
        "kvlb_rank_blocks", "Reachable full-attention blocks.", labels=_RANK_LABELS
    )
    orphans = GaugeMetricFamily(
        "kvlb_rank_orphan_blocks", "Blocks whose parent is unknown.", labels=_RANK_LABELS
    )
    doubted = GaugeMetricFamily(
        "kvlb_rank_doubted_blocks",
        "Blocks that count no more since what was stored with them is gone.",
        labels=_RANK_LABELS,
    )
    connected = GaugeMetricFamily(
        "kvlb_rank_connected", "1 if the live socket has a peer.", labels=_RANK_LABELS
    )
    trust = GaugeMetricFamily(
        "kvlb_rank_trust",
        "1 for the level of what was last heard of a rank; see kvlb_rank_connected.",
        labels=(*_RANK_LABELS, "trust"),
    )
    standby = GaugeMetricFamily(
        "kvlb_rank_standby", "1 while another indexer writes this rank.", labels=_RANK_LABELS
    )
    for rank in ranks:
        standby.add_metric(_labels(rank), rank.is_standing_by)
        if rank.is_standing_by:
            continue  # what was known of it is out of date: the other indexer tells
        if rank.lag_s is not None:
            lag.add_metric(_labels(rank), rank.lag_s)
        held.add_metric(_labels(rank), rank.held_blocks)
        orphans.add_metric(_labels(rank), rank.orphans)
        doubted.add_metric(_labels(rank), rank.doubted_blocks)
        connected.add_metric(_labels(rank), rank.is_connected)
        for level in _TRUST_LEVELS:
            trust.add_metric([*_labels(rank), level.value], level is rank.trust)
    return lag, held, orphans, doubted, connected, trust, standby
