"""Takes what balancers report and hands it to the ranks it is about.

A report of a rank that isn't followed is counted and dropped; a source that fails is asked again. An
indexer that stands by takes nothing: the reports are for the one that writes.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

import structlog

from indexer.core.index import BlockIndexError
from indexer.core.reports import Report, ReportSource
from indexer.followed_rank import FollowedRank

_logger = structlog.get_logger(__name__)

_PAUSE_S = 1.0
"""After a bug."""


class ReportDesk:
    """One per service."""

    def __init__(
        self, source: ReportSource | None, followed: Callable[[], Sequence[FollowedRank]]
    ) -> None:
        self.dropped: Counter[str] = Counter()
        """Reports, or attempts to take some, that came to nothing, by reason."""
        self._source = source
        self._followed = followed

    async def run(self) -> None:
        """Take and weigh until cancelled."""
        if self._source is None:
            return
        while True:
            await self._source.wait()
            try:
                await self._turn(self._source)
            except Exception:
                self.dropped["bug"] += 1
                _logger.exception("reports_failed")
                await asyncio.sleep(_PAUSE_S)

    async def _turn(self, source: ReportSource) -> None:
        followed = [each for each in self._followed() if not each.is_standing_by]
        judges = {each.source.rank: each.judge for each in followed}
        for model in {each.source.model for each in followed}:
            for report in await self._take(source, model):
                judge = judges.get(report.rank)
                if judge is None:
                    self.dropped["unknown_rank"] += 1
                else:
                    await judge.tell(judge.hear(report))
        for judge in judges.values():
            await judge.tick()

    async def _take(self, source: ReportSource, model: str) -> Sequence[Report]:
        try:
            return await source.take(model)
        except BlockIndexError:
            self.dropped["unavailable"] += 1
            return ()
