"""Cuts short the waiting for what a prefill engine hands over, once that engine is lost.

A decode engine whose blocks don't come says nothing: it waits for minutes, or without an end. So
both legs run again, with another prefill engine.

Rules:

1. It is watched from the good end of the prefill leg, which notices by itself, to the first token
   of the answer: by then the blocks are read.
2. Lost is who was well and isn't any more, who left the fleet, and who lives another life under
   other engine ids. Who was thought unwell already when its leg ended well isn't lost by that.

Cost: an entry per waiting request; one look at each every `LOOK_S` while there is any.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from balancer.core.errors import EngineClosedError
from balancer.core.fleet.snapshot import Fleet, Instance
from balancer.dataplane.one_leg import PrefillLegError
from indexer.core.types import InstanceId

LOOK_S = 0.25


class Waiting:
    """One request's wait."""

    __slots__ = ("_watch", "limit", "source")

    def __init__(self, watch: "SourceWatch", source: InstanceId, limit: asyncio.Timeout) -> None:
        self._watch = watch
        self.source = source
        self.limit = limit

    def begin(self) -> None:
        """The prefill leg has ended well."""
        self._watch.add(self)

    def end(self) -> None:
        """The answer's first token is here, or nobody waits for it any more."""
        self._watch.remove(self)
        if not self.limit.expired():
            self.limit.reschedule(None)  # it may be about to


class SourceWatch:
    """Everybody who waits. One per process."""

    def __init__(self, fleet: Callable[[], Fleet]) -> None:
        self._fleet = fleet
        self._waiting: dict[Waiting, Instance | None] = {}
        """With what was last known of the source."""
        self._timer: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def over(self, source: InstanceId) -> AsyncIterator[Waiting]:
        """The legs that `source` hands over between. Raises PrefillLegError when it is lost."""
        limit = asyncio.timeout(None)
        waiting = Waiting(self, source, limit)
        try:
            async with limit:
                try:
                    yield waiting
                finally:
                    waiting.end()
        except TimeoutError as error:
            if not limit.expired():
                raise
            lost = EngineClosedError("the prefill engine was lost before its blocks were read")
            raise PrefillLegError(lost) from error

    def add(self, waiting: Waiting) -> None:
        self._waiting[waiting] = self._fleet().by_id(waiting.source)
        if self._timer is None:
            self._look_later()

    def remove(self, waiting: Waiting) -> None:
        self._waiting.pop(waiting, None)

    def _look_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _look(self) -> None:
        self._timer = None
        fleet = self._fleet()
        for waiting, before in list(self._waiting.items()):
            now = fleet.by_id(waiting.source)
            if is_lost(before, now):
                self.remove(waiting)
                waiting.limit.reschedule(asyncio.get_running_loop().time())
            else:
                self._waiting[waiting] = now
        if self._waiting:
            self._look_later()


def is_lost(before: Instance | None, now: Instance | None) -> bool:
    """Whether what it held is gone."""
    if before is None or now is None:
        return before is not now
    ids, others = before.facts.engine_ids, now.facts.engine_ids
    is_another = bool(ids and others) and ids != others
    return is_another or (before.healthy and not now.healthy)
