"""Requests whose prompts nobody reads, because their policy doesn't ask what is cached.

Rules:

1. A policy that can do without the prompt says so by `next_of`. Then tokens, keys, lookup, costs and
   predictions are left out: the request is decided and booked by its size, which is guessed.
2. Every prompt is read where something else depends on what is cached: who prefills, or whose blocks
   are fetched.
3. Of the others a share is read all the same, one in so many. So hit rates, and how right the index
   is, can still be told, and compared with those of other policies.
4. What such a decision comes to depends on the fleet alone: one plan per rank and snapshot.

Cost: a step per rank of the model.
"""

from collections.abc import Mapping, Sequence, Set

import msgspec

from balancer.core.errors import NoInstanceError, OverloadedError
from balancer.core.fleet.snapshot import Fleet, Instance
from balancer.core.load.ledger import LegWork, LoadLedger
from balancer.core.request import GenerateRequest, PromptView
from balancer.core.routing.candidates import find_pool, guess_tokens
from balancer.core.routing.plan import Candidate, Choice, Reason, RoutePlan
from balancer.core.settings.routing import RoutingSettings
from indexer.core.types import RankId

UNREAD = PromptView(unscorable="not_asked")
"""What is known of such a prompt."""


class UnreadPool(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Who could take a request of one model, and what choosing each comes to."""

    answering: Sequence[Instance]
    candidates: tuple[Candidate, ...]
    plans: Mapping[RankId, RoutePlan]

    def among(self, instances: Sequence[Instance], exclude: Set[RankId]) -> list[Candidate]:
        """Those on `instances` that aren't excluded."""
        names = {each.id for each in instances}
        return [
            each
            for each in self.candidates
            if each.rank not in exclude and each.instance.id in names
        ]


def unread_pool(fleet: Fleet, model: str, pulling: Set[str]) -> UnreadPool | None:
    """None: here every prompt is read. Raises ModelNotFoundError or NoInstanceError.

    `pulling` are the connectors that fetch blocks of peers.
    """
    key = ("unread", model)
    if key not in fleet.found:
        fleet.found[key] = _unread_pool(fleet, model, pulling)
    known: UnreadPool | None = fleet.found[key]
    return known


def _unread_pool(fleet: Fleet, model: str, pulling: Set[str]) -> UnreadPool | None:
    pool = find_pool(fleet, model)
    if pool.has_decode or any(each.connector in pulling for each in pool.answering):
        return None
    candidates = tuple(
        Candidate(rank=rank, instance=instance)
        for instance in pool.answering
        for rank in instance.rank_ids()
    )
    plans = {each.rank: _plan_of(each) for each in candidates}
    return UnreadPool(answering=pool.answering, candidates=candidates, plans=plans)


def _plan_of(candidate: Candidate) -> RoutePlan:
    # Nothing was weighed, so nobody is shown as considered.
    return RoutePlan(decode=Choice(candidate=candidate, cost_s=0.0), reason=Reason.AGGREGATED)


class Sampling:
    """Which prompts are read although nobody needs them: evenly, `share` of all."""

    def __init__(self, share: float) -> None:
        self.share = share
        self._due = 0.0

    def is_due(self) -> bool:
        """Ask once per request."""
        self._due += self.share
        if self._due < 1.0:
            return False
        self._due -= 1.0
        return True


def with_room(
    candidates: Sequence[Candidate], ledger: LoadLedger, most_requests: int
) -> Sequence[Candidate]:
    """Those that aren't full. Raises NoInstanceError or OverloadedError if there is none."""
    if not candidates:
        raise NoInstanceError("no other instance of this model is available")
    if not most_requests:
        return candidates
    found = [each for each in candidates if ledger.busy(each.rank)[0] < most_requests]
    if not found:
        raise OverloadedError("every instance of this model is at its limit of requests")
    return found


def unread_work(
    request: GenerateRequest, rank: RankId, ledger: LoadLedger, settings: RoutingSettings
) -> LegWork:
    """What booking such a request means for its rank: as much as one of which nothing is cached."""
    tokens = guess_tokens(request)
    return LegWork(
        rank=rank,
        kind="whole",
        prompt_tokens=tokens,
        uncached_tokens=tokens,
        work_s=tokens * ledger.prefill_rates(rank).prefill_s_per_token,
        streamed=request.stream,
        believed_s=settings.confirm_s,
    )
