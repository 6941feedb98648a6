"""What a run came to, in numbers.

`goodput` is the share of calls that were served as promised: the first token within half a second
more than the whole prompt takes on an idle engine, and tokens at least a third as fast as there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import msgspec

from kvlb.bench.play import Outcome
from simulator.core.settings import EngineSettings

SLACK_S = 0.5
"""Of a promise: how long a prompt may wait before it is computed."""
SLOWEST_ITL = 3.0
"""Of a promise: times an idle engine's time between tokens."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One run. All times in seconds."""

    ttft_mean: float
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    e2e_mean: float
    e2e_p99: float
    goodput: float
    """Share of calls served as promised."""
    cached: float
    """Share of prompt tokens found in a cache."""
    most_over_mean: float
    """Work of the engine that had most, over the mean: its uncached prompt tokens."""
    calls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """How a figure is shown and compared."""

    name: str
    title: str
    more_is_better: bool = False


METRICS: Mapping[str, Metric] = {
    each.name: each
    for each in (
        Metric(name="ttft_mean", title="TTFT mean"),
        Metric(name="ttft_p50", title="TTFT p50"),
        Metric(name="ttft_p90", title="TTFT p90"),
        Metric(name="ttft_p99", title="TTFT p99"),
        Metric(name="e2e_mean", title="E2E mean"),
        Metric(name="e2e_p99", title="E2E p99"),
        Metric(name="goodput", title="goodput", more_is_better=True),
    )
}
"""What policies are judged by."""


def summarize(outcomes: Sequence[Outcome], engine: EngineSettings, engines: int) -> Figures:
    """Figures of a run that has ended; `engine` is what promises go by."""
    firsts_s = sorted(each.first_s - each.arrived_s for each in outcomes)
    ends_s = sorted(each.ended_s - each.arrived_s for each in outcomes)
    prompt_tokens = sum(each.call.prompt.tokens for each in outcomes)
    return Figures(
        ttft_mean=fmean(firsts_s),
        ttft_p50=percentile(firsts_s, 0.5),
        ttft_p90=percentile(firsts_s, 0.9),
        ttft_p99=percentile(firsts_s, 0.99),
        e2e_mean=fmean(ends_s),
        e2e_p99=percentile(ends_s, 0.99),
        goodput=fmean(keeps_promise(each, engine) for each in outcomes),
        cached=sum(each.cached_tokens for each in outcomes) / prompt_tokens,
        most_over_mean=most_over_mean(outcomes, engines),
        calls=len(outcomes),
    )


def percentile(ordered: Sequence[float], share: float) -> float:
    """Of sorted values."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def most_over_mean(outcomes: Sequence[Outcome], engines: int) -> float:
    """How unevenly the uncached tokens were spread."""
    work: dict[object, int] = {}
    for each in outcomes:
        tokens = each.call.prompt.tokens - each.cached_tokens
        work[each.rank] = work.get(each.rank, 0) + tokens
    return max(work.values()) * engines / sum(work.values())


def keeps_promise(each: Outcome, engine: EngineSettings, slack_s: float = SLACK_S) -> bool:
    """Whether it was served as promised, if its prompt may wait for `slack_s`."""
    call = each.call
    promised_s = slack_s + call.prompt.tokens / engine.prefill_tokens_per_s
    if each.first_s - each.arrived_s > promised_s:
        return False
    slowest_s = SLOWEST_ITL * engine.inter_token_ms / 1000
    return each.ended_s - each.first_s <= slowest_s * (call.output_tokens - 1)
