"""Gathers what finished legs have shown until it is sent: contradictions one by one, the rest counted.

Rules:

1. Bounded: past `max_reports` the oldest contradictions are lost, and counted.
2. What a rank's earlier epoch has shown is dropped when the next is heard of: nobody asks for it.

Cost: constant per leg.
"""

from collections import defaultdict, deque
from dataclasses import dataclass, field

import msgspec

from balancer.core.routing.forecast import Finding, Forecast
from indexer.core.reports import MOST_AGREED_KEYS, CacheReport, RankTally, Report
from indexer.core.types import BlockKey, RankId


@dataclass(slots=True, eq=False)
class _Tally:
    epoch: int
    model: str
    agreed: int = 0
    computing_legs: int = 0
    matched_s: float = 0.0
    agreed_keys: deque[BlockKey] = field(default_factory=lambda: deque(maxlen=MOST_AGREED_KEYS))


class Findings:
    """One per balancer."""

    def __init__(self, max_reports: int = 1024) -> None:
        self.lost = 0
        """Contradictions for which there was no room."""
        self._max_reports = max_reports
        self._reports: list[tuple[Forecast, CacheReport]] = []
        self._tallies: dict[RankId, _Tally] = {}

    def add(self, forecast: Forecast, finding: Finding) -> None:
        """A leg has ended."""
        if finding.report is not None:
            self._reports.append((forecast, finding.report))
            if len(self._reports) > self._max_reports:
                del self._reports[0]
                self.lost += 1
        if forecast.match is not None and (finding.has_agreed or finding.has_computed):
            self._count(forecast, forecast.match.epoch, finding)

    def take(self, now_s: float) -> dict[str, list[Report]]:
        """Everything gathered, by model, as it is to be sent now."""
        taken: defaultdict[str, list[Report]] = defaultdict(list)
        for rank, tally in self._tallies.items():
            taken[tally.model].append(
                RankTally(
                    rank=rank,
                    epoch=tally.epoch,
                    agreed=tally.agreed,
                    computing_legs=tally.computing_legs,
                    age_s=now_s - tally.matched_s,
                    agreed_keys=tuple(tally.agreed_keys),
                )
            )
        for forecast, report in self._reports:
            age_s = now_s - forecast.matched_s
            taken[forecast.model].append(msgspec.structs.replace(report, age_s=age_s))
        self._tallies.clear()
        self._reports.clear()
        return dict(taken)

    def _count(self, forecast: Forecast, epoch: int, finding: Finding) -> None:
        tally = self._tallies.get(forecast.rank)
        if tally is None or tally.epoch != epoch:
            tally = self._tallies[forecast.rank] = _Tally(epoch, forecast.model)
        tally.agreed += finding.has_agreed
        if finding.agreed_key is not None:
            tally.agreed_keys.append(finding.agreed_key)
        if finding.has_computed:
            tally.computing_legs += 1
            tally.matched_s = max(tally.matched_s, forecast.matched_s)
