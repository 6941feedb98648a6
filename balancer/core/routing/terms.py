"""The terms of the cost, each a pure function in seconds (docs/routing.md says what each is for).

Whether a term counts for the request itself or for others, and for which way to a first token, is for
`core.routing.ways` and `core.routing.cost` to say.

Cost: a few arithmetic operations each. `min` and `max` would be calls, a dozen per candidate: they are
spelled out.
"""

import msgspec

from balancer.core.load.ledger import RankLoad

LEAST_PRICE = 0.25
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
MEMORY_WEIGHT = 0.3
LEAST_ACTIVE_SHARE = 0.1
EVICTION_WEIGHT = 2.0
DECODE_WEIGHT = 0.3
RECENT_WEIGHT = 0.3
RECENT_PROMPTS = 1
EVEN_UP_TO, EVEN_FROM = 0.05, 0.2
"""Over its share of the work: where a rank's low prices begin to count less, and count no more."""
RECENT_MIN_TOKENS = 256
"""In tiny prompts one shared block is most of the work, and still no reason to pile up."""


class Fullness(msgspec.Struct, frozen=True, gc=False):
    """Of one rank's KV memory, once everybody has grown by what is expected."""

    grow_tokens: float
    used_tokens: float
    share: float
    """U: of the capacity, at most MAX_MEMORY_SHARE."""


class MemoryUse(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """KV memory of one rank, were the request there."""

    active_tokens: float
    """In use by requests in flight, their outputs so far included."""
    need_tokens: float
    """Of the request's prompt, what nobody uses there now."""
    capacity_tokens: int

    def fullness(self, load: RankLoad) -> Fullness:
        """How full it will be: several terms ask."""
        grown = grow_tokens(load)
        used_tokens = self.active_tokens + self.need_tokens + grown
        share = used_tokens / self.capacity_tokens
        return Fullness(
            grown,
            used_tokens,
            share if share < MAX_MEMORY_SHARE else MAX_MEMORY_SHARE,  # noqa: FURB136
        )


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
    most_s, done_s = HEAD_DONE * head_s, load.head_progress_s
    return all_s - (most_s if most_s < done_s else done_s)  # noqa: FURB136


def work_price(load: RankLoad, *, queue_s: float, work_s: float, memory_share: float) -> float:
    """X: seconds that others lose per second of work; observed per rank, not configured."""
    taken, share = memory_share * memory_share, load.work_share
    share = taken if taken > share else share  # noqa: FURB136
    share = share if share < MAX_SHARE else MAX_SHARE  # noqa: FURB136
    # Who comes while it is computed waits for the rest of it only: half, on average.
    ahead_s = queue_s + load.rates.fixed_s + work_s / 2
    return LEAST_PRICE + load.arrivals_per_s * ahead_s / (1 - share)


def stall_weight(memory_share: float, *, on_decode: bool) -> float:
    """Per request that decodes there and second of work."""
    if not on_decode:
        return STALL
    return STALL_ON_DECODE * (1 + 2 * memory_share / (1 - memory_share))


def memory_s(load: RankLoad, memory: MemoryUse, fullness: Fullness) -> float:
    """The wait until enough is free, and a price that rises as little is left."""
    decode_s, capacity, share = load.rates.decode_s, memory.capacity_tokens, fullness.share
    if not decode_s:  # not known: nobody can say how long a wait would be
        return 0.0
    wait_s, lacking_tokens = 0.0, fullness.used_tokens - capacity
    if lacking_tokens > 0:
        freed = max(memory.active_tokens, LEAST_ACTIVE_SHARE * capacity)
        wait_s = decode_s * lacking_tokens / freed
    taken = (memory.need_tokens + fullness.grow_tokens) / capacity
    taken = taken if taken < 1.0 else 1.0  # noqa: FURB136
    return wait_s + MEMORY_WEIGHT * decode_s * taken * share / (1 - share)


def eviction_s(load: RankLoad, *, new_tokens: float, work_price: float) -> float:
    """Computing anew what `new_tokens` push out of the cache, as far as it is asked for again."""
    pushed_tokens = new_tokens - load.free_tokens
    if pushed_tokens <= 0:
        return 0.0
    again_s = load.rates.prefill_s_per_token * pushed_tokens * (1 + work_price)
    return EVICTION_WEIGHT * load.reuse_chance * again_s


def in_flight_s(load: RankLoad, *, output_tokens: float) -> float:
    """Its own decode steps, slowed by those in flight, and how it slows theirs."""
    # The first token belongs to the prompt: an answer of one token takes no decode step.
    steps = output_tokens - 1
    if steps <= 0:
        return 0.0
    rates = load.rates
    step_s = rates.step_s + rates.step_s_per_request * (2 * load.requests + 1)
    return DECODE_WEIGHT * steps * step_s


def seats_s(load: RankLoad) -> float:
    """The wait for a seat: each ends as its answer does."""
    waiting = load.requests + 1 - load.seats
    if not load.seats or waiting <= 0:
        return 0.0
    return waiting * load.rates.decode_s / load.seats


def prompt_s(load: RankLoad, prompt_tokens: int) -> float:
    """The whole prompt's work, as if nothing of it were held; never that of a tiny one."""
    tokens = prompt_tokens if prompt_tokens > RECENT_MIN_TOKENS else RECENT_MIN_TOKENS  # noqa: FURB136
    return load.rates.prefill_s_per_token * tokens


def excess_share(load: RankLoad, *, whole_s: float, mean_recent_s: float) -> float:
    """What the rank computed lately beyond the mean of all, over that mean: 0.2 for a fifth more.

    Scale-free: pace, speed and prompt length cancel out. `whole_s`, the prompt's own work, in the
    denominator keeps the first few requests from counting for much.
    """
    return (load.recent_work_s - mean_recent_s) / (mean_recent_s + RECENT_PROMPTS * whole_s)


def recent_s(*, excess: float, whole_s: float) -> float:
    """A share of the whole prompt's work, from -RECENT_WEIGHT to RECENT_WEIGHT.

    Without it, requests so far apart that nothing is ever in flight would all follow a first
    block that every prompt shares.
    """
    return RECENT_WEIGHT * (excess if excess < 1.0 else 1.0) * whole_s  # noqa: FURB136


def evenness_s(*, excess: float, work_s: float, others_s: float, mean_price: float) -> float:
    """What a rank looks too cheap for others, as far as it has done more than its share.

    `others_s` is what `work_s` there costs others, `mean_price` what a second of work costs them on
    the mean candidate. Where long prompts go, nothing lasts: the next long prompt pushes nothing out
    that anybody misses, and delays few. So they would all go to the same ranks, and short ones to the
    others. Up to a twentieth over its share a rank may be as cheap as it is; from a fifth on its work is
    as dear as the mean's. Prices are compared, not costs: who holds the prompt stays the cheapest.
    `excess` is over EVEN_UP_TO.
    """
    cheaper_s = mean_price * work_s - others_s
    if cheaper_s <= 0:
        return 0.0
    counted = (excess - EVEN_UP_TO) / (EVEN_FROM - EVEN_UP_TO)
    return cheaper_s * (counted if counted < 1.0 else 1.0)  # noqa: FURB136
