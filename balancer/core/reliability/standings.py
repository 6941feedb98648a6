"""How instances stand with those who send them legs: who is held back, and since when.

Rules:

1. One breaker per instance (`core.reliability.breaker`). Legs that break off or time out count in a row;
   comparison with the others (`core.reliability.outliers`) opens it for those that fail or are slow beside
   them. What a probe sees better, a refused connection, isn't counted.
2. The first token of a trial closes the breaker: its stream may go on for an hour.
3. If everybody who is left for a request is held back, nobody is.
4. Comparison never holds back more than a share of a group, nor a group's only instance.
5. Cancelled legs count for nothing but how long they had waited.

Cost: per leg some additions; choosing costs one look while every breaker is closed.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import msgspec

from balancer.core.fleet.snapshot import Instance
from balancer.core.reliability.breaker import BreakerState, Phase
from balancer.core.reliability.outliers import Figures, Tally, find_outliers
from balancer.core.settings.reliability import ReliabilitySettings
from indexer.core.types import InstanceId, RankId


class Outcome(Enum):
    """How a leg ended, as far as it tells something of its instance."""

    WELL = auto()
    """It did its part; a client's fault is none of its own."""
    BROKEN = auto()
    """It broke off, timed out or made no sense."""
    REFUSED = auto()
    """An error status that may be its own fault: compared with the others, and a failed trial."""
    UNTOLD = auto()
    """Cancelled, or a matter of probes."""


class Attempt(msgspec.Struct, kw_only=True, eq=False):
    """One leg under way."""

    instance: InstanceId
    generation: int
    """Of the breaker when it began."""
    started_s: float
    thousands: float | None
    """Of tokens to be computed, from 1 on; None: its pace says nothing."""


@dataclass(slots=True, kw_only=True)
class _Standing:
    """Of one instance."""

    tally: Tally
    breaker: BreakerState = field(default_factory=BreakerState)
    waiting: set[Attempt] = field(default_factory=set)
    suspect_s: float | None = None
    """Since when comparison finds that it stands out."""


