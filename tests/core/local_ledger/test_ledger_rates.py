"""What the in-memory ledger learns of a rank's speed from the legs that it ran, and how that fades."""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from balancer.core.load.ledger import LegWork, RankRates
from balancer.core.load.local_ledger import LocalLedger
from indexer.core.types import InstanceId, RankId

RANK = RankId(InstanceId("http://e0:8000"), 0)
Work = Callable[..., LegWork]


def test_rates_of_a_young_rank_are_corrected_and_fade(
    ledger: LocalLedger, clock: Any, work: Work
) -> None:
    """Ten requests in the first two seconds are five a second, not half a one."""
    for _ in range(10):
        with ledger.hold(work(tokens=800)):
            clock.now_s += 0.2
    busy = ledger.load(RANK)
    clock.now_s += 60
    idle = ledger.load(RANK)

    assert busy.arrivals_per_s == pytest.approx(5, rel=0.2)
    assert busy.work_share == pytest.approx(5 * 0.1, rel=0.2)
    assert idle.arrivals_per_s < busy.arrivals_per_s / 5


def test_tiny_prompts_count_for_what_they_take(ledger: LocalLedger, clock: Any, work: Work) -> None:
    """A hundred of them share steps: a fixed part for each would fill a rank."""
    fixed_s = ledger.prefill_rates(RANK).fixed_s
    for _ in range(100):
        ledger.hold(replace(work(tokens=10), work_s=0.001))
    tiny = ledger.load(RANK)
    ledger.hold(replace(work(tokens=10_000), work_s=1.0))
    long = ledger.load(RANK)

    assert tiny.work_share == pytest.approx(100 * 0.002, rel=0.05)
    assert long.work_share - tiny.work_share == pytest.approx(1.0 + fixed_s, rel=0.05)


@pytest.mark.parametrize(
    ("faster", "is_corrected"),
    [pytest.param(10, True, id="far-off"), pytest.param(2, False, id="fair")],
)
def test_work_that_took_far_less_counts_as_what_it_took(
    ledger: LocalLedger, clock: Any, faster: int, is_corrected: bool, work: Work
) -> None:
    """Else a rate that is far off makes an idle rank seem full for half a minute."""
    work_s = 20.0
    with ledger.hold(replace(work(tokens=200_000), work_s=work_s)) as guard:
        clock.now_s += 0.1
        ledger.hold(work(kind="decode"))
        clock.now_s += work_s / faster - 0.1
        booked = ledger.load(RANK).work_share
        guard.first_token()
    share = ledger.load(RANK).work_share

    assert share == pytest.approx(booked / faster if is_corrected else booked, rel=0.05)


def test_recent_work_counts_once_it_is_done(ledger: LocalLedger, clock: Any, work: Work) -> None:
    """Queued work is not recent work; ten minutes later two thirds are forgotten."""
    leg = ledger.hold(work(tokens=1000))
    queued_s = ledger.load(RANK).recent_work_s
    leg.first_token()
    done_s = ledger.load(RANK).recent_work_s
    clock.now_s += 600
    later_s = ledger.load(RANK).recent_work_s

    assert queued_s == 0
    assert done_s == pytest.approx(0.1)
    assert later_s == pytest.approx(0.1 / 2.718, rel=0.01)


def test_rates_are_learned_from_legs(ledger: LocalLedger, clock: Any, work: Work) -> None:
    """2,000 tokens in a second, then ten steps of 50 ms, several times over."""
    for _ in range(4):
        leg = ledger.hold(work(tokens=2000))
        clock.now_s += 1.02
        leg.first_token()
        clock.now_s += 0.5
        leg.generated(11)
        leg.__exit__(None, None, None)
    ledger.hold(work())

    rates = ledger.load(RANK).rates
    assert rates.prefill_s_per_token == pytest.approx(5e-4)
    assert rates.step_s == pytest.approx(0.05)


def test_an_answer_in_one_piece_teaches_its_length_and_its_pace(
    ledger: LocalLedger, clock: Any, work: Work
) -> None:
    """Nothing about prefill, as long as all its time may have been that of its tokens."""
    leg = ledger.hold(work(tokens=1000, streamed=False))
    clock.now_s += 30
    leg.first_token()
    leg.generated(501)
    leg.__exit__(None, None, None)

    rates = ledger.load(RANK).rates
    assert rates.output_tokens > RankRates().output_tokens
    assert rates.prefill_s_per_token == RankRates().prefill_s_per_token
    assert rates.step_s == pytest.approx(0.06, rel=0.01)


@pytest.mark.parametrize("is_cached", [False, True])
def test_answers_in_one_piece_teach_prefill_by_their_differences(
    ledger: LocalLedger, clock: Any, work: Work, is_cached: bool
) -> None:
    """Longer prompts take longer, but for what the engine says that it had."""
    known_before = ledger.knows_prefill
    for number in range(60):
        tokens = 500 + number % 7 * 1000
        leg = work(tokens=tokens, streamed=False)
        if is_cached:
            leg = replace(leg, prompt_tokens=8000, uncached_tokens=8000)
        guard = ledger.hold(leg)
        clock.now_s += 0.02 + tokens * 5e-4 + 100 * 0.03
        guard.generated(101)
        if is_cached:
            guard.cached(8000 - tokens)
        guard.__exit__(None, None, None)

    rates = ledger.load(RANK).rates
    assert (known_before, ledger.knows_prefill) == (False, True)
    assert rates.prefill_s_per_token == pytest.approx(5e-4, rel=0.02)
    assert rates.step_s == pytest.approx(0.03, rel=0.15)


@pytest.mark.parametrize("is_before", [False, True])
def test_prompts_computed_meanwhile_are_no_wait(
    ledger: LocalLedger, clock: Any, work: Work, is_before: bool
) -> None:
    """An answer shows what others' prompts took, too, those before it and those after it."""
    for number in range(60):
        tokens = 500 + number % 7 * 1000
        sizes = (tokens, 64) if is_before else (64, tokens)
        guards = [ledger.hold(work(tokens=each, streamed=False)) for each in sizes]
        clock.now_s += 0.02 + (64 + tokens) * 5e-4 + 100 * 0.03
        for guard in guards:
            guard.generated(101)
            guard.__exit__(None, None, None)
        clock.now_s += 10

    assert ledger.load(RANK).rates.prefill_s_per_token == pytest.approx(5e-4, rel=0.02)


def test_what_was_given_up_was_not_computed(ledger: LocalLedger, clock: Any, work: Work) -> None:
    """Prompts of clients that leave at once don't explain anybody's time."""
    for number in range(60):
        tokens = 500 + number % 7 * 1000
        guard = ledger.hold(work(tokens=tokens, streamed=False))
        gone = ledger.hold(work(tokens=9000 - tokens, streamed=False))
        gone.__exit__(ConnectionError, ConnectionError(), None)
        clock.now_s += 0.02 + tokens * 5e-4 + 100 * 0.03
        guard.generated(101)
        guard.__exit__(None, None, None)

    assert ledger.load(RANK).rates.prefill_s_per_token == pytest.approx(5e-4, rel=0.02)


def test_a_prefill_leg_says_nothing_about_output(ledger: LocalLedger, work: Work) -> None:
    """Its one token is thrown away."""
    leg = ledger.hold(work("prefill"))
    leg.generated(1)
    leg.__exit__(None, None, None)

    assert ledger.load(RANK).rates.output_tokens == RankRates().output_tokens
