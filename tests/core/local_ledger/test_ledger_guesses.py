"""What a rank without events is guessed to hold, from the legs that it ran."""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from balancer.core.load.ledger import LegWork
from balancer.core.load.local_ledger import LocalLedger
from indexer.core.types import BlockKey, InstanceId, RankId

RANK = RankId(InstanceId("http://e0:8000"), 0)
KEYS = [BlockKey(number) for number in range(1, 9)]
Work = Callable[..., LegWork]
Predicted = Callable[[LocalLedger], int]


@pytest.fixture
def guessing(work: Work) -> Work:
    """A leg on a rank that has no events."""

    def make(kind: str = "whole", *, keys: list[BlockKey] | None = None) -> LegWork:
        return replace(work(kind, keys=keys), remembered_s=60.0, block_size=16)

    return make


def test_rank_without_events_is_guessed_to_hold_what_legs_left(
    ledger: LocalLedger, clock: Any, predicted: Predicted, guessing: Work
) -> None:
    """Until so long after the last of them."""
    with ledger.hold(guessing()) as leg:
        assert not ledger.has_guesses(RANK)
        leg.first_token()
    clock.now_s += 50.0
    assert (predicted(ledger), ledger.has_guesses(RANK)) == (8, True)

    clock.now_s += 11.0
    ledger.hold(guessing(keys=[BlockKey(99)])).__exit__(None, None, None)

    assert predicted(ledger) == 0


def test_cached_tokens_correct_the_guesses(
    ledger: LocalLedger, clock: Any, predicted: Predicted, guessing: Work
) -> None:
    """Less than guessed: what was used no later is gone, and the leg's own blocks are there."""
    with ledger.hold(guessing(keys=[BlockKey(98)])):
        pass
    with ledger.hold(guessing()):
        pass
    clock.now_s += 1.0

    with ledger.hold(guessing(keys=KEYS[:4])) as leg:
        leg.cached(2 * 16)

    assert predicted(ledger) == 4
    assert ledger.predicted_blocks(RANK, [BlockKey(98)], 0) == 0


@pytest.mark.parametrize(("kind", "cached"), [("decode", 0), ("whole", 8 * 16), ("whole", None)])
def test_figures_that_correct_nothing(
    ledger: LocalLedger,
    clock: Any,
    kind: str,
    cached: int | None,
    predicted: Predicted,
    guessing: Work,
) -> None:
    """A transfer's, one that agrees, and none at all."""
    with ledger.hold(guessing()):
        pass
    clock.now_s += 1.0

    with ledger.hold(guessing(kind)) as leg:
        if cached is not None:
            leg.cached(cached)

    assert predicted(ledger) == 8


def test_failed_leg_leaves_no_guess(ledger: LocalLedger, guessing: Work) -> None:
    """Nor does one that is told of twice."""
    leg = ledger.hold(guessing())
    leg.__exit__(ValueError, ValueError(), None)
    leg.__exit__(None, None, None)

    assert not ledger.has_guesses(RANK)


def test_guesses_end_when_events_begin_and_when_the_rank_restarts(
    ledger: LocalLedger, work: Work, guessing: Work
) -> None:
    """Events know better; a new process knows nothing."""
    for end in (lambda: ledger.hold(work()), lambda: ledger.forget(RANK)):
        with ledger.hold(guessing()):
            pass
        assert ledger.has_guesses(RANK)
        end()
        assert not ledger.has_guesses(RANK)
