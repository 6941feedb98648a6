"""The in-memory ledger, time as the test says, and legs of one rank."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from balancer.core.load.ledger import LegWork
from balancer.core.load.local_ledger import LocalLedger
from indexer.core.types import BlockKey, InstanceId, RankId

RANK = RankId(InstanceId("http://e0:8000"), 0)
KEYS = [BlockKey(number) for number in range(1, 9)]


@dataclass(slots=True)
class Clock:
    """Time as the test says."""

    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(scope="session")
def make_clock() -> Callable[[], Clock]:
    return Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="session")
def make_ledger() -> Callable[[Clock], LocalLedger]:
    """One that predicts little."""
    return lambda clock: LocalLedger(clock, max_predicted_blocks=16)


@pytest.fixture
def ledger(make_ledger: Callable[[Clock], LocalLedger], clock: Clock) -> LocalLedger:
    return make_ledger(clock)


@pytest.fixture(scope="session")
def work() -> Callable[..., LegWork]:
    """A leg of that rank, by default of all those keys."""

    def make(
        kind: str = "whole",
        *,
        tokens: int = 1000,
        keys: list[BlockKey] | None = None,
        streamed: bool = True,
        believed_s: float = 2.0,
    ) -> LegWork:
        return LegWork(
            rank=RANK,
            kind=kind,
            prompt_tokens=tokens,
            uncached_tokens=tokens,
            work_s=0.0 if kind == "decode" else tokens * 1e-4,
            keys=KEYS if keys is None else keys,
            streamed=streamed,
            believed_s=believed_s,
        )

    return make


@pytest.fixture(scope="session")
def predicted() -> Callable[[LocalLedger], int]:
    """How many of those keys are expected on the rank."""
    return lambda ledger: ledger.predicted_blocks(RANK, KEYS, 0)
