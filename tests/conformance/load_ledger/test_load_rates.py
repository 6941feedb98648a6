"""What every load ledger learns from legs: lengths of answers, transfers, a full cache."""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from balancer.core.load.ledger import LegWork, LoadLedger
from indexer.core.types import InstanceId, RankId

Work = Callable[..., LegWork]
HandOver = Callable[..., None]

FIRST, OTHER = (RankId(InstanceId(f"http://e{number}:8000"), 0) for number in (0, 1))


def test_outputs_are_guessed_by_the_pace(ledger: LoadLedger, clock: Any, work: Work) -> None:
    """Nobody counts tokens as they pass; a leg that ended has none."""
    first, second = ledger.hold(work()), ledger.hold(work())
    first.first_token()
    clock.now_s += 1
    second.first_token()
    clock.now_s += 1
    rates = ledger.load(FIRST).rates
    step_s = rates.step_s + 2 * rates.step_s_per_request

    assert ledger.load(FIRST).output_tokens == pytest.approx(3 / step_s)
    first.__exit__(None, None, None)
    second.__exit__(ValueError, ValueError(), None)
    assert ledger.load(FIRST).output_tokens == 0


@pytest.fixture
def hand_over(work: Work) -> HandOver:
    """A decode leg on FIRST whose prompt OTHER computed."""

    def run(ledger: LoadLedger, clock: Any, seconds: float, *, streamed: bool = True) -> None:
        booked = replace(work(kind="decode"), streamed=streamed)
        with ledger.hold(booked) as guard:
            clock.now_s += 0.3
            guard.handed_over(OTHER)
            clock.now_s += seconds
            guard.first_token()
            guard.handed_over(OTHER)

    return run


def test_transfers_are_learned_from_hand_overs(
    ledger: LoadLedger, clock: Any, hand_over: HandOver
) -> None:
    """From the end of the prefill leg to the first token, less the step that computes it."""
    prior = ledger.transfer(OTHER, FIRST)
    for _ in range(3):
        hand_over(ledger, clock, 1.0)
    learned = ledger.transfer(OTHER, FIRST)
    step_s = ledger.load(FIRST).rates.step_s

    assert learned.seconds(100) == pytest.approx(1.0 - step_s)
    ledger.forget(OTHER)
    assert ledger.transfer(OTHER, FIRST).seconds(100) > prior.seconds(100)


def test_a_transfer_that_nobody_saw_teaches_nothing(
    ledger: LoadLedger, clock: Any, work: Work, hand_over: HandOver
) -> None:
    """An answer that isn't streamed, or a leg that was never handed anything."""
    prior = ledger.transfer(OTHER, FIRST)
    for _ in range(9):
        hand_over(ledger, clock, 1.0, streamed=False)
        with ledger.hold(work(kind="decode")) as guard:
            guard.first_token()

    assert ledger.transfer(OTHER, FIRST) == prior


def test_rates_are_known_once_prefill_and_transfer_are(
    ledger: LoadLedger, clock: Any, work: Work, hand_over: HandOver
) -> None:
    """Comparing a learned time with a prior would decide by the prior."""
    for _ in range(3):
        hand_over(ledger, clock, 1.0)
    seen = ledger.learning
    assert seen is not None
    assert (seen.hand_overs, seen.needed) == (3, 3)
    assert seen.prefills < 3

    for _ in range(5):
        with ledger.hold(work()) as guard:
            clock.now_s += 1
            guard.first_token()
    assert ledger.learning is None


def test_arrivals_by_transfer_are_arrivals(ledger: LoadLedger, work: Work) -> None:
    """A local prefill delays them as it delays others; they bring no work."""
    ledger.hold(work(kind="decode"))

    load = ledger.load(FIRST)
    assert load.arrivals_per_s > 0
    assert load.work_share == 0


def test_a_full_cache_is_known_by_what_was_sent_there(
    ledger: LoadLedger, clock: Any, work: Work
) -> None:
    """Prompts and answers fill it; what leaves next is likely to be asked for if others were."""
    big = replace(work(), block_size=512, cache_tokens=10 * 512)
    for _ in range(20):
        with ledger.hold(big) as guard:
            clock.now_s += 1
            guard.first_token()
        clock.now_s += 2
    roomy = ledger.load(FIRST)
    with ledger.hold(big) as guard:
        clock.now_s += 1
        guard.first_token()
        guard.generated(5 * 512)
    full = ledger.load(FIRST)
    ledger.forget(FIRST)

    assert roomy.free_tokens == 4 * 512
    assert full.free_tokens == 0
    assert full.reuse_chance > 0.5
    assert ledger.load(OTHER).reuse_chance == ledger.load(OTHER).free_tokens == 0


def test_prompts_without_a_block_size_say_nothing_of_the_cache(
    ledger: LoadLedger, work: Work
) -> None:
    """Several in one request: their keys have no depth."""
    ledger.hold(replace(work(), block_size=0, cache_tokens=10 * 512))

    assert ledger.load(FIRST).reuse_chance == 0
