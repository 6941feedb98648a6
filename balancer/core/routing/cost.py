"""The cost of a candidate: the time this request takes there, and what it takes from others.

One continuous formula, every term in seconds and named in the plan (docs/routing.md):

    cost = (the cheaper way to the first token: `core.routing.ways`)
         + memory + in_flight + recent + evenness

    memory    waiting for KV memory, and the price of what is left of it; 0 where the rank's
              capacity isn't known
    in_flight what running decodes and this one's own steps add to the whole answer
    recent    breaks near-ties: what the rank computed lately, beside the others
    evenness  what a rank that has done more than its share looks too cheap for others

Rules:

1. Blocks of prompts on their way count as held, as blocks in events do.
2. Rates nobody has learned yet have priors; nothing here is set per workload.
3. An unscorable prompt has a guessed length and no overlap: what decides is load.
"""

from collections.abc import Callable, Sequence

import msgspec

from balancer.core.load.ledger import RankLoad
from balancer.core.routing.plan import Candidate, Choice, OtherWay
from balancer.core.routing.terms import (
    EVEN_UP_TO,
    MemoryUse,
    evenness_s,
    excess_share,
    in_flight_s,
    memory_s,
    prompt_s,
    recent_s,
    seats_s,
)
from balancer.core.routing.ways import Offer, best_offer, local_terms, remote_terms
from indexer.core.types import RankId

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
    lacking = shape.prompt_tokens - (predicted if predicted > held else held)  # noqa: FURB136
    return lacking if lacking > 0 else 0  # noqa: FURB136


def output_tokens(shape: RequestShape, load: RankLoad) -> float:
    """Tokens that the answer is expected to have."""
    mean, most = load.rates.output_tokens, shape.max_output_tokens
    return most if most < mean else mean  # noqa: FURB136


def estimate_all(shape: RequestShape, candidates: Sequence[LoadedCandidate]) -> list[Choice]:
    """The cost of every candidate, in the order given."""
    if not candidates:
        return []
    mean_s = sum([each.load.recent_work_s for each in candidates]) / len(candidates)
    found = [_estimate(shape, each, mean_s) for each in candidates]
    _even_out(found)
    return [
        Choice(
            candidate=loaded.candidate,
            cost_s=sum(terms.values()),
            terms=terms,
            prefill=prefill,
            other=other,
        )
        for loaded, (terms, prefill, other, _) in zip(candidates, found, strict=True)
    ]


_Estimate = tuple[dict[str, float], Choice | None, OtherWay | None, float]
"""Terms of one candidate, the two ways, and its excess: before it is held against the others."""


def _estimate(shape: RequestShape, loaded: LoadedCandidate, mean_recent_s: float) -> _Estimate:
    load, memory = loaded.load, loaded.memory
    answer_tokens = output_tokens(shape, load)
    if memory is None:
        terms, prefill, other = _way(shape, loaded, answer_tokens, 0.0)
    else:
        fullness = memory.fullness(load)
        terms, prefill, other = _way(shape, loaded, answer_tokens, fullness.share)
        terms["memory"] = memory_s(load, memory, fullness)
    terms["in_flight"] = in_flight_s(load, output_tokens=answer_tokens)
    if load.seats:
        terms["seats"] = seats_s(load)
    whole_s = prompt_s(load, shape.prompt_tokens)
    excess = excess_share(load, whole_s=whole_s, mean_recent_s=mean_recent_s)
    terms["recent"] = recent_s(excess=excess, whole_s=whole_s)
    return terms, prefill, other, excess


def _even_out(found: Sequence[_Estimate]) -> None:
    """Add to the terms of ranks that did more than their share what they look too cheap for others."""
    over = [(terms, excess) for terms, _, _, excess in found if excess > EVEN_UP_TO]
    if not over:
        return
    work_s = others_s = 0.0
    for terms, _, _, _ in found:
        if terms.get("work"):
            work_s += terms["work"]
            others_s += _others_s(terms)
    for terms, excess in over:
        if terms.get("work"):
            seconds = evenness_s(
                excess=excess,
                work_s=terms["work"],
                others_s=_others_s(terms),
                # Of sums: who has next to nothing to compute pushes out its answer all the same.
                mean_price=others_s / work_s,
            )
            if seconds:
                terms["evenness"] = seconds


def _others_s(terms: dict[str, float]) -> float:
    """What the work costs those who come later."""
    return terms["delay"] + terms.get("eviction", 0.0)


def _way(
    shape: RequestShape, loaded: LoadedCandidate, answer_tokens: float, memory_share: float
) -> tuple[dict[str, float], Choice | None, OtherWay | None]:
    """Terms of the way to take, who prefills, and the way not taken."""
    load = loaded.load
    lacking = uncached_tokens(shape, loaded.candidate)
    offer = remote = None
    if loaded.offers:
        offer = best_offer(loaded.offers, lacking)
        remote = remote_terms(load, offer, uncached_tokens=lacking)
        if not loaded.may_local:
            return remote, offer.prefill, None
    local = local_terms(
        load,
        uncached_tokens=lacking,
        output_tokens=answer_tokens,
        loading_tokens=loaded.candidate.loading_tokens,
        memory_share=memory_share,
        role=loaded.candidate.instance.role,
    )
    if offer is None or remote is None:
        return local, None, None
    local_s, remote_s = sum(local.values()), sum(remote.values())
    if local_s <= remote_s:
        return local, None, OtherWay(remote=True, cost_s=remote_s, terms=remote)
    return remote, offer.prefill, OtherWay(remote=False, cost_s=local_s, terms=local)
