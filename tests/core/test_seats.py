"""A rank that runs so many at once shows it by waits that no prompt explains."""

from collections import deque
from dataclasses import dataclass
from itertools import count

import pytest

from balancer.core.load.ledger import LegGuard, LegWork, RankLoad, RankRates
from balancer.core.load.local_ledger import LocalLedger
from balancer.core.routing.terms import seats_s
from indexer.core.types import InstanceId, RankId

RANK = RankId(InstanceId("http://e0:8000"), 0)
SEATS = 4
ANSWER_S = 2.0


@dataclass(slots=True)
class Clock:
    """Time as the test says."""

    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


def run(requests: int, *, seats: int, prompt_s: float) -> int:
    """Seats learned from so many requests at once, of which `seats` run; their prompts take turns."""
    clock, order = Clock(), count()
    ledger = LocalLedger(clock)
    work = LegWork(
        rank=RANK,
        kind="whole",
        prompt_tokens=40,
        uncached_tokens=40,
        work_s=prompt_s,
    )
    waiting = deque(ledger.hold(work) for _ in range(requests))
    running: list[tuple[float, int, LegGuard]] = []
    while waiting or running:
        if waiting and len(running) < seats:
            clock.now_s += prompt_s
            guard = waiting.popleft()
            guard.first_token()
            running.append((clock.now_s + ANSWER_S, next(order), guard))
        else:
            running.sort(key=lambda each: each[:2])
            ended_s, _, ended = running.pop(0)
            clock.now_s = max(clock.now_s, ended_s)
            ended.__exit__(None, None, None)
    return ledger.load(RANK).seats


def test_waits_for_seats_show_how_many_there_are() -> None:
    """As many as ran when those began that had waited for one to end."""
    assert run(12, seats=SEATS, prompt_s=0.01) == SEATS


def test_waits_for_prompts_show_nothing() -> None:
    """However long they are."""
    assert run(12, seats=100, prompt_s=1.0) == 0


@pytest.mark.parametrize(
    ("requests", "seats", "expected_s"), [(3, 4, 0.0), (4, 4, 0.5), (7, 4, 2.0), (7, 0, 0.0)]
)
def test_a_wait_for_a_seat_is_that_for_so_many_ends(
    requests: int, seats: int, expected_s: float
) -> None:
    """Seats are free as often as answers end; of a rank that showed none there is no wait."""
    load = RankLoad(requests=requests, seats=seats, rates=RankRates(decode_s=2.0))

    assert seats_s(load) == expected_s
