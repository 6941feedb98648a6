"""Which instance gets a request that isn't scored, and that it counts as load there.

Rules:

1. Only instances that serve the model, are available and answer clients; those known not to have
   the path come last, and after them those that are held back.
2. The one with the fewest requests on its least busy rank comes first, equals in turn. Requests
   are those of the load ledger, so scored and forwarded ones see each other.
3. A request that runs a prompt is pinned to the rank it is booked on. It doesn't go to an instance that
   would wait for a prefill leg's blocks, or take nothing for them (`Connector.needs_prefill`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from balancer.core.errors import NoInstanceError, NotSplittableError
from balancer.core.fleet.lacking import LackingPaths
from balancer.core.fleet.model_lookup import find_model, nobody_answers
from balancer.core.fleet.snapshot import Fleet, Instance
from balancer.core.http.headers import Headers
from balancer.core.load.ledger import LegGuard, LegWork, LoadLedger
from balancer.core.record import RequestRecord
from balancer.core.reliability.vetting import Vetting
from indexer.core.types import RankId


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A rank of an instance."""

    instance: Instance
    rank: RankId

    @property
    def pin(self) -> Headers:
        """What pins a request to the rank; nothing where there is only one."""
        header = self.instance.rank_header(self.rank.rank)
        return () if header is None else ((b"x-data-parallel-rank", header.encode()),)


class Placing:
    """One per process."""

    def __init__(
        self,
        *,
        ledger: LoadLedger,
        clock: Callable[[], float],
        vetting: Vetting,
        is_bound: Callable[[Instance], bool],
    ) -> None:
        """`is_bound` tells of an instance that it takes no prompt without a prefill leg."""
        self.is_bound = is_bound
        self.lacking = LackingPaths()
        self._vetting = vetting
        self._ledger = ledger
        self._clock = clock
        self._turn = 0

    def places(
        self,
        fleet: Fleet,
        *,
        model: Any,
        path: str,
        record: RequestRecord,
        generates: bool = False,
    ) -> list[Place]:
        """Where a request may go, the best first. Raises BalancerError.

        `model` is what it names, "" if it could name one and doesn't, None if it can't. `generates` as in
        `EnginePath`.
        """
        instances = list(fleet.instances)
        meant = None if model is None else find_model(fleet, model)
        if meant is not None:
            record.model, record.base_model = meant.model, meant.base_model
            instances = list(fleet.serving(meant.model))
        able = [each for each in instances if each.is_available and each.role.answers_clients]
        if not able and meant is not None:
            raise nobody_answers(fleet, meant.model)
        if not able:
            raise NoInstanceError("no instance that could answer this is available")
        if generates:
            able = [each for each in able if not self.is_bound(each)]
        if not able:
            raise NotSplittableError
        self._turn += 1
        turn = self._turn % len(able)
        now_s = self._clock()
        usable = {each.id for each in self._vetting.usable(able, frozenset())}
        ordered = [self.place(each) for each in able[turn:] + able[:turn]]
        ordered.sort(
            key=lambda each: (
                each.instance.id not in usable,
                self.lacking.lacks(each.instance.id, path, now_s),
                self._requests(each.rank),
            )
        )
        return ordered

    def place(self, instance: Instance) -> Place:
        """The least busy rank of an instance."""
        return Place(instance=instance, rank=min(instance.rank_ids(), key=self._requests))

    def hold(self, place: Place) -> LegGuard:
        """Count a request there until its guard ends. What it computes isn't known."""
        work = LegWork(
            rank=place.rank,
            kind="whole",
            prompt_tokens=0,
            uncached_tokens=0,
            work_s=0.0,
            streamed=False,
        )
        return self._ledger.hold(work)

    def _requests(self, rank: RankId) -> int:
        return self._ledger.load(rank).requests