class Standings:
    """One per process."""

    def __init__(
        self,
        settings: ReliabilitySettings,
        on_change: Callable[[InstanceId, BreakerState], None] = lambda _instance, _state: None,
    ) -> None:
        """`on_change` hears of every breaker that opens or closes."""
        self._settings = settings
        self._rules = settings.breaker
        self._on_change = on_change
        self._standings: dict[InstanceId, _Standing] = {}
        self.held_back: set[InstanceId] = set()
        """Those whose breaker isn't closed."""
        self.openings: Counter[tuple[InstanceId, str]] = Counter()
        """Of each instance, by reason."""

    def usable(
        self, instances: Sequence[Instance], exclude: frozenset[RankId], now_s: float
    ) -> Sequence[Instance]:
        """Those of `instances` that aren't held back; all, if that left none outside `exclude`."""
        if not self.held_back:
            return instances
        free = [each for each in instances if self.breaker(each.id).phase(now_s) is not Phase.OPEN]
        is_enough = any(rank not in exclude for each in free for rank in each.rank_ids())
        return free if is_enough else instances

    def claim(self, instances: Iterable[InstanceId], now_s: float) -> None:
        """These were chosen: who is on trial is taken."""
        for instance in instances:
            if instance in self.held_back:
                standing = self._standings[instance]
                standing.breaker = standing.breaker.claimed(now_s, self._rules)

    def breaker(self, instance: InstanceId) -> BreakerState:
        """As it is now: a plain value."""
        standing = self._standings.get(instance)
        return standing.breaker if standing is not None else BreakerState()

    def breakers(self) -> dict[InstanceId, BreakerState]:
        """All that were ever anything but closed."""
        return {
            instance: each.breaker
            for instance, each in self._standings.items()
            if each.breaker.generation
        }

    def told(self, instance: InstanceId, reason: str | None, now_s: float) -> None:
        """Another process holds it back, or doesn't any more; `on_change` isn't called: it knows."""
        standing = self._of(instance, now_s)
        before = standing.breaker
        if reason is not None and not before.is_open:
            self._put(instance, standing, before.opened(now_s, reason, self._rules), now_s)
        elif reason is None and before.is_open:
            self._put(instance, standing, before.closed(now_s), now_s)

    def started(self, instance: InstanceId, now_s: float, tokens: int | None) -> Attempt:
        """A leg is sent. `tokens` are to be computed; None: when it answers says nothing."""
        standing = self._standings.get(instance) or self._of(instance, now_s)
        attempt = Attempt(
            instance=instance,
            generation=standing.breaker.generation,
            started_s=now_s,
            thousands=None if tokens is None else 1 + max(0, tokens) / 1000,
        )
        if tokens is not None:
            standing.waiting.add(attempt)
        return attempt

    def answered(self, attempt: Attempt, now_s: float) -> None:
        """Its first token is here."""
        instance = attempt.instance
        standing = self._standings.get(instance) or self._of(instance, now_s)
        if attempt.thousands is not None and attempt in standing.waiting:
            standing.waiting.discard(attempt)
            standing.tally.first_token(now_s, (now_s - attempt.started_s) / attempt.thousands)
        if standing.breaker.reason is not None:
            self._succeeded(attempt, standing, now_s)

    def ended(self, attempt: Attempt, outcome: Outcome, now_s: float, reason: str = "") -> None:
        """It ended; `reason` is the code of the error that ended it."""
        instance = attempt.instance
        standing = self._standings.get(instance) or self._of(instance, now_s)
        if attempt.thousands is not None and attempt in standing.waiting:
            standing.waiting.discard(attempt)
            standing.tally.gave_up(now_s, (now_s - attempt.started_s) / attempt.thousands)
        if outcome is Outcome.UNTOLD:
            return
        standing.tally.ended(now_s, failed=outcome is not Outcome.WELL)
        if outcome is Outcome.WELL:
            breaker = standing.breaker
            if breaker.failures or breaker.reason is not None:  # else nothing changes
                self._succeeded(attempt, standing, now_s)
        elif outcome is Outcome.BROKEN or standing.breaker.is_open:
            state = standing.breaker.after_failure(now_s, attempt.generation, reason, self._rules)
            self._set(attempt.instance, standing, state, now_s)

    def judge(self, groups: Iterable[Sequence[InstanceId]], now_s: float) -> None:
        """Compare within each group; to be called about once a second."""
        for group in groups:
            outliers = find_outliers(self._figures(group, now_s), self._settings)
            for instance in group:
                if instance not in outliers and instance in self._standings:
                    self._standings[instance].suspect_s = None
            self._hold_back(group, outliers, now_s)

    def renew(self, instance: InstanceId, now_s: float) -> None:
        """It was down and is back: another life, and nothing is held against it."""
        standing = self._standings.get(instance)
        if standing is not None:
            self._set(instance, standing, standing.breaker.renewed(), now_s)

    def keep_only(self, known: frozenset[InstanceId]) -> None:
        """Forget those that left."""
        for instance in [each for each in self._standings if each not in known]:
            del self._standings[instance]
            self.held_back.discard(instance)
        for key in [each for each in self.openings if each[0] not in known]:
            del self.openings[key]

    def _figures(self, group: Sequence[InstanceId], now_s: float) -> Mapping[InstanceId, Figures]:
        found = {}
        for instance in group:
            standing = self._standings.get(instance)
            if standing is not None and not standing.breaker.is_open:
                waiting = (
                    (now_s - each.started_s) / each.thousands
                    for each in standing.waiting
                    if each.thousands is not None
                )
                found[instance] = standing.tally.figures(now_s, waiting)
        return found

    def _hold_back(
        self, group: Sequence[InstanceId], outliers: Mapping[InstanceId, str], now_s: float
    ) -> None:
        most = max(1, int(len(group) * self._settings.max_outliers)) if len(group) > 1 else 0
        room = most - sum(each in self.held_back for each in group)
        for instance, reason in outliers.items():
            standing = self._standings[instance]
            if standing.suspect_s is None:
                standing.suspect_s = now_s
            is_sure = now_s - standing.suspect_s >= self._settings.outlier_after_s
            if is_sure and room > 0:
                room -= 1
                state = standing.breaker.opened(now_s, reason, self._rules)
                self._set(instance, standing, state, now_s)

    def _succeeded(self, attempt: Attempt, standing: _Standing, now_s: float) -> None:
        before = standing.breaker
        state = before.after_success(now_s, attempt.generation)
        self._set(attempt.instance, standing, state, now_s)
        if before.is_open and not state.is_open:
            attempt.generation = state.generation  # what becomes of it still counts

    def _set(
        self, instance: InstanceId, standing: _Standing, state: BreakerState, now_s: float
    ) -> None:
        before, standing.breaker = standing.breaker, state
        if state.generation == before.generation:
            return
        self._put(instance, standing, state, now_s)
        if state.is_open or before.is_open:
            self._on_change(instance, state)

    def _put(
        self, instance: InstanceId, standing: _Standing, state: BreakerState, now_s: float
    ) -> None:
        standing.breaker = state
        standing.tally = Tally(self._settings.window_s, now_s)
        standing.suspect_s = None
        if state.reason is not None:
            self.held_back.add(instance)
            self.openings[instance, state.reason] += 1
        else:
            self.held_back.discard(instance)

    def _of(self, instance: InstanceId, now_s: float) -> _Standing:
        standing = self._standings.get(instance)
        if standing is None:
            tally = Tally(self._settings.window_s, now_s)
            standing = self._standings[instance] = _Standing(tally=tally)
        return standing
