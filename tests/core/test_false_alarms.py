"""A rank that has room stays open, however busy the sums make it look."""

from collections import deque
from dataclasses import dataclass, field

import pytest

from balancer.core.load.ledger import LegGuard, LegWork
from balancer.core.load.local_ledger import LocalLedger
from balancer.core.routing.room import RankLimits, RankState, has_room
from balancer.core.settings.admission import AdmissionSettings
from indexer.core.types import InstanceId, RankId

RANK = RankId(InstanceId("http://e0:8000"), 0)
ANSWER_TOKENS = 25
LIMITS = RankLimits(settings=AdmissionSettings(), max_requests=None)


@dataclass(slots=True)
class Fleet:
    """One rank, and clients that ask again as soon as they have an answer."""

    prompt_tokens: int
    step_s: float
    now_s: float = 100.0
    ledger: LocalLedger = field(init=False)
    turned_away: int = 0

    def __post_init__(self) -> None:
        self.ledger = LocalLedger(lambda: self.now_s)

    @property
    def has_room(self) -> bool:
        state = RankState(
            load=self.ledger.load(RANK), decodes=True, memory_tokens=None, block_size=16
        )
        return not self.ledger.knows_prefill or has_room(state, LIMITS)

    def send(self) -> LegGuard:
        self.turned_away += not self.has_room
        rate = self.ledger.prefill_rates(RANK).prefill_s_per_token
        work = LegWork(
            rank=RANK,
            kind="whole",
            prompt_tokens=self.prompt_tokens,
            uncached_tokens=self.prompt_tokens,
            work_s=self.prompt_tokens * rate,
        )
        return self.ledger.hold(work)

    def run(self, *, clients: int, requests: int, gap_s: float) -> None:
        """First tokens come one per `gap_s`, in order, whatever it is that takes so long."""
        queued = deque(self.send() for _ in range(clients))
        running: deque[tuple[float, LegGuard]] = deque()
        for _ in range(requests):
            if not queued:
                self._end(running, queued)
            self.now_s += gap_s
            leg = queued.popleft()
            leg.first_token()
            running.append((self.now_s + (ANSWER_TOKENS - 1) * self.step_s, leg))
            while running and running[0][0] <= self.now_s:
                self._end(running, queued)
        for leg in (*queued, *(leg for _, leg in running)):
            leg.__exit__(RuntimeError, RuntimeError("the client leaves"), None)

    def _end(self, running: deque[tuple[float, LegGuard]], queued: deque[LegGuard]) -> None:
        ends_s, leg = running.popleft()
        self.now_s = max(self.now_s, ends_s)
        leg.generated(ANSWER_TOKENS)
        leg.__exit__(None, None, None)
        queued.append(self.send())


@pytest.mark.parametrize(
    ("prompt_tokens", "gap_s", "step_s", "clients"),
    [
        pytest.param(16, 0.0005, 0.0001, 256, id="tiny-prompts"),
        pytest.param(4000, 0.006, 0.0001, 256, id="long-prompts"),
        pytest.param(4000, 0.04, 0.02, 32, id="side-by-side"),
    ],
)
def test_arrivals_at_our_own_pace_are_no_overload(
    prompt_tokens: int, gap_s: float, step_s: float, clients: int
) -> None:
    """An instant engine, or one that computes prompts side by side: only the sums are busy."""
    fleet = Fleet(16, step_s)
    fleet.run(clients=1, requests=20, gap_s=0.0005)
    fleet.prompt_tokens = prompt_tokens
    fleet.run(clients=32, requests=640, gap_s=gap_s)
    fleet.run(clients=clients, requests=512, gap_s=gap_s)

    assert fleet.turned_away == 0


def test_prompts_that_slow_answers_are_overload() -> None:
    """Once its answers take three times as long, the same sums fill the rank."""
    fleet = Fleet(4000, 0.01)
    fleet.run(clients=32, requests=100, gap_s=0.04)
    before = fleet.turned_away
    fleet.step_s = 0.03
    fleet.run(clients=32, requests=100, gap_s=0.04)

    assert before == 0
    assert fleet.turned_away > 30
