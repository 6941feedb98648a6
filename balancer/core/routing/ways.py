"""Two ways to a first token: prefill where the request decodes, or elsewhere and a hand-over.

Every function is pure, everything is in seconds (docs/routing.md). For a decode rank e:

    local(e)  = queue + fixed + work + delay + stall + loading
    remote(e) = min over prefill ranks p of (prefill + transfer) + step + wait

    queue     prefill work sent there before, not yet done
    fixed     what a first token costs however short the prompt is
    work      w = uncached tokens * seconds per token
    delay     w * X: what this work costs requests that arrive later; X is observed per rank
    stall     what this work costs the requests that decode there: on a decode instance each of
              them was promised not to be disturbed, and the fuller its memory, the longer those
              wait that can't even start
    loading   bringing to the GPU what lies on slower tiers: (1 - weight) of computing it
    prefill   local(p) for one token of output
    transfer  as learned for this pair, for what e lacks
    step      e's first step
    wait      for prompts that e computes itself, beyond what the hand-over takes anyway

What both ways cost alike (decode steps, memory) is not in here: it decides which rank, not which
way. The way that takes less is taken.
"""

import msgspec

from balancer.core.load.ledger import RankLoad, TransferRates
from balancer.core.routing.plan import Choice

WORK_PRICE = 0.25
"""Least price of work, X, on an idle fleet: computing twice what could be computed once is never
free, so siblings wait for a prompt in flight rather than repeat it next door."""
MAX_SHARE = 0.9
STALL = 0.15
STALL_ON_DECODE = 0.5
"""On a decode instance every stalled stream was promised not to be."""
HEAD_DONE = 0.9
"""The oldest queued prompt counts as done up to this part, however late it is."""
MAX_MEMORY_SHARE = 0.97
GROW = 0.5
"""Of the mean output: what each request in flight still adds, on average."""
OWN_TERMS = frozenset({"queue", "fixed", "work", "loading", "transfer", "step", "wait"})
"""What the request itself waits for; the rest is what it costs others."""
WAY_TERMS = OWN_TERMS | {"delay", "stall", "prefill"}


class MemoryUse(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """KV memory of one rank, were the request there."""

    active_tokens: float
    """In use by requests in flight, their outputs so far included."""
    need_tokens: float
    """Of the request's prompt, what nobody uses there now."""
    capacity_tokens: int

    def with_growth(self, load: RankLoad) -> float:
        """Tokens in use once everybody has grown by what is expected."""
        return self.active_tokens + self.need_tokens + grow_tokens(load)

    def share(self, load: RankLoad) -> float:
        """U: of the capacity, at most MAX_MEMORY_SHARE."""
        return min(MAX_MEMORY_SHARE, self.with_growth(load) / self.capacity_tokens)


class Offer(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A prefill rank that could compute the prompt, and what it takes to hand it over."""

    prefill: Choice
    transfer: TransferRates


def grow_tokens(load: RankLoad) -> float:
    """What the requests in flight, and one more, still add."""
    return GROW * load.rates.output_tokens * (load.requests + 1)


def queued_s(load: RankLoad) -> float:
    """Seconds until the rank has done the prefill work it was sent."""
    if load.oldest_queued_s is None:
        return 0.0
    rates = load.rates
    head_s = rates.prefill_s_per_token * load.head_tokens + rates.fixed_s
    all_s = rates.prefill_s_per_token * load.queued_tokens + rates.fixed_s
    return all_s - min(load.head_progress_s, HEAD_DONE * head_s)


def stall_weight(memory_share: float, *, on_decode: bool) -> float:
    """Per request that decodes there and second of work."""
    if not on_decode:
        return STALL
    return STALL_ON_DECODE * (1 + 2 * memory_share / (1 - memory_share))


def local_terms(
    load: RankLoad,
    *,
    uncached_tokens: float,
    loading_tokens: float,
    memory_share: float,
    on_decode: bool,
) -> dict[str, float]:
    """What it takes if the rank computes the prompt itself."""
    rates = load.rates
    work_s = rates.prefill_s_per_token * uncached_tokens
    queue_s = queued_s(load)
    share = min(MAX_SHARE, max(load.work_share, memory_share * memory_share))
    # Who comes while it is computed waits for the rest of it only: half, on average.
    ahead_s = queue_s + rates.fixed_s + work_s / 2
    price = WORK_PRICE + load.arrivals_per_s * ahead_s / (1 - share)
    terms = {
        "queue": queue_s,
        "fixed": rates.fixed_s,
        "work": work_s,
        "delay": work_s * price,
        "stall": stall_weight(memory_share, on_decode=on_decode) * load.decoding * work_s,
    }
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
