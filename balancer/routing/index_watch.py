"""Asks the index for every rank now and then, so that `/status` says what is so without a request.

Rules:

1. A look is a lookup of an empty prompt, for each base model of the fleet: it meets what a request's
   lookup would meet, and tells trust and epoch of every rank. Nothing is routed by it alone.
2. Its deadline is long, so a refusal is heard where requests only see that nothing came in time.
3. An answer that came too late for a request takes back no problem.
4. A rank that the index doesn't have any more is shown as unknown. While the index doesn't answer,
   what it said last is shown, beside the problem.
5. An index that another process writes is looked at first (`WatchedLookup`): what it says of a rank
   whose indexer has stopped isn't exact, in this look and in every lookup until the next.

Cost: every `LOOK_S`, two round trips per base model, 5 µs of a Redis per rank.
"""

import asyncio
from collections.abc import Callable

from balancer.core.fleet.snapshot import Fleet
from balancer.routing.router import Router
from indexer.core.hashing import Namespace
from indexer.core.index import PrefixLookup, Prompt, WatchedLookup
from indexer.core.types import RankId

LOOK_S = 1.0
DEADLINE_S = 2.0


class IndexWatch:
    """One per process, beside its router."""

    def __init__(
        self,
        *,
        index: PrefixLookup,
        router: Router,
        fleet: Callable[[], Fleet],
        clock: Callable[[], float],
    ) -> None:
        self._index = index
        self._router = router
        self._fleet = fleet
        self._clock = clock

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Once. Never raises."""
        started_s = self._clock()
        fleet = self._fleet()
        try:
            async with asyncio.timeout(DEADLINE_S):
                for model, ranks in _ranks_by_model(fleet).items():
                    if isinstance(self._index, WatchedLookup):
                        await self._index.look(model)
                    answer = await self._index.match(Prompt(Namespace(model=model), ()))
                    # Strangers are counted per lookup of a request.
                    known = {rank: answer[rank] for rank in answer.keys() & ranks}
                    self._router.learn(fleet, known)
                    self._router.known_ranks.miss(ranks - known.keys())
        except TimeoutError:
            self._router.lookups.note_late("the index doesn't answer")
        except Exception as error:  # noqa: BLE001 - as for a request: any backend, any fault
            self._router.lookups.note_failure(error)
        else:
            self._router.lookups.note_answer(self._clock() - started_s)


def _ranks_by_model(fleet: Fleet) -> dict[str, set[RankId]]:
    """Where no engine has told its model yet, none: whether the index answers can be asked anyway."""
    found: dict[str, set[RankId]] = {}
    for instance in fleet.instances:
        if instance.models is not None:
            found.setdefault(instance.models.base, set()).update(instance.rank_ids())
    return found or {"": set()}
