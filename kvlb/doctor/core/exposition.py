"""What an engine's `/metrics` says of its cache: every setting of vLLM's CacheConfig is a label there.

Rules:

1. A page that can't be read, or of another program, says nothing: every field stays unknown.
2. Offloading is seen by its setting, by the metrics its connector brings along, or by tokens that
   came from a peer.

Cost: one pass over the page.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

UNSET = frozenset({"", "None"})
OFFLOAD_PREFIXES = ("vllm:kv_offload_", "vllm:simple_kv_offload_", "vllm:mooncake_store_")
CONFIG = "vllm:cache_config_info"
BY_SOURCE = "vllm:prompt_tokens_cached_by_source_total"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMetrics:
    """The part of one page that matters here."""

    block_size: int | None = None
    """A hint: events say what is true."""
    has_prefix_caching: bool | None = None
    hash_algorithm: str | None = None
    offload: str | None = None
    """What shows that blocks go to other tiers or peers."""


def read_metrics(page: str) -> EngineMetrics:
    """Read one page."""
    try:
        families = list(text_string_to_metric_families(page))
    except ValueError:
        return EngineMetrics()
    labels = _config_labels(families)
    size = labels.get("block_size", "")
    caching = labels.get("enable_prefix_caching")
    return EngineMetrics(
        block_size=int(size) if size.isdecimal() and int(size) else None,
        has_prefix_caching=None if caching is None else caching == "True",
        hash_algorithm=labels.get("prefix_caching_hash_algo"),
        offload=_offload(families, labels),
    )


def _config_labels(families: Iterable[Metric]) -> dict[str, str]:
    for family in families:
        for sample in family.samples:
            if sample.name == CONFIG:
                return dict(sample.labels)
    return {}


def _offload(families: Iterable[Metric], labels: dict[str, str]) -> str | None:
    size = labels.get("kv_offloading_size", "")
    if size not in UNSET:
        return f"kv_offloading_size={size}"
    for sample in (sample for family in families for sample in family.samples):
        if sample.name.startswith(OFFLOAD_PREFIXES):
            return sample.name
        if sample.name == BY_SOURCE and sample.labels.get("source") == "p2p" and sample.value:
            return "tokens cached from a peer"
    return None
