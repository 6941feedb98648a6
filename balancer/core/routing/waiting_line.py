"""The line of requests that wait for room on any rank of one model. Pure.

Rules:

1. Who goes first: `core.routing.line_order`.
2. A full line refuses whoever would be served last, the newcomer or one that waits.
3. Nobody waits longer than `max_wait_s`; in a line that hasn't been empty for `standing_s`, than
   `standing_wait_s`. In an overloaded fleet every request would else wait until its limit, and each
   that is served would be served too late.
4. One turn at a time: who is let in books its place before the next is looked at.

Cost: O(log n) per ticket; O(n) per newcomer in a full line.
"""

from collections.abc import Callable
from itertools import count
from math import ceil
from typing import Final

from balancer.core.errors import OverloadedError
from balancer.core.routing.client_classes import Client
from balancer.core.routing.line_order import LineOrder, Place
from balancer.core.settings.admission import AdmissionSettings

_LATE: Final = "no instance of this model had room within admission.max_wait_s"
_STANDING: Final = (
    "no instance of this model had room in time: more comes than the fleet can serve "
    "within admission.promise_s"
)
_PACED: Final = "requests come faster than admission.requests_per_s, and this one waited for admission.max_wait_s"


class Ticket:
    """A place in the line."""

    __slots__ = ("arrived_s", "number", "place", "refused", "wake")

    def __init__(self, *, place: Place, arrived_s: float, wake: Callable[[], None]) -> None:
        self.place = place
        self.number = place.number
        self.arrived_s = arrived_s
        self.wake = wake
        """Called when it is first, when the turn before it has ended, or when it is refused."""
        self.refused: str | None = None
        """What its client is told; None: it isn't refused."""

    @property
    def is_refused(self) -> bool:
        """It left the line, and isn't let in."""
        return self.refused is not None


class WaitingLine:
    """Who waits for one model."""

    def __init__(
        self,
        settings: AdmissionSettings,
        *,
        paced_s: Callable[[], float] = lambda: 0.0,
        turn: int = 0,
    ) -> None:
        """`paced_s`: how long `requests_per_s` takes for all that wait, of whatever model."""
        self._settings = settings
        self._paced_s = paced_s
        self._waiting: dict[int, Ticket] = {}
        """By number: in the order of arrival."""
        self._order = LineOrder(settings.max_waiting)
        self._numbers = count()
        self._since_s = 0.0
        self._is_paced = False
        self.turn = turn
        """When it was served last, counted in turns of all lines."""
        self.is_taken = False
        """Somebody was let in and hasn't booked yet."""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def is_idle(self) -> bool:
        """Nobody waits, and nobody is being let in."""
        return not self._waiting and not self.is_taken

    @property
    def is_paced(self) -> bool:
        """There is room for who is first, and only the pace lacks."""
        return self._is_paced and bool(self._waiting)

    @property
    def first(self) -> Ticket | None:
        """Who is next."""
        number = self._order.first()
        return None if number is None else self._waiting[number]

    def enter(
        self,
        *,
        client: Client,
        priority: int,
        cached_share: float,
        tokens: int,
        now_s: float,
        wake: Callable[[], None],
    ) -> Ticket:
        """Take a place. Raises OverloadedError if the line is full of more urgent ones.

        `cached_share`: of its prompt of `tokens`, the most that any rank holds.
        """
        if not self._waiting:
            self._since_s = now_s
            self._is_paced = False
        place = self._order.add(
            next(self._numbers), client, priority, cached_share=cached_share, tokens=tokens
        )
        ticket = Ticket(place=place, arrived_s=now_s, wake=wake)
        self._waiting[ticket.number] = ticket
        if len(self._waiting) > self._settings.max_waiting:
            last = self._waiting[self._order.last()]
            if last is ticket:
                self.leave(ticket)
                raise self._error(self._full(), now_s)
            self._refuse(last, f"more urgent ones came, and {self._full()}")
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """It doesn't wait any more. Doing so twice changes nothing."""
        self._leave(ticket, is_served=False)

    def _leave(self, ticket: Ticket, *, is_served: bool) -> None:
        if ticket.number not in self._waiting:
            return
        was_first = ticket is self.first
        del self._waiting[ticket.number]
        self._order.remove(ticket.place, is_served=is_served)
        if was_first:
            self._wake_first()

    def take(self, ticket: Ticket) -> None:
        """It is let in, and books next. `end_turn` has to follow."""
        self.is_taken = True
        self._leave(ticket, is_served=True)

    def end_turn(self) -> None:
        """Who was let in has booked, or given up."""
        self.is_taken = False
        self._wake_first()

    def hold_back(self, now_s: float, *, by_pace: bool) -> None:
        """Who is first can't be let in now: since nobody has room, or only `by_pace`."""
        self._is_paced = by_pace
        if by_pace:
            self._since_s = now_s

    def refuse_overdue(self, now_s: float) -> None:
        """Refuse those that have waited for as long as anybody may."""
        limit_s, words = self._limit(now_s)
        while self._waiting:
            oldest = next(iter(self._waiting.values()))
            if now_s - oldest.arrived_s < limit_s:
                return
            self._refuse(oldest, words)

    def refusal(self, ticket: Ticket, now_s: float) -> OverloadedError:
        """What a refused ticket's client is told."""
        return self._error(ticket.refused or "", now_s)

    def _error(self, words: str, now_s: float) -> OverloadedError:
        return OverloadedError(words, retry_after_s=self._wait_s(now_s))

    def _full(self) -> str:
        """Why nobody else may wait."""
        most = self._settings.max_waiting
        held = " for their turn at admission.requests_per_s" if self._is_paced else ""
        return f"{most} requests wait{held}, as many as admission.max_waiting lets wait"

    def _refuse(self, ticket: Ticket, words: str) -> None:
        ticket.refused = words
        self.leave(ticket)
        ticket.wake()

    def _wake_first(self) -> None:
        first = self.first
        if first is not None:
            first.wake()

    def _limit(self, now_s: float) -> tuple[float, str]:
        """How long anybody may wait now, and what those are told that have."""
        settings = self._settings
        if self._is_paced:
            return settings.max_wait_s, _PACED
        is_standing = now_s - self._since_s >= settings.standing_s
        if is_standing and settings.standing_wait_s < settings.max_wait_s:
            return settings.standing_wait_s, _STANDING
        return settings.max_wait_s, _LATE

    def _wait_s(self, now_s: float) -> int:
        """About how long who comes now would wait: as long as who is first has, and the pace takes."""
        first = self.first
        waited_s = now_s - first.arrived_s if first else 0.0
        return max(1, ceil(max(waited_s, self._paced_s())))
