"""Processes that share a ledger, each with a clock of its own, and messages between them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from balancer.core.load.shared_ledger import SharedLedger
from indexer.core.types import InstanceId, RankId

FIRST = RankId(InstanceId("http://e0:8000"), 0)
LEASE_S = 3.0


@dataclass(slots=True)
class Clock:
    """Time as the test says."""

    now_s: float = 5.0

    def __call__(self) -> float:
        return self.now_s


@dataclass(slots=True)
class News:
    """What peers did beside the ledger."""

    booked: list[RankId] = field(default_factory=list)
    outcomes: list[tuple[str, bool, str | None]] = field(default_factory=list)

    def on_booked(self, rank: RankId) -> None:
        self.booked.append(rank)

    def on_outcome(self, instance: InstanceId, ok: bool, reason: str | None) -> None:
        self.outcomes.append((instance, ok, reason))


@dataclass(slots=True)
class Process:
    """One of several, with a clock of its own."""

    me: str
    clock: Clock = field(default_factory=Clock)
    news: News = field(default_factory=News)
    ledger: SharedLedger = field(init=False)

    def __post_init__(self) -> None:
        self.ledger = SharedLedger(self.clock, me=self.me, lease_s=LEASE_S, news=self.news)

    @property
    def requests(self) -> int:
        return self.ledger.load(FIRST).requests


@pytest.fixture(scope="session")
def make_process() -> Callable[[str], Process]:
    """A process of this name that knows nobody yet."""
    return Process


def _deliver(sender: Process, *receivers: Process) -> Sequence[bytes]:
    messages = sender.ledger.outgoing()
    for receiver in receivers:
        for message in messages:
            receiver.ledger.on_message(message)
    return messages


@pytest.fixture(scope="session")
def deliver() -> Callable[..., Sequence[bytes]]:
    """What one has to say reaches these."""
    return _deliver


def _settle(*processes: Process) -> None:
    while any(each.ledger.is_waiting for each in processes):
        for each in processes:
            _deliver(each, *processes)


@pytest.fixture(scope="session")
def settle() -> Callable[..., None]:
    """Everything is told to everybody, answers included."""
    return _settle


@pytest.fixture
def two() -> tuple[Process, Process]:
    """Two processes that know each other; their clocks have nothing in common."""
    here, there = Process("here"), Process("there", Clock(9000.0))
    _settle(here, there)
    return here, there
