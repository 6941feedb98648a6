"""The balancer's end of reports: what is sent, how soon, and what a failure costs."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from structlog.testing import capture_logs

from balancer.core.record import LegRecord
from balancer.core.routing.forecast import Forecast
from balancer.routing.reporting import Reporting
from indexer.core.hashing import Namespace
from indexer.core.index import IndexUnavailableError, PrefixMatch, Prompt
from indexer.core.reports import RankTally, Report
from indexer.core.types import InstanceId, RankId, Tier, Trust

SIZE = 4
E0 = "http://e0:8000"
R0 = RankId(InstanceId(E0), 0)

PROMPT = Prompt(Namespace(model="tiny"), range(100 * SIZE + 1))


@dataclass
class Sink:
    """Takes, or fails, as it was told."""

    error: Exception | None = None
    taken: list[tuple[str, Report]] = field(default_factory=list)
    attempts: int = 0

    async def send(self, model: str, reports: Any) -> None:
        self.attempts += 1
        if self.error is not None:
            raise self.error
        self.taken += [(model, report) for report in reports]


def forecast(blocks: int) -> Forecast:
    match = PrefixMatch(
        tokens_by_tier={Tier.GPU: blocks * SIZE}, block_size=SIZE, trust=Trust.EXACT, epoch=9
    )
    return Forecast(rank=R0, model="tiny", matched_s=100.0, prompt=PROMPT, match=match)


def leg(cached_tokens: int) -> LegRecord:
    return LegRecord(
        kind="decode", alias="e0", overlap_tokens=0, started_s=0.0, cached_tokens=cached_tokens
    )


@asynccontextmanager
async def reporting(
    sink: Sink | None, outcomes: list[str] | None = None
) -> AsyncIterator[Reporting]:
    told = [] if outcomes is None else outcomes
    made = Reporting(sink, clock=lambda: 103.0, on_outcome=lambda _, outcome: told.append(outcome))
    async with asyncio.TaskGroup() as group:
        running = group.create_task(made.run())
        yield made
        running.cancel()


async def test_contradiction_is_sent_soon_and_agreement_with_it(
    eventually: Callable[..., Any],
) -> None:
    """With its age; every leg's outcome is counted on the spot."""
    sink, outcomes = Sink(), list[str]()
    agreeing, contradicting = leg(4 * SIZE), leg(0)
    async with reporting(sink, outcomes) as made:
        made.on_leg_end(forecast(4), agreeing)
        made.on_leg_end(forecast(4), contradicting)
        assert outcomes == [agreeing.outcome, contradicting.outcome] == ["exact", "over"]
        await eventually(lambda: sink.taken)

    assert [model for model, _ in sink.taken] == ["tiny", "tiny"]
    assert [report.age_s for _, report in sink.taken] == [3.0, 3.0]
    assert made.lost == 0


async def test_agreement_alone_is_sent_too(eventually: Callable[..., Any]) -> None:
    """It has time."""
    sink = Sink()
    async with reporting(sink) as made:
        made.on_leg_end(forecast(4), leg(4 * SIZE))
        await eventually(lambda: sink.taken)

    (_, tally) = sink.taken[0]
    assert isinstance(tally, RankTally)


@pytest.mark.parametrize("error", [IndexUnavailableError("down"), RuntimeError("a bug")])
async def test_sink_that_fails_costs_reports_only(
    eventually: Callable[..., Any], error: Exception
) -> None:
    """Counted; logged once per outage."""
    sink = Sink(error=error)
    with capture_logs() as logs:
        async with reporting(sink) as made:
            for attempt in (1, 2):
                made.on_leg_end(forecast(4), leg(0))
                await eventually(lambda wanted=attempt: sink.attempts == wanted)
            sink.error = None
            made.on_leg_end(forecast(4), leg(0))
            await eventually(lambda: sink.taken)

    assert made.lost == 2
    assert [entry["event"] for entry in logs] == ["reports_not_sent"]


async def test_without_a_sink_outcomes_are_counted_all_the_same() -> None:
    """Nothing is kept for anybody."""
    outcomes = list[str]()
    async with reporting(None, outcomes) as made:
        made.on_leg_end(forecast(4), leg(0))

    assert (outcomes, made.lost) == (["over"], 0)
