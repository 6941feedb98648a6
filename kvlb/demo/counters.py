"""Reads the simulated engines' `/metrics` as an operator's Prometheus would: vLLM's own names.

`vllm:prompt_tokens_by_source` (vLLM 0.16 and later) splits prompt tokens into computed here,
found in this engine's cache, and received by a transfer. `vllm:prefix_cache_hits` alone would not do:
a request with a prefill leg is looked up on two engines, so its hits and queries count twice.
"""

from collections.abc import Iterable

from prometheus_client.parser import text_string_to_metric_families

from kvlb.demo.report import EngineCounts
from kvlb.errors import PeerError

PROMPT_TOKENS = "vllm:prompt_tokens_total"
BY_SOURCE = "vllm:prompt_tokens_by_source_total"
COMPUTED = "local_compute"


def count_fleet(answering: Iterable[str], others: Iterable[str]) -> EngineCounts:
    """Sum the metric texts of the instances that answer clients, and of those that don't."""
    prompt_tokens = prefilled_tokens = 0
    for text in answering:
        prompt_tokens += _sum(text, PROMPT_TOKENS)
        prefilled_tokens += _sum(text, BY_SOURCE, source=COMPUTED)
    for text in others:
        prefilled_tokens += _sum(text, BY_SOURCE, source=COMPUTED)
    return EngineCounts(prompt_tokens=prompt_tokens, prefilled_tokens=prefilled_tokens)


def _sum(text: str, name: str, **labels: str) -> int:
    values = [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    if not values:
        raise PeerError(f"an engine's /metrics lacks {name} {labels or ''}")
    return int(sum(values))
