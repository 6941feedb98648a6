"""What a rank's load is made of, together in one place of memory.

Rules:

1. Figures are as of the last change of the rank's book; a load is as of the moment it is asked for.
2. They are kept as bytes. As attributes each is an object somewhere else, and when a request comes
   those of all ranks are far from the processor: twenty waits for memory per rank, of which three
   are left.

Cost: a load is three exponentials and one struct; it is made for every candidate of every request.
"""

from math import exp
from struct import Struct
from typing import Final

from balancer.core.load.fading import faded
from balancer.core.load.ledger import RankLoad, RankRates

RATE_TAU_S = 20.0
RECENT_TAU_S = 600.0
MIN_AGE_S = 1.0
"""A rank younger than this has seen too little for a rate."""


FIGURES: Final = Struct("=d3q?dq7dq3dq")
"""As `load_of` takes them apart: by names they would take three times as long to put together."""
MOST_TOKENS: Final = 2**62
"""That fit: a peer may tell whatever it likes."""


def countable(tokens: int) -> int:
    """As many as fit."""
    return tokens if -MOST_TOKENS < tokens < MOST_TOKENS else MOST_TOKENS


def load_of(packed: bytes, now_s: float, rates: RankRates) -> RankLoad | None:
    """The load of a rank with these figures; None: something is due.

    Due is a leg that is expected to be computed, or a prediction that expires, though nobody calls.
    `recent_s` is as it stood at `recent_at_s`, arrivals and work as they stood at `counted_s`.
    """
    (
        due_s,
        requests,
        queued_tokens,
        decoding,
        has_queue,
        oldest_s,
        head_tokens,
        since_s,
        turned_s,
        counted_s,
        arrivals,
        work_s,
        recent_s,
        recent_at_s,
        active_blocks,
        first_s_sum,
        reuse_chance,
        free_tokens,
        seats,
    ) = FIGURES.unpack(packed)
    if due_s <= now_s:
        return None
    # A young rank's sums stand for less time than tau.
    age_s = max(MIN_AGE_S, now_s - since_s)
    warm_s = RATE_TAU_S * (1 - exp(-age_s / RATE_TAU_S))
    per_s = exp((counted_s - now_s) / RATE_TAU_S) / warm_s
    decoded_s = decoding * now_s - first_s_sum
    return RankLoad(
        requests=requests,
        queued_tokens=queued_tokens,
        decoding=decoding,
        oldest_queued_s=oldest_s if has_queue else None,
        head_tokens=head_tokens,
        head_progress_s=now_s - max(oldest_s, turned_s) if has_queue else 0.0,
        arrivals_per_s=arrivals * per_s,
        work_share=work_s * per_s,
        recent_work_s=faded(recent_s, at_s=recent_at_s, now_s=now_s, tau_s=RECENT_TAU_S),
        active_blocks=active_blocks,
        output_tokens=(decoded_s if decoded_s > 0 else 0.0)
        / (rates.step_s + rates.step_s_per_request * requests),
        reuse_chance=reuse_chance,
        free_tokens=free_tokens,
        seats=seats,
        rates=rates,
    )
