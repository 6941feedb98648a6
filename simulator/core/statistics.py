"""Counters of one rank, the source of its metrics. Only ever rise, except the gauges."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class EngineStatistics:
    """What a rank did since it started."""

    prefix_cache_queries_tokens: int = 0
    prefix_cache_hits_tokens: int = 0
    external_cache_queries_tokens: int = 0
    external_cache_hits_tokens: int = 0
    prompt_tokens: int = 0
    computed_prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    failed_loads: int = 0
    corrupt_reads: int = 0
    busy_s: float = 0.0
    steps: int = 0
    finished: dict[str, int] = field(default_factory=dict)

    def count_finished(self, reason: str) -> None:
        self.finished[reason] = self.finished.get(reason, 0) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """What a rank holds at this moment."""

    running: int
    waiting: int
    loading: int
    cache_usage: float
    """Share of the blocks that live requests and reservations hold; cached but free is free."""
    open_reservations: int
    expired_reservations: int
    released_reservations: int
    reads_after_expiry: int
    reads_of_other_prompt: int
