"""The fleet's own account: what each engine could do at each moment, and what became of requests.

Rules:

1. An engine is `well` from its first start on until something befalls it, and again afterwards.
2. Connections that are cut befall an engine at one moment and leave it well.
3. An attempt is one request to one engine, from the moment its body was understood.

Nothing here decides anything; whoever judges a balancer reads it. Changes are kept for good, of
attempts the last ones. Cost: O(1) to note, O(changes of the engine) to ask.
"""

from bisect import insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

_KEPT_ATTEMPTS = 20_000


class Condition(StrEnum):
    """What an engine can do."""

    WELL = "well"
    DOWN = "down"
    """Its process has ended: connections are refused, its caches are gone."""
    FROZEN = "frozen"
    """It accepts connections and does nothing."""
    CUT_OFF = "cut_off"
    """It is well, and nobody reaches it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Something befell an engine; `condition` is what it is from then on."""

    at_s: float
    engine: str
    condition: Condition
    what: str
    """`started`, `killed`, `cut`, ..."""


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One request to one engine."""

    engine: str
    request_id: str
    """As the engine was told."""
    received_s: float
    ended_s: float | None = None
    outcome: str = "running"
    """`complete`, `failed`, `refused`, or `left`: its client went, or its engine died."""


class FleetHistory:
    """Of all engines of one fleet, on one clock."""

    def __init__(self) -> None:
        self._changes: dict[str, list[Change]] = {}
        self._attempts: deque[Attempt] = deque(maxlen=_KEPT_ATTEMPTS)

    @property
    def attempts(self) -> Iterable[Attempt]:
        """In the order in which they came."""
        return self._attempts

    @property
    def changes(self) -> list[Change]:
        """Of all engines, in order."""
        every = (change for changes in self._changes.values() for change in changes)
        return sorted(every, key=lambda change: change.at_s)

    def note(self, engine: str, what: str, condition: Condition, at_s: float) -> None:
        """Something befell an engine; it may be known only later."""
        change = Change(at_s=at_s, engine=engine, condition=condition, what=what)
        insort(self._changes.setdefault(engine, []), change, key=lambda each: each.at_s)

    def begin(self, engine: str, request_id: str, at_s: float) -> Attempt:
        """A request came in; the caller writes its end."""
        attempt = Attempt(engine=engine, request_id=request_id, received_s=at_s)
        self._attempts.append(attempt)
        return attempt

    def condition(self, engine: str, at_s: float) -> Condition:
        """What it could do at a moment; before its first start: nothing."""
        before = [each for each in self._changes.get(engine, ()) if each.at_s <= at_s]
        return before[-1].condition if before else Condition.DOWN

    def was_well(self, engine: str, from_s: float, to_s: float) -> bool:
        """Whether nothing kept it from serving at any moment between the two."""
        if self.condition(engine, from_s) is not Condition.WELL:
            return False
        return all(
            change.condition is Condition.WELL
            for change in self._changes.get(engine, ())
            if from_s < change.at_s <= to_s
        )

    def was_disturbed(self, engine: str, from_s: float, to_s: float) -> bool:
        """Whether an answer of it between the two may have suffered."""
        return not self.was_well(engine, from_s, to_s) or any(
            from_s <= change.at_s <= to_s for change in self._changes.get(engine, ())
        )
