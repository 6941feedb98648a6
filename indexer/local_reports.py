"""Reports within one process: a bounded queue per model."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from indexer.core.index import IndexFullError
from indexer.core.reports import Report, aged

_MOST_REPORTS = 4096
_MOST_MODELS = 256
_LONGEST_WAIT_S = 0.1
"""What was taken before has to be looked at again, whether or not more comes."""


class LocalReports:
    """Both a `ReportSink` and a `ReportSource`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting: dict[str, deque[tuple[float, Report]]] = {}
        """When each was sent, and the report."""
        self._has_come = asyncio.Event()

    async def send(self, model: str, reports: Sequence[Report]) -> None:
        """Raises IndexFullError if they don't fit: then all of them are lost."""
        if model not in self._waiting and len(self._waiting) >= _MOST_MODELS:
            raise IndexFullError("reports of too many models are waiting")
        waiting = self._waiting.setdefault(model, deque())
        if len(waiting) + len(reports) > _MOST_REPORTS:
            raise IndexFullError("too many reports are waiting")
        now_s = self._clock()
        waiting.extend((now_s, report) for report in reports)
        self._has_come.set()

    async def wait(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_LONGEST_WAIT_S):
                await self._has_come.wait()
        self._has_come.clear()

    async def take(self, model: str) -> Sequence[Report]:
        now_s = self._clock()
        taken: list[Report] = []
        for sent_s, report in self._waiting.pop(model, ()):
            taken += aged((report,), now_s - sent_s)
        return taken
