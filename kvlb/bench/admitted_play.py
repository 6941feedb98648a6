"""A workload through the balancer's line: `balancer.dataplane.admission` in virtual time.

The same `WaitingLine` and `Room` as there. Whoever is refused comes no more; the next call of its
session comes as if it had been answered at once.
"""

from collections.abc import Sequence

from balancer.core.errors import OverloadedError
from balancer.core.reliability.vetting import NoVetting
from balancer.core.routing.client_classes import Client
from balancer.core.routing.waiting_line import Ticket, WaitingLine
from balancer.core.settings.admission import AdmissionSettings
from balancer.dataplane.admission import LOOK_S, Room
from kvlb.bench.calls import MODEL, Call
from kvlb.bench.fleet import VirtualFleet
from kvlb.bench.play import Play


class AdmittedPlay(Play):
    """One workload on one fleet, let in as there is room."""

    def __init__(
        self,
        fleet: VirtualFleet,
        calls: Sequence[Call],
        *,
        settings: AdmissionSettings,
        streamed: int = 100,
    ) -> None:
        super().__init__(fleet, calls, streamed=streamed)
        self._line = WaitingLine(settings)
        self._room = Room(
            ledger=fleet.ledger,
            vetting=NoVetting(),
            settings=settings,
            block_size=fleet.block_size,
            max_requests_per_rank=lambda: 0,
        )
        self._waiting: dict[int, tuple[Ticket, int]] = {}
        """By ticket number: the ticket, and the number of its call."""
        self._is_watched = False
        self.refused = 0

    def _send(self, number: int) -> None:
        if self._line.is_idle and self._has_room():
            super()._send(number)
            return
        try:
            ticket = self._line.enter(
                client=Client(),
                priority=0,
                cached_share=self._fleet.cached_share(*self._asked(number)),
                tokens=self._calls[number].prompt.tokens,
                now_s=self._fleet.clock.now_s,
                wake=lambda: None,
            )
        except OverloadedError:
            self._refuse(number)
        else:
            self._waiting[ticket.number] = (ticket, number)
            self._watch()

    def _has_room(self) -> bool:
        return self._room.exists(self._fleet.fleet, MODEL)

    def _watch(self) -> None:
        if not self._is_watched:
            self._is_watched = True
            self._fleet.clock.at(self._fleet.clock.now_s + LOOK_S, self._look)

    def _look(self) -> None:
        self._is_watched = False
        line, clock = self._line, self._fleet.clock
        line.refuse_overdue(clock.now_s)
        for ticket, number in list(self._waiting.values()):
            if ticket.is_refused:
                del self._waiting[ticket.number]
                self._refuse(number)
        while (first := line.first) is not None and self._has_room():
            line.take(first)
            _, number = self._waiting.pop(first.number)
            super()._send(number)
            self._outcomes[number].arrived_s = first.arrived_s
            line.end_turn()
        if self._waiting:
            self._watch()

    def _refuse(self, number: int) -> None:
        self.refused += 1
        now_s = self._fleet.clock.now_s
        for follower in self._followers.get(number, ()):
            self._send_at(now_s + self._calls[follower].at_s, follower)
