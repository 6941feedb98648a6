"""Whether one rank has room for one more request. Pure.

A rank is full when a new prompt would wait for longer than promised, when prompts take so much of its
time that those it decodes for are slowed more than promised, or when its KV memory is nearly taken: an
engine without memory queues although it has no prompts to compute. A rank with few requests is full for
the last reason only: a few long prompts soon take all of a small memory. No figure but the number of
requests counts before rates are learned.

What prompts take of its time is a sum of expectations. Where a rank computes whatever comes as fast as it
comes, that sum says that it is busy all the time, so it counts only where answers are slowed indeed.
"""

import msgspec

from balancer.core.load.ledger import RankLoad
from balancer.core.routing.terms import queued_s
from balancer.core.settings.admission import AdmissionSettings

SLOWED = 0.15
"""Of the time of its answers: a rank whose answers lose less to prompts has time for more, whatever sums
say. Prompts that take two thirds of its time take two thirds of theirs."""


class RankLimits(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What makes a rank full."""

    settings: AdmissionSettings | None
    """None: loads can't be judged yet, or aren't to be."""
    max_requests: int | None


class RankState(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What is known of a rank."""

    load: RankLoad
    decodes: bool
    memory_tokens: int | None
    """KV memory; None: not known."""
    block_size: int


def has_room(rank: RankState, limits: RankLimits) -> bool:
    """Tell if one more request may be sent there."""
    load, settings = rank.load, limits.settings
    if limits.max_requests is not None and load.requests >= limits.max_requests:
        return False
    if settings is None:
        return True
    if _memory_is_taken(rank, settings):
        return False
    if load.requests < settings.least_requests:
        return True
    if queued_s(load) >= settings.promise_s:
        return False
    return not (rank.decodes and _stalls_answers(load, settings))


def _stalls_answers(load: RankLoad, settings: AdmissionSettings) -> bool:
    return (
        settings.prefill_share < 1
        and load.work_share >= settings.prefill_share
        and load.rates.stalled_share >= SLOWED
    )


def _memory_is_taken(rank: RankState, settings: AdmissionSettings) -> bool:
    if rank.memory_tokens is None or settings.memory_share >= 1:
        return False
    load = rank.load
    taken = load.active_blocks * rank.block_size + load.output_tokens
    return taken >= settings.memory_share * rank.memory_tokens
