"""Formulas of other balancers, on what we know: to define saturation, and to compare with.

They are what their documents say, fed with exact events and with prompts on their way, which none
of the products has all of. Not the products: those are compared over HTTP, in real time.

| name | prefers |
| --- | --- |
| `uncached_1`, `uncached_4` | least weight * uncached tokens + queued uncached tokens + 16 per request in flight |
| `matched_load` | most of overlap / prompt - 0.5 * requests / most requests anywhere |
| `cache_aware` | the longest overlap if it is over half of the prompt, else the least loaded; the least loaded, too, if requests differ by more than 64 and by half |
"""

from collections.abc import Callable, Sequence

from balancer.core.routing.cost import (
    LoadedCandidate,
    RequestShape,
    TieBreak,
    estimate_all,
    uncached_tokens,
)
from balancer.core.routing.plan import Choice
from balancer.core.routing.policies import Turns
from indexer.core.types import RankId

Score = Callable[[RequestShape, Sequence[LoadedCandidate]], list[float]]
"""One per candidate, the least is preferred."""

REQUEST_TOKENS = 16
LOAD_WEIGHT = 0.5
BALANCE_REQUESTS = 64
BALANCE_RATIO = 1.5
MATCH_SHARE = 0.5


class Formula:
    """A policy by its scores; of equals the one chosen longest ago."""

    def __init__(self, score: Score) -> None:
        self._score = score
        self._turns = Turns()

    def choose(
        self, shape: RequestShape, candidates: Sequence[LoadedCandidate], draw: TieBreak
    ) -> list[Choice]:
        choices = estimate_all(shape, candidates)
        scores = self._score(shape, candidates)
        places = [self._turns.place(each.candidate) for each in candidates]
        draws = [draw(each.candidate.rank) for each in candidates]
        ordered = sorted(
            range(len(choices)),
            key=lambda number: (scores[number], places[number], draws[number]),
        )
        return [choices[number] for number in ordered]

    def chosen(self, rank: RankId) -> None:
        self._turns.chosen(rank)


def uncached(weight: float) -> Score:
    """Work in tokens, as balancers that follow events count it."""

    def score(shape: RequestShape, candidates: Sequence[LoadedCandidate]) -> list[float]:
        return [
            weight * uncached_tokens(shape, each.candidate)
            + each.load.queued_tokens
            + REQUEST_TOKENS * each.load.requests
            for each in candidates
        ]

    return score


def matched_load(shape: RequestShape, candidates: Sequence[LoadedCandidate]) -> list[float]:
    """Share of the prompt that is held, less half of the share of the busiest one's load."""
    most = max((each.load.requests for each in candidates), default=0) or 1
    return [
        uncached_tokens(shape, each.candidate) / max(1, shape.prompt_tokens)
        + LOAD_WEIGHT * each.load.requests / most
        for each in candidates
    ]


def cache_aware(shape: RequestShape, candidates: Sequence[LoadedCandidate]) -> list[float]:
    """The longest prefix if it is worth it and load is even enough; else the least loaded."""
    requests = [each.load.requests for each in candidates]
    most, least = max(requests), min(requests)
    is_uneven = most - least > BALANCE_REQUESTS and most > BALANCE_RATIO * least
    lacking = [uncached_tokens(shape, each.candidate) for each in candidates]
    if is_uneven or min(lacking) > MATCH_SHARE * shape.prompt_tokens:
        return [float(each) for each in requests]
    return [float(each) for each in lacking]


FORMULAS: dict[str, Score] = {
    "uncached_1": uncached(1.0),
    "uncached_4": uncached(4.0),
    "matched_load": matched_load,
    "cache_aware": cache_aware,
}
