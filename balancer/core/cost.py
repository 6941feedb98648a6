"""The cost of a candidate: the time this request takes there, and what it takes from others.

One continuous formula, every term in seconds and named in the plan (docs/routing.md):

    cost = queue + fixed + work + delay + stall + loading + in_flight + recent

    queue     prefill work sent there before, not yet done
    fixed     what a first token costs however short the prompt is
    work      w = uncached tokens * seconds per token
    delay     w * X: what this work costs requests that arrive later; X is observed per rank
    stall     what this work costs the requests that decode there
    loading   bringing to the GPU what lies on slower tiers: (1 - weight) of computing it
    in_flight what running decodes and this one's own steps add to the whole answer
    recent    breaks near-ties: what the rank computed lately, beside the others

Where a decode instance would be prefilled elsewhere, `prefill` (the cheapest prefill rank's cost),
`transfer` and `step` stand in place of everything up to `stall`.

Rules:

1. Blocks of prompts on their way count as held, as blocks in events do.
2. Rates nobody has learned yet have priors; nothing here is set per workload.
3. An unscorable prompt has a guessed length and no overlap: what decides is load.

Memory as a queue of its own and the price of evicting others' blocks aren't here yet.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from balancer.core.fleet import Role
from balancer.core.load import RankLoad
from balancer.core.plan import Candidate, Choice
from indexer.core.types import RankId

WORK_PRICE = 0.25
"""Least price of work, X, on an idle fleet: computing twice what could be computed once is never
free, so siblings wait for a prompt in flight rather than repeat it next door."""
MAX_SHARE = 0.9
STALL = 0.15
STALL_ON_DECODE = 0.5
"""On a decode instance every stalled stream was promised not to be."""
DECODE_WEIGHT = 0.25
RECENT_WEIGHT = 0.3
RECENT_PROMPTS = 1
RECENT_MIN_TOKENS = 256
"""In tiny prompts one shared block is most of the work, and still no reason to pile up."""
HEAD_DONE = 0.9
"""The oldest queued prompt counts as done up to this part, however late it is."""
TRANSFER_FIXED_S = 0.005
TRANSFER_S_PER_TOKEN = 1e-5
"""Priors until transfers are learned."""

TieBreak = Callable[[RankId], float]
"""A random draw per rank, the same one whenever asked within one decision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestShape:
    """What weighing candidates needs to know of a request."""

    prompt_tokens: int
    """Guessed from the body's size if the prompt can't be scored."""
    max_output_tokens: float = float("inf")
    session: str | None = None
    """Names the conversation, for session affinity."""


class LoadedCandidate(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A candidate with its load, and the price of prefilling elsewhere if that is the way."""

    candidate: Candidate
    load: RankLoad
    remote_s: float | None = None
    """Cost of the cheapest prefill rank; None: this rank prefills itself."""


def uncached_tokens(shape: RequestShape, candidate: Candidate) -> int:
    """Prompt tokens the candidate neither holds nor is about to hold."""
    held, predicted = candidate.overlap_tokens, candidate.predicted_tokens
    lacking = shape.prompt_tokens - (max(held, predicted))
    return max(0, lacking)  # min and max cost more than all else here


def estimate_all(shape: RequestShape, candidates: Sequence[LoadedCandidate]) -> list[Choice]:
    """The cost of every candidate, in the order given."""
    if not candidates:
        return []
    mean_s = sum(each.load.recent_work_s for each in candidates) / len(candidates)
    return [_estimate(shape, each, mean_s) for each in candidates]


def _estimate(shape: RequestShape, loaded: LoadedCandidate, mean_recent_s: float) -> Choice:
    if loaded.remote_s is None:
        terms = _here(shape, loaded)
    else:
        terms = _elsewhere(shape, loaded, loaded.remote_s)
    terms["in_flight"] = _in_flight(shape, loaded.load)
    terms["recent"] = _recent(shape, loaded.load, mean_recent_s)
    return Choice(candidate=loaded.candidate, cost_s=sum(terms.values()), terms=terms)


def _here(shape: RequestShape, loaded: LoadedCandidate) -> dict[str, float]:
    candidate, load = loaded.candidate, loaded.load
    fixed_s = load.rates.fixed_s
    work_s = load.rates.prefill_s_per_token * uncached_tokens(shape, candidate)
    queue_s = queued_s(load)
    share = min(MAX_SHARE, load.work_share)
    price = WORK_PRICE + load.arrivals_per_s * (queue_s + fixed_s + work_s) / (1 - share)
    stall = STALL_ON_DECODE if candidate.instance.role is Role.DECODE else STALL
    terms = {
        "queue": queue_s,
        "fixed": fixed_s,
        "work": work_s,
        "delay": work_s * price,
        "stall": stall * load.decoding * work_s,
    }
    if candidate.loading_tokens:
        # It takes no compute: nobody behind or beside it waits for that.
        terms["loading"] = load.rates.prefill_s_per_token * candidate.loading_tokens
    return terms


def _elsewhere(shape: RequestShape, loaded: LoadedCandidate, remote_s: float) -> dict[str, float]:
    load = loaded.load
    moved_tokens = uncached_tokens(shape, loaded.candidate)
    return {
        "prefill": remote_s,
        "transfer": TRANSFER_FIXED_S + TRANSFER_S_PER_TOKEN * moved_tokens,
        "step": load.rates.step_s + load.rates.step_s_per_request * load.requests,
    }


def queued_s(load: RankLoad) -> float:
    """Seconds until the rank has done the prefill work it was sent."""
    if load.oldest_queued_s is None:
        return 0.0
    rates = load.rates
    head_s = rates.prefill_s_per_token * load.head_tokens + rates.fixed_s
    all_s = rates.prefill_s_per_token * load.queued_tokens + rates.fixed_s
    return all_s - min(load.head_progress_s, HEAD_DONE * head_s)


def _in_flight(shape: RequestShape, load: RankLoad) -> float:
    """Its own decode steps, slowed by those in flight, and how it slows theirs."""
    rates = load.rates
    # The first token belongs to the prompt: an answer of one token takes no decode step.
    steps = min(rates.output_tokens, shape.max_output_tokens) - 1
    if steps <= 0:
        return 0.0
    step_s = rates.step_s + rates.step_s_per_request * (2 * load.requests + 1)
    return DECODE_WEIGHT * steps * step_s


def _recent(shape: RequestShape, load: RankLoad, mean_recent_s: float) -> float:
    """A share of the whole prompt's work, from -RECENT_WEIGHT to RECENT_WEIGHT.

    Without it, requests so far apart that nothing is ever in flight would all follow a first
    block that every prompt shares. Scale-free: pace, speed and prompt length cancel out. The
    prompt's own work in the denominator keeps the first few requests from counting for much.
    """
    prompt_s = load.rates.prefill_s_per_token * max(shape.prompt_tokens, RECENT_MIN_TOKENS)
    excess = (load.recent_work_s - mean_recent_s) / (mean_recent_s + RECENT_PROMPTS * prompt_s)
    return RECENT_WEIGHT * min(excess, 1.0) * prompt_s
