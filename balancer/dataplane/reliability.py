"""Breakers, comparison and retry budget at work: the clock, the fleet, the log and the metrics.

What is decided is in `balancer.core.reliability.standings` and `balancer.core.reliability.retry_budget`.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import structlog
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from balancer.core.errors import (
    LOOPED,
    ConnectTimeoutError,
    EngineError,
    EngineLostError,
    EngineRefusedError,
    EngineUnreachableError,
    HandOverFailedError,
)
from balancer.core.fleet.probe_state import AT_ONCE
from balancer.core.fleet.snapshot import Fleet, Instance
from balancer.core.record import LegRecord, RequestRecord
from balancer.core.reliability.breaker import BreakerState, Phase
from balancer.core.reliability.retry_budget import RetryBudget
from balancer.core.reliability.standings import Outcome, Standings
from balancer.core.settings.reliability import ReliabilitySettings
from indexer.core.types import InstanceId, RankId

JUDGE_INTERVAL_S = 1.0
NO_FAULTS = frozenset({501, 503})
"""5xx that say nothing against an instance: it can't do that, or is busy."""

logger = structlog.stdlib.get_logger(__name__)


class Reliability(Collector):
    """One per process, and a collector of its metrics."""

    def __init__(
        self,
        settings: ReliabilitySettings,
        *,
        fleet: Callable[[], Fleet],
        clock: Callable[[], float],
        on_change: Callable[[InstanceId, str | None], None] = lambda _instance, _reason: None,
    ) -> None:
        """`on_change` hears why an instance is held back from now on; None: it isn't any more."""
        self._fleet = fleet
        self._clock = clock
        self._tell = on_change
        self._known = fleet()
        self.standings = Standings(settings, self._on_change)
        self.budget = RetryBudget(
            share=settings.retry_share,
            least=settings.least_retries,
            window_s=settings.window_s,
            now_s=clock(),
        )

    def usable(
        self, instances: Sequence[Instance], exclude: frozenset[RankId] = frozenset()
    ) -> Sequence[Instance]:
        """Those that aren't held back; all, if that left none that isn't excluded."""
        if not self.standings.held_back:
            return instances
        return self.standings.usable(instances, exclude, self._clock())

    def requested(self) -> None:
        """A client's request begins."""
        self.budget.requested(self._clock())

    def may_retry(self, record: RequestRecord) -> bool:
        """May one more attempt be made for this request? Yes is taken out of the budget."""
        if not self.budget.take(self._clock()):
            record.retries_refused += 1
            return False
        record.is_trying_again = True
        return True

    def claim(self, *instances: Instance) -> None:
        """These were chosen."""
        if self.standings.held_back:
            self.standings.claim((each.id for each in instances), self._clock())

    def started(self, instance: Instance, leg: LegRecord, record: RequestRecord) -> None:
        """A leg is sent."""
        if record.is_trying_again:  # not before: there may be nobody left to ask
            record.is_trying_again = False
            record.retries += 1
        tokens = None
        # Elsewhere the first byte comes with the last token, or isn't a token at all.
        if leg.kind == "prefill" or (leg.kind == "decode" and record.stream):
            tokens = (record.prompt_tokens or 0) - (leg.overlap_tokens or 0)
        leg.attempt = self.standings.started(instance.id, leg.started_s, tokens)

    def answered(self, leg: LegRecord) -> None:
        """Its first token is here."""
        attempt = leg.attempt
        if attempt is not None and (attempt.thousands is not None or self.standings.held_back):
            self.standings.answered(attempt, self._clock())

    def ended(self, leg: LegRecord, error: BaseException | None) -> None:
        """It ended, by `error` if there is one."""
        if leg.attempt is not None:
            outcome = Outcome.WELL if error is None else outcome_of(error)
            self.standings.ended(leg.attempt, outcome, self._clock(), leg.error or "")

    def told(self, instance: InstanceId, ok: bool, reason: str | None) -> None:
        """Another process of this fleet holds an instance back, or doesn't any more."""
        if reason not in AT_ONCE and self._fleet().by_id(instance) is not None:
            self.standings.told(instance, None if ok else reason, self._clock())

    def on_fleet(self, fleet: Fleet) -> None:
        """Forget who left; who was down and is back begins anew."""
        for before in self._known.instances:
            now = fleet.by_id(before.id)
            if now is not None and now.healthy and not before.healthy:
                self.standings.renew(before.id, self._clock())
        self._known = fleet
        self.standings.keep_only(frozenset(each.id for each in fleet.instances))

    async def run(self) -> None:
        """Compare instances, until cancelled."""
        while True:
            await asyncio.sleep(JUDGE_INTERVAL_S)
            self.judge()

    def judge(self) -> None:
        """Compare instances once."""
        self.standings.judge(_groups(self._fleet()), self._clock())

    def reason(self, instance: InstanceId) -> str | None:
        """Why it is held back; None: its breaker is closed."""
        return self.standings.breaker(instance).reason

    def render(self, instance: InstanceId) -> Mapping[str, Any]:
        """One breaker for `/status`."""
        now_s = self._clock()
        state = self.standings.breaker(instance)
        wait_s = max(0.0, state.trial_s - now_s)
        return {
            "state": state.phase(now_s).value,
            "reason": state.reason,
            "trial_in_s": round(wait_s, 3) if state.is_open else None,
        }

    def describe(self) -> Iterable[Metric]:
        """Name them without a scrape, so that registering asks nothing of the fleet."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Read everything."""
        now_s = self._clock()
        phases = GaugeMetricFamily(
            "kvlb_instance_breaker",
            "1 for the state of an instance's breaker.",
            labels=("instance", "state"),
        )
        openings = CounterMetricFamily(
            "kvlb_breaker_openings_total",
            "How often an instance was held back, or a trial of it failed, and why.",
            labels=("instance", "reason"),
        )
        aliases = {each.id: each.alias for each in self._fleet().instances}
        for instance, alias in aliases.items():
            phase = self.standings.breaker(instance).phase(now_s)
            for each in Phase:
                phases.add_metric((alias, each.value), float(each is phase))
        for (instance, reason), count in self.standings.openings.items():
            if instance in aliases:
                openings.add_metric((aliases[instance], reason), count)
        retries = CounterMetricFamily(
            "kvlb_retries_total",
            "Further attempts at a leg: made, or refused since the budget of retries was spent.",
            labels=("outcome",),
        )
        retries.add_metric(("made",), self.budget.made)
        retries.add_metric(("refused",), self.budget.refused)
        yield from (phases, openings, retries)

    def _on_change(self, instance: InstanceId, state: BreakerState) -> None:
        known = self._fleet().by_id(instance)
        alias = known.alias if known is not None else None
        if state.is_open:
            logger.warning(
                "instance_held_back",
                instance=alias,
                reason=state.reason,
                trial_in_s=round(state.trial_s - self._clock(), 3),
            )
        else:
            logger.info("instance_trusted_again", instance=alias)
        self._tell(instance, state.reason)


def outcome_of(error: BaseException | None) -> Outcome:
    """What the error that ended a leg says of its instance."""
    match error:
        case None:
            return Outcome.WELL
        case EngineRefusedError() if error.status != LOOPED:
            is_fault = error.status >= 500 and error.status not in NO_FAULTS
            return Outcome.REFUSED if is_fault else Outcome.WELL
        case EngineUnreachableError() | ConnectTimeoutError() | EngineLostError():
            return Outcome.UNTOLD  # probes see that, and see when it is over
        case HandOverFailedError():
            return Outcome.REFUSED  # perhaps it's the other side's: comparison tells
        case EngineError():
            return Outcome.BROKEN
        case _:
            return Outcome.UNTOLD


def _groups(fleet: Fleet) -> Iterable[Sequence[InstanceId]]:
    """Instances that can be compared: available, of one role and model."""
    groups: dict[tuple[str, str], list[InstanceId]] = {}
    for each in fleet.instances:
        if each.is_available and each.models is not None:
            groups.setdefault((each.role.value, each.models.base), []).append(each.id)
    return groups.values()
