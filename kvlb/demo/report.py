"""What the two runs of the demo measured, compared and judged.

Rules:

1. Cached ratio = 1 - prefilled tokens / prompt tokens, both from the engines' own counters.
   Prefilled are the prompt tokens that any engine computed; prompt tokens are those of the
   requests that clients got answered (a prefill leg's copy of the prompt is not counted again).
   So what a decode engine was sent by a transfer never counts as cached: somebody computed it.
2. Time to first token is the client's: from sending the request to the first piece of text.
3. The demo passes when every criterion passes; each is shown with its figure.

Cost: none worth naming; some hundred values.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import ceil, floor
from typing import Any

LEAST_CACHED_GAIN = 1.5
MOST_TTFT_SHARE = 0.7
SKIPPED = "skipped"
NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedRequest:
    """One request as the client saw it."""

    conversation: int
    turn: int
    text: str
    ttft_s: float
    instance: str
    """Alias of the instance that answered."""
    prefill: str
    """Alias of the instance that ran the prefill leg, `skipped` or `none`."""
    reason: str
    overlap_tokens: int | None
    """What the balancer predicted."""
    prompt_tokens: int | None
    cached_tokens: int | None
    """What the engine reported."""

    @property
    def ran_prefill_leg(self) -> bool:
        return self.prefill not in {SKIPPED, NONE}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCounts:
    """Sums of a fleet's own counters."""

    prompt_tokens: int
    """Prompts of answered requests: counted on the instances that answer clients."""
    prefilled_tokens: int
    """Prompt tokens computed, on every instance."""

    @property
    def cached_ratio(self) -> float:
        """Share of the prompts that nobody had to compute."""
        if self.prompt_tokens <= 0:
            return 0.0
        return max(0.0, 1 - self.prefilled_tokens / self.prompt_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRun:
    """One policy's pass over the workload."""

    policy: str
    requests: tuple[RoutedRequest, ...]
    """Ordered by conversation and turn."""
    counts: EngineCounts
    duration_s: float

    @property
    def ttft_p50_s(self) -> float:
        return percentile([each.ttft_s for each in self.requests], 0.5)

    @property
    def ttft_p99_s(self) -> float:
        return percentile([each.ttft_s for each in self.requests], 0.99)

    @property
    def prefill_legs_run(self) -> int:
        return sum(each.ran_prefill_leg for each in self.requests)

    @property
    def prefill_legs_skipped(self) -> int:
        return sum(each.prefill == SKIPPED for each in self.requests)

    def to_json(self) -> dict[str, Any]:
        """Figures and requests, without the texts."""
        return {
            "policy": self.policy,
            "cached_ratio": round(self.counts.cached_ratio, 4),
            "prompt_tokens": self.counts.prompt_tokens,
            "prefilled_tokens": self.counts.prefilled_tokens,
            "ttft_p50_s": round(self.ttft_p50_s, 4),
            "ttft_p99_s": round(self.ttft_p99_s, 4),
            "prefill_legs_run": self.prefill_legs_run,
            "prefill_legs_skipped": self.prefill_legs_skipped,
            "duration_s": round(self.duration_s, 2),
            "requests": [
                {name: value for name, value in asdict(each).items() if name != "text"}
                for each in self.requests
            ],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Criterion:
    """One thing that must hold for the demo to pass."""

    name: str
    figure: str
    required: str
    passed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoReport:
    """Both runs and the verdict."""

    ours: PolicyRun
    theirs: PolicyRun
    criteria: tuple[Criterion, ...]

    @property
    def passed(self) -> bool:
        return all(each.passed for each in self.criteria)

    def to_json(self) -> dict[str, Any]:
        """Everything a script may want to read."""
        return {
            "passed": self.passed,
            "criteria": [asdict(each) for each in self.criteria],
            "runs": [self.ours.to_json(), self.theirs.to_json()],
        }


def judge(ours: PolicyRun, theirs: PolicyRun) -> DemoReport:
    """Hold the two runs against the demo's criteria."""
    criteria = (
        _cached_gain(ours, theirs),
        _ttft_share(ours, theirs),
        _equal_texts(ours, theirs),
        Criterion(
            name="prefill legs run",
            figure=str(ours.prefill_legs_run),
            required="≥ 1",
            passed=ours.prefill_legs_run >= 1,
        ),
        Criterion(
            name="prefill legs skipped",
            figure=str(ours.prefill_legs_skipped),
            required="≥ 1",
            passed=ours.prefill_legs_skipped >= 1,
        ),
    )
    return DemoReport(ours=ours, theirs=theirs, criteria=criteria)


def percentile(values: Sequence[float], fraction: float) -> float:
    """Value below which `fraction` of `values` lies, interpolated; 0 where there are none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = fraction * (len(ordered) - 1)
    low, high = ordered[floor(place)], ordered[ceil(place)]
    return low + (high - low) * (place - floor(place))


def _cached_gain(ours: PolicyRun, theirs: PolicyRun) -> Criterion:
    mine, other = ours.counts.cached_ratio, theirs.counts.cached_ratio
    return Criterion(
        name="cached ratio",
        figure=f"{mine:.3f} = {mine / other:.2f} x {other:.3f}" if other else f"{mine:.3f} vs 0",
        required=f"≥ {LEAST_CACHED_GAIN} x round robin's",
        passed=mine > 0 and mine >= LEAST_CACHED_GAIN * other,
    )


def _ttft_share(ours: PolicyRun, theirs: PolicyRun) -> Criterion:
    mine, other = ours.ttft_p50_s, theirs.ttft_p50_s
    share = f"{mine / other:.2f}" if other else "∞"
    return Criterion(
        name="TTFT p50",
        figure=f"{mine * 1000:.0f} ms = {share} x {other * 1000:.0f} ms",
        required=f"≤ {MOST_TTFT_SHARE} x round robin's",
        passed=other > 0 and mine <= MOST_TTFT_SHARE * other,
    )


def _equal_texts(ours: PolicyRun, theirs: PolicyRun) -> Criterion:
    mine, other = _texts(ours), _texts(theirs)
    equal = sum(text == other.get(key) for key, text in mine.items())
    total = len(mine.keys() | other.keys())
    return Criterion(
        name="equal texts",
        figure=f"{equal} of {total}",
        required="every request",
        passed=total > 0 and equal == total and all(mine.values()),
    )


def _texts(run: PolicyRun) -> dict[tuple[int, int], str]:
    return {(each.conversation, each.turn): each.text for each in run.requests}
