"""Circuit breakers: stop asking somebody who fails, and try again later.

Rules:

1. `failures` in a row open a breaker; so may somebody else's judgement. While it is open nobody is
   sent there, but for one trial per cool-down.
2. A trial that goes well closes it. After one that fails the next has to wait twice as long, up to
   `max_cool_down_s`; how often it was tried is forgotten once it stayed closed for that long.
3. A trial that never reports counts as failed. Nothing bans anybody for good.
4. What began before the breaker changed says nothing about its state now: each attempt carries
   the generation it began in.
5. State is a frozen value of plain fields, so that it can be shown, kept and sent elsewhere.

Cost: a comparison where all is well.
"""

from enum import StrEnum

import msgspec

MAX_DOUBLINGS = 30


class Phase(StrEnum):
    """What a breaker does at this moment. A metric label."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"
    """The next one sent there is a trial."""


class BreakerRules(msgspec.Struct, frozen=True, kw_only=True):
    """When it opens, and for how long."""

    failures: int
    cool_down_s: float
    max_cool_down_s: float

    def pause_s(self, tries: int) -> float:
        """Until the next trial; `tries` is how many trials and openings there were in a row."""
        doubled = self.cool_down_s * 2.0 ** min(tries - 1, MAX_DOUBLINGS)
        return min(doubled, max(self.max_cool_down_s, self.cool_down_s))


class BreakerState(msgspec.Struct, frozen=True, kw_only=True):
    """One breaker. Times are of one monotonic clock."""

    failures: int = 0
    """In a row, while closed."""
    reason: str | None = None
    """Why it is open; None: it is closed."""
    generation: int = 0
    """Rises whenever it opens or closes."""
    tries: int = 0
    """Openings and trials, without staying closed for long in between."""
    trial_s: float = 0.0
    """Open: when the next trial may begin."""
    closed_s: float = 0.0
    """When it closed last."""

    @property
    def is_open(self) -> bool:
        return self.reason is not None

    def phase(self, now_s: float) -> Phase:
        if not self.is_open:
            return Phase.CLOSED
        return Phase.OPEN if now_s < self.trial_s else Phase.HALF_OPEN

    def claimed(self, now_s: float, rules: BreakerRules) -> "BreakerState":
        """Somebody is sent there: if that is a trial, the next one has to wait for its turn."""
        if self.phase(now_s) is not Phase.HALF_OPEN:
            return self
        tries = self.tries + 1
        return msgspec.structs.replace(self, tries=tries, trial_s=now_s + rules.pause_s(tries))

    def after_success(self, now_s: float, generation: int) -> "BreakerState":
        """An attempt that began in `generation` went well."""
        if generation != self.generation:
            return self
        if self.is_open:
            return self.closed(now_s)
        return msgspec.structs.replace(self, failures=0) if self.failures else self

    def after_failure(
        self, now_s: float, generation: int, reason: str, rules: BreakerRules
    ) -> "BreakerState":
        """An attempt that began in `generation` failed."""
        if generation != self.generation:
            return self
        if self.is_open or self.failures + 1 >= rules.failures:
            return self.opened(now_s, reason, rules)
        return msgspec.structs.replace(self, failures=self.failures + 1)

    def opened(self, now_s: float, reason: str, rules: BreakerRules) -> "BreakerState":
        """Open it, or open it anew."""
        tries = self.tries
        if not self.is_open:  # else its trial has been counted
            has_recovered = now_s - self.closed_s >= rules.max_cool_down_s
            tries = 1 if has_recovered else tries + 1
        return BreakerState(
            reason=reason,
            generation=self.generation + 1,
            tries=tries,
            trial_s=now_s + rules.pause_s(tries),
        )

    def closed(self, now_s: float) -> "BreakerState":
        """Close it."""
        return BreakerState(generation=self.generation + 1, tries=self.tries, closed_s=now_s)

    def renewed(self) -> "BreakerState":
        """Somebody else answers there now: what was known is void."""
        return BreakerState(generation=self.generation + 1)


class Breaker:
    """One that nobody else looks at. Not a lock: it only advises."""

    def __init__(self, *, failures: int, cool_down_s: float) -> None:
        self._rules = BreakerRules(
            failures=failures, cool_down_s=cool_down_s, max_cool_down_s=cool_down_s
        )
        self._state = BreakerState()

    def allows(self, now_s: float) -> bool:
        """May it be asked now? While open, answering yes starts the one trial of this cool-down."""
        if self._state.phase(now_s) is Phase.OPEN:
            return False
        self._state = self._state.claimed(now_s, self._rules)
        return True

    def succeeded(self) -> None:
        self._state = BreakerState()

    def failed(self, now_s: float) -> None:
        generation = self._state.generation
        self._state = self._state.after_failure(now_s, generation, "failures", self._rules)
