"""/metrics under vLLM's names, and /simulator/state for what only a simulator can tell."""

from collections.abc import Iterator
from dataclasses import asdict

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from simulator.core.settings import EngineSettings
from simulator.engine import SimulatedEngine
from simulator.rank import EngineRank

_LABELS = ["model_name", "engine"]


class _EngineCollector(Collector):
    """Reads the counters of all ranks when somebody asks."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        for rank in self._engine.ranks:
            rank.core.expire(self._engine.clock())
        yield from self._collect_gauges()
        yield from self._collect_counters()
        yield from self._collect_by_label()
        yield from self._collect_histograms()
        yield _render_cache_config(self._engine.settings)

    def _collect_gauges(self) -> Iterator[Metric]:
        loads = [rank.core.load() for rank in self._engine.ranks]
        old = self._engine.settings.release < (0, 9, 2)
        usage = "gpu_cache_usage_perc" if old else "kv_cache_usage_perc"
        yield self._gauge("num_requests_running", [load.running for load in loads])
        yield self._gauge("num_requests_waiting", [load.waiting for load in loads])
        yield self._gauge(usage, [load.cache_usage for load in loads])
        yield self._labelled_gauge(
            "num_requests_waiting_by_reason",
            "reason",
            [{"capacity": load.waiting - load.loading, "deferred": load.loading} for load in loads],
        )
        yield self._labelled_gauge(
            "engine_sleep_state", "sleep_state", [{"awake": 1} for _load in loads]
        )

    def _collect_counters(self) -> Iterator[Metric]:
        ranks = self._engine.ranks
        counts = [rank.core.statistics for rank in ranks]
        kept = [rank.core.reservations for rank in ranks]
        for name, values in (
            ("prefix_cache_queries", [count.prefix_cache_queries_tokens for count in counts]),
            ("prefix_cache_hits", [count.prefix_cache_hits_tokens for count in counts]),
            (
                "external_prefix_cache_queries",
                [count.external_cache_queries_tokens for count in counts],
            ),
            ("external_prefix_cache_hits", [count.external_cache_hits_tokens for count in counts]),
            ("prompt_tokens", [count.prompt_tokens for count in counts]),
            (
                "prompt_tokens_cached",
                [count.prompt_tokens - count.computed_prompt_tokens for count in counts],
            ),
            ("generation_tokens", [count.generation_tokens for count in counts]),
            ("num_preemptions", [count.preemptions for count in counts]),
            ("nixl_num_kv_expired_reqs", [reserved.expired for reserved in kept]),
            (
                "nixl_num_notifications_after_expiry",
                [reserved.reads_after_expiry for reserved in kept],
            ),
            ("nixl_num_failed_transfers", [count.failed_loads for count in counts]),
        ):
            yield self._counter(name, values)

    def _collect_by_label(self) -> Iterator[Metric]:
        model = self._engine.settings.model
        finished = CounterMetricFamily(
            "vllm:request_success", "Finished requests", labels=[*_LABELS, "finished_reason"]
        )
        sources = CounterMetricFamily(
            "vllm:prompt_tokens_by_source", "Prompt tokens", labels=[*_LABELS, "source"]
        )
        for index, rank in enumerate(self._engine.ranks):
            counts = rank.core.statistics
            for reason, count in counts.finished.items():
                finished.add_metric([model, str(index), reason], count)
            for source, tokens in (
                ("local_compute", counts.computed_prompt_tokens),
                ("local_cache_hit", counts.prefix_cache_hits_tokens),
                ("external_kv_transfer", counts.external_cache_hits_tokens),
            ):
                sources.add_metric([model, str(index), source], tokens)
        yield finished
        yield sources
        refused = CounterMetricFamily(
            "vllm:admission_rejections", "Refused requests", labels=[*_LABELS, "reason"]
        )
        refused.add_metric([model, "0", "queue_full"], self._engine.rejected_requests)
        yield refused

    def _collect_histograms(self) -> Iterator[Metric]:
        ranks = self._engine.ranks
        for name, histograms in (
            ("time_to_first_token_seconds", [rank.time_to_first_token for rank in ranks]),
            ("inter_token_latency_seconds", [rank.inter_token_latency for rank in ranks]),
            ("e2e_request_latency_seconds", [rank.request_latency for rank in ranks]),
        ):
            family = HistogramMetricFamily(f"vllm:{name}", name.replace("_", " "), labels=_LABELS)
            for index, histogram in enumerate(histograms):
                labels = [self._engine.settings.model, str(index)]
                family.add_metric(labels, histogram.buckets(), histogram.sum_s)
            yield family

    def _labelled_gauge(self, name: str, label: str, values: list[dict[str, int]]) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", name.replace("_", " "), labels=[*_LABELS, label])
        for index, by_label in enumerate(values):
            for value, count in by_label.items():
                family.add_metric([self._engine.settings.model, str(index), value], count)
        return family

    def _gauge(self, name: str, values: list[float]) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", name.replace("_", " "), labels=_LABELS)
        for index, value in enumerate(values):
            family.add_metric([self._engine.settings.model, str(index)], value)
        return family

    def _counter(self, name: str, values: list[int]) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", name.replace("_", " "), labels=_LABELS)
        for index, value in enumerate(values):
            family.add_metric([self._engine.settings.model, str(index)], value)
        return family


def render_metrics(engine: SimulatedEngine) -> bytes:
    """Return the Prometheus text of one engine."""
    registry = CollectorRegistry()
    registry.register(_EngineCollector(engine))
    return generate_latest(registry)


def render_state(engine: SimulatedEngine) -> dict[str, object]:
    """Return what a test wants to know of an engine, by rank."""
    now_s = engine.clock()
    return {
        "version": engine.settings.version,
        "received_requests": len(engine.received),
        "encoder": asdict(engine.encoder.counts),
        "ranks": [_render_rank_state(rank, now_s) for rank in engine.ranks],
    }


def render_server_info(engine: SimulatedEngine) -> dict[str, object]:
    """Return what development mode tells, as far as transfers are concerned."""
    settings = engine.settings
    return {
        "vllm_config": {
            "kv_transfer_config": {
                "kv_connector": settings.kv_connector,
                "engine_id": engine.engine_id if settings.kv_connector else None,
            },
            "parallel_config": {
                "tensor_parallel_size": 1,
                "pipeline_parallel_size": 1,
                "data_parallel_size": settings.dp_size,
                "data_parallel_rank": 0,
            },
        },
        "vllm_env": {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "localhost",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": engine.places.side_port,
        },
    }


def _render_rank_state(rank: EngineRank, now_s: float) -> dict[str, object]:
    rank.core.expire(now_s)
    load, counts = rank.core.load(), rank.core.statistics
    return {
        "running": load.running,
        "waiting": load.waiting,
        "loading": load.loading,
        "in_flight": rank.in_flight,
        "cache_usage": load.cache_usage,
        "reservations_open": load.open_reservations,
        "reservations_released": load.released_reservations,
        "reservations_expired": load.expired_reservations,
        "reservations_unreleased": load.open_reservations + load.expired_reservations,
        "reads_after_expiry": load.reads_after_expiry,
        "reads_of_other_prompt": load.reads_of_other_prompt,
        "corrupt_reads": counts.corrupt_reads,
        "failed_loads": counts.failed_loads,
        "preemptions": counts.preemptions,
        "prompt_tokens": counts.prompt_tokens,
        "computed_prompt_tokens": counts.computed_prompt_tokens,
        "generation_tokens": counts.generation_tokens,
        "finished": dict(counts.finished),
        "busy_s": counts.busy_s,
        "last_seq": rank.publisher.last_seq,
        "dropped_batches": rank.publisher.dropped_batches,
    }


def _render_cache_config(settings: EngineSettings) -> Metric:
    labels = {
        "block_size": str(settings.block_size),
        "cache_dtype": "auto",
        "enable_prefix_caching": str(settings.prefix_caching),
        "engine": "0",
        "hash_block_size": "None",
        "kv_offloading_backend": "native",
        "kv_offloading_size": "4.0" if settings.kv_offloading else "None",
        "num_gpu_blocks": str(settings.num_blocks * settings.dp_size),
        "prefix_caching_hash_algo": settings.hash_algorithm,
    }
    family = GaugeMetricFamily(
        "vllm:cache_config_info", "Information of the LLMEngine CacheConfig", labels=list(labels)
    )
    family.add_metric(list(labels.values()), 1.0)
    return family
