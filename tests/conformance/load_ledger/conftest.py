"""Load ledgers of one process, of several, and one looked at from another process."""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import pytest

from balancer.core.load.ledger import (
    Learning,
    LegGuard,
    LegWork,
    LoadLedger,
    RankLoad,
    RankRates,
    TransferRates,
)
from balancer.core.load.local_ledger import LocalLedger
from balancer.core.load.shared_ledger import SharedLedger
from indexer.core.types import BlockKey, InstanceId, RankId

FIRST = RankId(InstanceId("http://e0:8000"), 0)
KEYS = [BlockKey(number) for number in range(1, 7)]


@dataclass(slots=True)
class Clock:
    """Time as the test says."""

    now_s: float = 5.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    """That of all ledgers of a test."""
    return Clock()


class NobodyListens:
    """Of news that the ledger doesn't keep."""

    def on_booked(self, rank: RankId) -> None:
        """Nobody's turn changes."""

    def on_outcome(self, instance: InstanceId, ok: bool, reason: str | None) -> None:
        """Nobody's breaker opens."""


def shared(clock: Clock, me: str = "me") -> SharedLedger:
    return SharedLedger(clock, me=me, lease_s=60.0, news=NobodyListens())


class SeenByPeer:
    """Legs are booked in one process, and looked at from another."""

    def __init__(self, clock: Clock) -> None:
        self._here = shared(clock, "here")
        self._there = shared(clock, "there")

    def hold(self, work: LegWork) -> LegGuard:
        return self._here.hold(work)

    def forget(self, rank: RankId) -> None:
        self._told().forget(rank)
        self._here.forget(rank)

    def empty(self, rank: RankId) -> None:
        self._told().empty(rank)
        self._here.empty(rank)

    def retain(self, ranks: AbstractSet[RankId]) -> None:
        self._told().retain(ranks)
        self._here.retain(ranks)

    def load(self, rank: RankId) -> RankLoad:
        return self._told().load(rank)

    def busy(self, rank: RankId) -> tuple[int, int]:
        return self._told().busy(rank)

    def prefill_rates(self, rank: RankId) -> RankRates:
        return self._told().prefill_rates(rank)

    def predicted_blocks(self, rank: RankId, keys: Sequence[BlockKey], start: int) -> int:
        return self._told().predicted_blocks(rank, keys, start)

    def promised_blocks(
        self, rank: RankId, keys: Sequence[BlockKey], start: int
    ) -> tuple[int, int]:
        return self._told().promised_blocks(rank, keys, start)

    def has_guesses(self, rank: RankId) -> bool:
        return self._told().has_guesses(rank)

    def transfer(self, source: RankId, target: RankId) -> TransferRates:
        return self._told().transfer(source, target)

    @property
    def learning(self) -> Learning | None:
        return self._told().learning

    def _told(self) -> SharedLedger:
        for message in self._here.outgoing():
            self._there.on_message(message)
        return self._there


@pytest.fixture(params=[LocalLedger, shared, SeenByPeer], ids=["local", "shared", "seen-by-a-peer"])
def build_ledger(request: pytest.FixtureRequest) -> Callable[[Clock], LoadLedger]:
    """Each kind. Add one by adding a parameter."""
    build: Callable[[Clock], LoadLedger] = request.param
    return build


@pytest.fixture
def ledger(build_ledger: Callable[[Clock], LoadLedger], clock: Clock) -> LoadLedger:
    """An empty one of each kind."""
    return build_ledger(clock)


@pytest.fixture
def work() -> Callable[..., LegWork]:
    """A leg of so many blocks."""

    def make(
        rank: RankId = FIRST, *, kind: str = "whole", keys: int = 6, believed_tokens: int = 0
    ) -> LegWork:
        return LegWork(
            rank=rank,
            kind=kind,
            prompt_tokens=100,
            uncached_tokens=100,
            work_s=0.01,
            keys=KEYS[:keys],
            believed_s=3.0,
            believed_tokens=believed_tokens,
        )

    return make
