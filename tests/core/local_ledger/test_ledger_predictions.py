"""Which blocks of its legs the in-memory ledger expects on a rank, and until when."""

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


def test_predictions_outlive_the_first_token_by_their_belief(
    ledger: LocalLedger, clock: Any, work: Work, predicted: Predicted
) -> None:
    """However long the prompt queued; then events must tell."""
    leg = ledger.hold(work(believed_s=2.0))
    clock.now_s += 500
    queued = predicted(ledger)
    leg.first_token()
    clock.now_s += 1.9
    believed = predicted(ledger)
    clock.now_s += 0.2

    assert (queued, believed, predicted(ledger)) == (8, 8, 0)


def test_an_expired_prediction_was_withdrawn_before(
    ledger: LocalLedger, clock: Any, work: Work, predicted: Predicted
) -> None:
    """Failing after the first token leaves an expiry without a prediction."""
    leg = ledger.hold(work())
    leg.first_token()
    leg.__exit__(RuntimeError, RuntimeError(), None)
    clock.now_s += 10
    ledger.hold(work())

    assert predicted(ledger) == 8


def test_a_transferred_prompt_is_predicted_from_its_first_token(
    ledger: LocalLedger, work: Work, predicted: Predicted
) -> None:
    """Until the transfer is done a sibling sent there would compute everything again."""
    leg = ledger.hold(work("decode"))
    before = predicted(ledger)
    queued = ledger.load(RANK)
    leg.first_token()

    assert (before, predicted(ledger)) == (0, 8)
    assert (queued.requests, queued.queued_tokens, queued.oldest_queued_s) == (1, 0, None)


def test_a_failed_transfer_predicts_nothing(
    ledger: LocalLedger, work: Work, predicted: Predicted
) -> None:
    """It failed before its first token: nothing was ever predicted, nothing queued."""
    ledger.hold(work("decode")).__exit__(RuntimeError, RuntimeError(), None)

    assert predicted(ledger) == 0
    assert ledger.load(RANK).requests == 0


def test_leg_that_found_nothing_ends_what_was_computed_before(
    ledger: LocalLedger, work: Work, predicted: Predicted
) -> None:
    """Its own blocks are there now, and those of legs that came after it will be."""
    ledger.hold(work()).first_token()
    found = ledger.hold(replace(work(keys=KEYS[:3]), uncached_tokens=900, block_size=16))
    later = ledger.hold(work(keys=KEYS[:4]))
    found.first_token()
    later.first_token()
    believed = predicted(ledger)

    found.cached(15)
    found.__exit__(None, None, None)

    assert (believed, predicted(ledger)) == (8, 4)


@pytest.mark.parametrize(
    ("kind", "block_size", "uncached", "cached"),
    [
        pytest.param("whole", 16, 900, 16, id="something-was-there"),
        pytest.param("whole", 16, 985, 0, id="nothing-was-believed"),
        pytest.param("whole", 16, 900, None, id="not-told"),
        pytest.param("whole", 0, 900, 0, id="several-prompts"),
        pytest.param("decode", 16, 900, 0, id="after-a-transfer"),
    ],
)
def test_leg_that_proves_nothing_ends_no_prediction(
    ledger: LocalLedger,
    work: Work,
    predicted: Predicted,
    kind: str,
    block_size: int,
    uncached: int,
    cached: int | None,
) -> None:
    """Of a cache that is short of room the ends go first: that says nothing of other prompts."""
    ledger.hold(work()).first_token()
    leg = replace(work(kind, keys=KEYS[:3]), uncached_tokens=uncached, block_size=block_size)
    found = ledger.hold(leg)
    found.first_token()
    if cached is not None:
        found.cached(cached)
    found.__exit__(None, None, None)

    assert predicted(ledger) == 8


def test_predictions_are_bounded(ledger: LocalLedger, work: Work, predicted: Predicted) -> None:
    """Past the limit the oldest go first, whole; one that is too long is cut."""
    ledger.hold(work(keys=KEYS))
    ledger.hold(work(keys=[BlockKey(number) for number in range(100, 112)]))
    oldest = predicted(ledger)
    many = [BlockKey(number) for number in range(200, 300)]
    ledger.hold(work(keys=many))

    assert oldest == 0
    assert ledger.predicted_blocks(RANK, many, 0) == 16
