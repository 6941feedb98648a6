"""What became of one request, and of all of them.

Rules:

1. Times are the client's: TTFT from sending (connecting included) to the first token, E2E to the end.
   A request that was sent late counts from when it was sent; how late is told apart.
2. Only whole answers have times, tokens and an engine; the others are counted by kind of error.
3. Good is a whole answer whose TTFT and mean pause between tokens are within the limits given. The
   share is of all requests that were due, failed ones included: what wasn't served wasn't good.
4. Cached ratio is over answers that told their cached tokens; None if none did: unknown isn't 0.

Cost: sorting, once per figure.
"""

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, floor
from statistics import fmean

LATE_S = 0.05
"""If the client's p99 lateness is over this, its own machine has become part of what it measures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One request that was due."""

    line: int
    session: str | None
    at_s: float
    """When it was due, after the first."""
    late_s: float = 0.0
    error: str | None = None
    """Kind of failure; None: a whole answer."""
    ttft_s: float = 0.0
    e2e_s: float = 0.0
    gaps_s: Sequence[float] = field(default_factory=lambda: array("f"))
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int = 0
    engine: str | None = None
    """As the answer's headers name it."""

    @property
    def itl_s(self) -> float:
        """Mean pause between tokens; 0 with fewer than two."""
        return fmean(self.gaps_s) if self.gaps_s else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a good answer keeps; None: anything goes."""

    ttft_s: float | None = None
    itl_s: float | None = None

    @property
    def are_given(self) -> bool:
        return self.ttft_s is not None or self.itl_s is not None

    def are_kept_by(self, outcome: Outcome) -> bool:
        return (
            outcome.error is None
            and (self.ttft_s is None or outcome.ttft_s <= self.ttft_s)
            and (self.itl_s is None or outcome.itl_s <= self.itl_s)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How a figure is spread, in seconds."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    most: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShare:
    """What one engine answered."""

    engine: str
    requests: int
    share: float
    prompt_tokens: int
    cached_ratio: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All figures of a replay."""

    planned: int
    """In the trace, within the limit; more than `due` if it was stopped."""
    due: int
    answered: int
    errors: dict[str, int]
    duration_s: float
    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    ttft_s: Spread | None
    itl_s: Spread | None
    e2e_s: Spread | None
    late_s: Spread | None
    good: int | None
    """None: no limits were given."""
    goodput: float | None
    good_per_s: float | None
    cached_ratio: float | None
    engines: Sequence[EngineShare]

    @property
    def kept_up(self) -> bool:
        """The client sent on time."""
        return self.late_s is None or self.late_s.p99 <= LATE_S

    @property
    def most_over_mean(self) -> float | None:
        """Requests of the busiest engine over the mean."""
        counts = [each.requests for each in self.engines]
        return max(counts) / fmean(counts) if counts else None


def summarize(
    outcomes: Sequence[Outcome], *, planned: int, duration_s: float, limits: Limits
) -> Report:
    """All figures of `outcomes`."""
    whole = [each for each in outcomes if each.error is None]
    sent = [each for each in outcomes if each.error not in NOT_SENT]
    seconds = max(duration_s, 1e-9)
    good = sum(map(limits.are_kept_by, outcomes)) if limits.are_given else None
    return Report(
        planned=planned,
        due=len(outcomes),
        answered=len(whole),
        errors=dict(Counter(each.error for each in outcomes if each.error is not None)),
        duration_s=duration_s,
        requests_per_s=len(whole) / seconds,
        prompt_tokens_per_s=sum(each.prompt_tokens or 0 for each in whole) / seconds,
        output_tokens_per_s=sum(each.output_tokens for each in whole) / seconds,
        ttft_s=spread([each.ttft_s for each in whole]),
        itl_s=spread([gap for each in whole for gap in each.gaps_s]),
        e2e_s=spread([each.e2e_s for each in whole]),
        late_s=spread([each.late_s for each in sent]),
        good=good,
        goodput=None if good is None or not outcomes else good / len(outcomes),
        good_per_s=None if good is None else good / seconds,
        cached_ratio=cached_ratio(whole),
        engines=_engines(whole),
    )


NOT_SENT = frozenset({"in_flight_limit"})
"""Errors of requests that never left."""


def cached_ratio(outcomes: Sequence[Outcome]) -> float | None:
    """Cached over prompt tokens, of those that told both."""
    told = [(each.cached_tokens, each.prompt_tokens) for each in outcomes]
    known = [(cached, prompt) for cached, prompt in told if cached is not None and prompt]
    prompt_tokens = sum(prompt for _, prompt in known)
    return sum(cached for cached, _ in known) / prompt_tokens if known else None


def spread(values: Sequence[float]) -> Spread | None:
    """None if there are no values."""
    if not values:
        return None
    ordered = sorted(values)
    return Spread(
        mean=fmean(ordered),
        p50=_percentile(ordered, 0.5),
        p90=_percentile(ordered, 0.9),
        p95=_percentile(ordered, 0.95),
        p99=_percentile(ordered, 0.99),
        most=ordered[-1],
    )


def _percentile(ordered: Sequence[float], fraction: float) -> float:
    place = fraction * (len(ordered) - 1)
    low, high = ordered[floor(place)], ordered[ceil(place)]
    return low + (high - low) * (place - floor(place))


def _engines(whole: Sequence[Outcome]) -> list[EngineShare]:
    by_engine: dict[str, list[Outcome]] = {}
    for each in whole:
        if each.engine is not None:
            by_engine.setdefault(each.engine, []).append(each)
    return [
        EngineShare(
            engine=name,
            requests=len(own),
            share=len(own) / len(whole),
            prompt_tokens=sum(each.prompt_tokens or 0 for each in own),
            cached_ratio=cached_ratio(own),
        )
        for name, own in sorted(by_engine.items())
    ]
