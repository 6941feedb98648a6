"""Two ways to a first token: prefill where the request decodes, or elsewhere and a hand-over.

Every function is pure, everything is in seconds (docs/routing.md). For a decode rank e:

    local(e)  = queue + fixed + work + delay + stall + eviction + loading
    remote(e) = min over prefill ranks p of (prefill + transfer) + step + wait + eviction

    queue     prefill work sent there before, not yet done
    fixed     what a first token costs however short the prompt is
    work      w = uncached tokens * seconds per token
    delay     w * X: what this work costs requests that arrive later; X is observed per rank
    stall     what this work costs the requests that decode there: on a decode instance each of
              them was promised not to be disturbed, and the fuller its memory, the longer those
              wait that can't even start
    eviction  what the request pushes out of the cache, as far as others will ask for it; of a remote
              way the answer only, since what is pushed out for the prompt is priced where it is computed
    loading   bringing to the GPU what lies on slower tiers: (1 - weight) of computing it
    prefill   local(p) for one token of output
    transfer  as learned for this pair, for what e lacks
    step      e's first step
    wait      for prompts that e computes itself, beyond what the hand-over takes anyway

What both ways cost alike (decode steps, memory) is not in here: it decides which rank, not which
way. The way that takes less is taken.
"""

import msgspec

from balancer.core.fleet.snapshot import Role
from balancer.core.load.ledger import RankLoad, TransferRates
from balancer.core.routing.plan import Choice
from balancer.core.routing.terms import eviction_s, queued_s, stall_weight, work_price

_MIXED, _DECODE = Role.MIXED, Role.DECODE  # looking an enum member up costs as much as a term
OWN_TERMS = frozenset({"queue", "fixed", "work", "loading", "transfer", "step", "wait"})
"""What the request itself waits for; the rest is what it costs others."""
WAY_TERMS = OWN_TERMS | {"delay", "stall", "eviction", "prefill"}


class Offer(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A prefill rank that could compute the prompt, and what it takes to hand it over."""

    prefill: Choice
    transfer: TransferRates


def local_terms(
    load: RankLoad,
    *,
    uncached_tokens: float,
    output_tokens: float,
    loading_tokens: float,
    memory_share: float,
    role: Role,
) -> dict[str, float]:
    """What it takes if the rank computes the prompt itself.

    The price of what is pushed out counts on mixed ranks only: see docs/routing.md.
    """
    rates = load.rates
    work_s = rates.prefill_s_per_token * uncached_tokens
    queue_s = queued_s(load)
    price = work_price(load, queue_s=queue_s, work_s=work_s, memory_share=memory_share)
    terms = {
        "queue": queue_s,
        "fixed": rates.fixed_s,
        "work": work_s,
        "delay": work_s * price,
        "stall": stall_weight(memory_share, on_decode=role is _DECODE) * load.decoding * work_s,
    }
    if load.reuse_chance and role is _MIXED:
        terms["eviction"] = eviction_s(
            load, new_tokens=uncached_tokens + output_tokens, work_price=price
        )
    if loading_tokens:
        # It takes no compute: nobody behind or beside it waits for that.
        terms["loading"] = rates.prefill_s_per_token * loading_tokens
    return terms


def remote_terms(load: RankLoad, offer: Offer, *, uncached_tokens: int) -> dict[str, float]:
    """What it takes if `offer` computes the prompt and hands over what the rank lacks."""
    rates = load.rates
    transfer_s = offer.transfer.seconds(uncached_tokens)
    terms = {
        "prefill": offer.prefill.cost_s,
        "transfer": transfer_s,
        "step": rates.step_s + rates.step_s_per_request * load.requests,
    }
    if load.oldest_queued_s is not None:
        # Engines admit nobody while a long prompt takes all the tokens of their steps.
        ready_s = own_s(offer.prefill) + transfer_s
        terms["wait"] = max(0.0, queued_s(load) - ready_s)
    return terms


def best_offer(offers: tuple[Offer, ...], uncached_tokens: int) -> Offer:
    """The one that costs least, the first of equals. `offers` isn't empty."""
    if len(offers) == 1:
        return offers[0]
    return min(
        offers,
        key=lambda offer: offer.prefill.cost_s + offer.transfer.seconds(uncached_tokens),
    )


def own_s(choice: Choice) -> float:
    """Seconds to the first token that the chosen way was expected to take."""
    mine = sum(seconds for name, seconds in choice.terms.items() if name in OWN_TERMS)
    return mine + (own_s(choice.prefill) if choice.prefill else 0.0)


def way_s(choice: Choice) -> float:
    """What the chosen way was expected to take, and to cost others."""
    return sum(seconds for name, seconds in choice.terms.items() if name in WAY_TERMS)
