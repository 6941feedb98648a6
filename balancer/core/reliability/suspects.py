"""Who gets no further attempt at one request, by what its failures say of those who took part.

Rules:

1. An engine that failed its answer is out.
2. A hand-over that failed is the prefill engine's first of all: it has died since, or restarted and
   is another one than it was taken for. The decode engine is out the second time.
3. A lease that ended, and what is to be done again as it was, are nobody's fault.
4. What failed an engine may be the prompt's doing (a 500, silence, an end in the middle), so it isn't asked again
   by this request: it is `spent`, whoever is left.
5. Who couldn't be reached, was full (503) or handed over may be well again when nobody else is left: then only
   the `latest`, who failed just now, is passed over.
6. If nobody is left then either, hand-overs may have failed at those who were to load: `instead` of
   who handed over they are out.

Cost: two sets per failure.
"""

from collections.abc import Iterator

from balancer.core.errors import (
    BalancerError,
    EngineError,
    EngineRefusedError,
    HandOverFailedError,
)
from balancer.core.fleet.snapshot import Instance
from balancer.core.reliability.tries import UNSEEN
from balancer.core.routing.plan import RoutePlan
from indexer.core.types import InstanceId, RankId

_FULL = 503


class Suspects:
    """Of one request."""

    def __init__(self) -> None:
        self.ranks: frozenset[RankId] = frozenset()
        self.latest: frozenset[RankId] = frozenset()
        self.spent: frozenset[RankId] = frozenset()
        self.instead: frozenset[RankId] = frozenset()
        self._could_not_load: set[InstanceId] = set()

    def exclusions(self) -> Iterator[frozenset[RankId]]:
        """Whom to pass over, first of all; what else to try while nobody is left."""
        yield self.ranks
        yield self.latest | self.spent
        if self._could_not_load:
            yield self.instead | self.spent

    def note(self, error: BalancerError, plan: RoutePlan) -> Instance | None:
        """An attempt at `plan` failed. Returns who may be another engine than it was taken for."""
        target = plan.decode.candidate.instance
        self.latest = frozenset()
        if not isinstance(error, EngineError):
            return None
        self.instead |= frozenset(target.rank_ids())
        if not isinstance(error, HandOverFailedError) or plan.prefill is None:
            self._leave_out(target)
            if _may_be_the_prompt(error):
                self.spent |= self.latest
            return None
        if target.id in self._could_not_load:
            self._leave_out(target)
        self._could_not_load.add(target.id)
        source = plan.prefill.candidate.instance
        self._leave_out(source)
        return source

    def _leave_out(self, instance: Instance) -> None:
        self.latest |= frozenset(instance.rank_ids())
        self.ranks |= self.latest


def _may_be_the_prompt(error: EngineError) -> bool:
    """Whether the engine may have failed at this very request, and would do so again."""
    if isinstance(error, EngineRefusedError):
        return error.status != _FULL
    return not isinstance(error, (*UNSEEN, HandOverFailedError))
