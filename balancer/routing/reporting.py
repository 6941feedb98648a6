"""Tells the indexer what finished legs have shown, beside the requests and never in their way."""

import asyncio
from collections.abc import Callable

import structlog

from balancer.core.record import LegRecord
from balancer.core.routing.findings import Findings
from balancer.core.routing.forecast import Forecast, conclude
from indexer.core.reports import ReportSink

logger = structlog.stdlib.get_logger(__name__)

INTERVAL_S = 0.25
_GATHER_S = 0.02
"""A contradiction is news; those that come together go together."""


class Reporting:
    """One per balancer. `on_outcome` is told each leg and its outcome."""

    def __init__(
        self,
        sink: ReportSink | None,
        *,
        clock: Callable[[], float],
        on_outcome: Callable[[LegRecord, str], None],
    ) -> None:
        self.lost_messages = 0
        self._sink = sink
        self._clock = clock
        self._on_outcome = on_outcome
        self._findings = Findings()
        self._has_failed = False
        self._has_news = asyncio.Event()

    @property
    def lost(self) -> int:
        """Reports for which there was no room, and messages that nobody took."""
        return self._findings.lost + self.lost_messages

    def on_leg_end(self, forecast: Forecast, leg: LegRecord) -> None:
        """Write down and count what a leg has shown, and keep it until it is sent."""
        finding = conclude(forecast, leg)
        leg.outcome = finding.outcome
        self._on_outcome(leg, finding.outcome)
        if self._sink is not None:
            self._findings.add(forecast, finding)
            if finding.report is not None:
                self._has_news.set()

    async def run(self) -> None:
        """Send until cancelled."""
        if self._sink is None:
            return
        while True:
            await self._wait()
            for model, reports in self._findings.take(self._clock()).items():
                try:
                    await self._sink.send(model, reports)
                except Exception as error:  # noqa: BLE001 - advice: whatever fails, it is lost
                    self._note_failure(error)
                else:
                    self._has_failed = False

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(INTERVAL_S):
                await self._has_news.wait()
                await asyncio.sleep(_GATHER_S)
        except TimeoutError:
            pass
        self._has_news.clear()

    def _note_failure(self, error: Exception) -> None:
        self.lost_messages += 1
        if not self._has_failed:  # once per outage: the counter has the rest
            logger.warning("reports_not_sent", error=type(error).__name__)
        self._has_failed = True
