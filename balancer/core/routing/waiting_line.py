"""The line of requests that wait for room on any rank of one model. Pure.

Rules:

1. A smaller priority number goes first, as in vLLM. Within one priority clients (by their key) get equal
   shares of tokens, whoever asks more often; within one client first come, first served.
2. Shares by start-time fair queueing: a ticket's tag is the later of the line's own progress and
   where its client's last ticket ended, in tokens. So a client that was idle saves nothing up.
3. A full line refuses whoever would be served last, the newcomer or one that waits.
4. Nobody waits longer than `max_wait_s`; in a line that hasn't been empty for `standing_s`, than
   `standing_wait_s`. In an overloaded fleet every request would else wait until its limit, and each
   that is served would be served too late.
5. One turn at a time: who is let in books its place before the next is looked at.

Cost: O(log n) per ticket; O(n) per newcomer in a full line.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from math import ceil

from balancer.core.errors import OverloadedError
from balancer.core.settings.admission import AdmissionSettings


class Ticket:
    """A place in the line."""

    __slots__ = ("arrived_s", "is_refused", "number", "priority", "tag", "wake")

    def __init__(
        self, *, number: int, priority: int, tag: float, arrived_s: float, wake: Callable[[], None]
    ) -> None:
        self.number = number
        self.priority = priority
        self.tag = tag
        self.arrived_s = arrived_s
        self.wake = wake
        """Called when it is first, when the turn before it has ended, or when it is refused."""
        self.is_refused = False

    @property
    def place(self) -> tuple[int, float, int]:
        """Smaller goes first."""
        return self.priority, self.tag, self.number


class WaitingLine:
    """Who waits for one model."""

    def __init__(self, settings: AdmissionSettings) -> None:
        self._settings = settings
        self._waiting: dict[int, Ticket] = {}
        """By number: in the order of arrival."""
        self._order: list[tuple[int, float, int]] = []
        """A heap of places; those that have left it are passed over."""
        self._ends: dict[str, float] = {}
        """Where each waiting client's last ticket ends, in tokens."""
        self._progress = 0.0
        self._numbers = count()
        self._since_s = 0.0
        self.is_taken = False
        """Somebody was let in and hasn't booked yet."""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def is_idle(self) -> bool:
        """Nobody waits, and nobody is being let in."""
        return not self._waiting and not self.is_taken

    @property
    def first(self) -> Ticket | None:
        """Who is next."""
        while self._order:
            ticket = self._waiting.get(self._order[0][2])
            if ticket is not None:
                return ticket
            heappop(self._order)
        return None

    def enter(
        self, *, client: str, priority: int, tokens: int, now_s: float, wake: Callable[[], None]
    ) -> Ticket:
        """Take a place. Raises OverloadedError if the line is full of more urgent ones."""
        if not self._waiting:
            self._since_s = now_s
        tag = max(self._progress, self._ends.get(client, 0.0))
        number = next(self._numbers)
        ticket = Ticket(number=number, priority=priority, tag=tag, arrived_s=now_s, wake=wake)
        if len(self._waiting) >= self._settings.max_waiting:
            last = max(self._waiting.values(), key=lambda each: each.place, default=ticket)
            if last.place <= ticket.place:
                raise OverloadedError(
                    "too many requests wait for this model", retry_after_s=self._wait_s(now_s)
                )
            self._refuse(last)
        self._ends[client] = tag + max(1, tokens)
        self._waiting[number] = ticket
        heappush(self._order, ticket.place)
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """It doesn't wait any more. Doing so twice changes nothing."""
        was_first = ticket is self.first
        if self._waiting.pop(ticket.number, None) is None:
            return
        if not self._waiting:
            self._ends.clear()
        if was_first:
            self._wake_first()

    def take(self, ticket: Ticket) -> None:
        """It is let in, and books next. `end_turn` has to follow."""
        self.is_taken = True
        self._progress = max(self._progress, ticket.tag)
        self.leave(ticket)

    def end_turn(self) -> None:
        """Who was let in has booked, or given up."""
        self.is_taken = False
        self._wake_first()

    def refuse_overdue(self, now_s: float) -> None:
        """Refuse those that have waited for as long as anybody may."""
        limit_s = self._limit_s(now_s)
        while self._waiting:
            oldest = next(iter(self._waiting.values()))
            if now_s - oldest.arrived_s < limit_s:
                return
            self._refuse(oldest)

    def refusal(self, now_s: float) -> OverloadedError:
        """What a refused ticket's client is told."""
        return OverloadedError(
            "no instance of this model had room in time", retry_after_s=self._wait_s(now_s)
        )

    def _refuse(self, ticket: Ticket) -> None:
        ticket.is_refused = True
        self.leave(ticket)
        ticket.wake()

    def _wake_first(self) -> None:
        first = self.first
        if first is not None:
            first.wake()

    def _limit_s(self, now_s: float) -> float:
        settings = self._settings
        is_standing = now_s - self._since_s >= settings.standing_s
        return min(settings.max_wait_s, settings.standing_wait_s if is_standing else float("inf"))

    def _wait_s(self, now_s: float) -> int:
        """How long who came first has waited: about what who comes now would."""
        first = self.first
        return max(1, ceil(now_s - first.arrived_s)) if first else 1
