"""The cost of a candidate: the time this request takes there, and what it takes from others.

One continuous formula, every term in seconds and named in the plan (docs/routing.md):

    cost = (the cheaper way to the first token: `core.routing.ways`) + memory + in_flight + recent

    memory    waiting for KV memory, and the price of what is left of it; 0 where the rank's
              capacity isn't known
    in_flight what running decodes and this one's own steps add to the whole answer
    recent    breaks near-ties: what the rank computed lately, beside the others

Rules:

1. Blocks of prompts on their way count as held, as blocks in events do.
2. Rates nobody has learned yet have priors; nothing here is set per workload.
3. An unscorable prompt has a guessed length and no overlap: what decides is load.

The price of evicting others' blocks isn't here yet.
"""

from collections.abc import Callable, Sequence

import msgspec

from balancer.core.fleet.snapshot import Role
from balancer.core.load.ledger import RankLoad
from balancer.core.routing.plan import Candidate, Choice, OtherWay
from balancer.core.routing.ways import (
    MemoryUse,
    Offer,
    best_offer,
    grow_tokens,
    local_terms,
    remote_terms,
)
from indexer.core.types import RankId

DECODE_WEIGHT = 0.25
RECENT_WEIGHT = 0.3
RECENT_PROMPTS = 1
RECENT_MIN_TOKENS = 256
"""In tiny prompts one shared block is most of the work, and still no reason to pile up."""
MEMORY_WEIGHT = 0.3
LEAST_ACTIVE_SHARE = 0.1

TieBreak = Callable[[RankId], float]
"""A random draw per rank, the same one whenever asked within one decision."""


class RequestShape(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What weighing candidates needs to know of a request."""

    prompt_tokens: int
    """Guessed from the body's size if the prompt can't be scored."""
    max_output_tokens: float = float("inf")
    session: str | None = None
    """Names the conversation, for session affinity."""
    is_scored: bool = True
    """False: nothing is known of what ranks hold of the prompt."""


class LoadedCandidate(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A candidate with its load, and the ways open to it."""

    candidate: Candidate
    load: RankLoad
    memory: MemoryUse | None = None
    """None: its capacity isn't known."""
    offers: tuple[Offer, ...] = ()
    """Prefill ranks that could compute the prompt for it; none: it does so itself."""
    may_local: bool = True
    """Of one with offers: whether it could do without."""


def uncached_tokens(shape: RequestShape, candidate: Candidate) -> int:
    """Prompt tokens the candidate neither holds nor is about to hold."""
    held, predicted = candidate.overlap_tokens, candidate.predicted_tokens
    # `min` and `max` would cost more than all else here.
    lacking = shape.prompt_tokens - (max(predicted, held))
    return max(0, lacking)


def estimate_all(shape: RequestShape, candidates: Sequence[LoadedCandidate]) -> list[Choice]:
    """The cost of every candidate, in the order given."""
    if not candidates:
        return []
    mean_s = sum(each.load.recent_work_s for each in candidates) / len(candidates)
    return [_estimate(shape, each, mean_s) for each in candidates]


def _estimate(shape: RequestShape, loaded: LoadedCandidate, mean_recent_s: float) -> Choice:
    terms, prefill, other = _way(shape, loaded)
    load = loaded.load
    if loaded.memory is not None:
        terms["memory"] = memory_s(load, loaded.memory)
    terms["in_flight"] = _in_flight(shape, load)
    terms["recent"] = _recent(shape, load, mean_recent_s)
    return Choice(
        candidate=loaded.candidate,
        cost_s=sum(terms.values()),
        terms=terms,
        prefill=prefill,
        other=other,
    )


def _way(
    shape: RequestShape, loaded: LoadedCandidate
) -> tuple[dict[str, float], Choice | None, OtherWay | None]:
    """Terms of the way to take, who prefills, and the way not taken."""
    lacking = uncached_tokens(shape, loaded.candidate)
    if not loaded.offers:
        return _local(loaded, lacking), None, None
    offer = best_offer(loaded.offers, lacking)
    remote = remote_terms(loaded.load, offer, uncached_tokens=lacking)
    if not loaded.may_local:
        return remote, offer.prefill, None
    local = _local(loaded, lacking)
    local_s, remote_s = sum(local.values()), sum(remote.values())
    if local_s <= remote_s:
        return local, None, OtherWay(remote=True, cost_s=remote_s, terms=remote)
    return remote, offer.prefill, OtherWay(remote=False, cost_s=local_s, terms=local)


def _local(loaded: LoadedCandidate, lacking: int) -> dict[str, float]:
    memory = loaded.memory
    return local_terms(
        loaded.load,
        uncached_tokens=lacking,
        loading_tokens=loaded.candidate.loading_tokens,
        memory_share=0.0 if memory is None else memory.share(loaded.load),
        on_decode=loaded.candidate.instance.role is Role.DECODE,
    )


def memory_s(load: RankLoad, memory: MemoryUse) -> float:
    """The wait until enough is free, and a price that rises as little is left."""
    decode_s, capacity = load.rates.decode_s, memory.capacity_tokens
    over = memory.with_growth(load) - capacity
    freed = max(memory.active_tokens, LEAST_ACTIVE_SHARE * capacity)
    wait_s = decode_s * max(0.0, over) / freed
    share = memory.share(load)
    taken = min(1.0, (memory.need_tokens + grow_tokens(load)) / capacity)
    return wait_s + MEMORY_WEIGHT * decode_s * taken * share / (1 - share)


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
