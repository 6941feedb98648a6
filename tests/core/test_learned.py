"""Rates learned from legs: what a sample teaches, and what it must not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.core.load.learned import LearnedRates, QuantileTracker
from balancer.core.load.ledger import RankRates
from balancer.core.load.whole_answers import WholeAnswer
from indexer.core.types import InstanceId, RankId

RANK, OTHER = (RankId(InstanceId(f"http://e{number}:8000"), 0) for number in (0, 1))
PRIOR = RankRates()


def prefill(
    learned: LearnedRates,
    *,
    tokens: int,
    seconds: float,
    times: int = 1,
    rank: RankId = RANK,
    start_s: float = 0.0,
) -> float:
    """Send prompts one after another, each computed before the next; return the time after."""
    now_s = start_s
    for _ in range(times):
        learned.on_first_token(rank, sent_s=now_s, now_s=now_s + seconds, tokens=tokens)
        now_s += seconds + 1
    learned.settle(rank, now_s)
    return now_s


def test_nothing_learned_means_the_prior() -> None:
    """The first minute has to work, too."""
    learned = LearnedRates()
    learned.settle(RANK, 0.0)

    assert learned.rates(RANK) == PRIOR


def test_one_sample_replaces_the_prior_of_the_fleet() -> None:
    """A new rank starts at what the fleet has shown."""
    learned = LearnedRates()
    prefill(learned, tokens=1000, seconds=1.02)

    assert learned.rates(OTHER).prefill_s_per_token == pytest.approx(1e-3)


def test_ranks_keep_their_own_pace() -> None:
    """With three samples a rank no longer follows the fleet."""
    learned = LearnedRates()
    prefill(learned, tokens=1000, seconds=0.12, times=9)
    prefill(learned, tokens=1000, seconds=0.52, times=3, rank=OTHER)

    assert learned.rates(RANK).prefill_s_per_token == pytest.approx(1e-4)
    assert learned.rates(OTHER).prefill_s_per_token == pytest.approx(5e-4)


def answer_whole(
    learned: LearnedRates, *, s_per_token: float, answers: int = 60, rank: RankId = RANK
) -> None:
    """Answers in one piece to prompts of many lengths, each of 101 tokens."""
    for number in range(answers):
        tokens = 500 + number % 7 * 1000
        whole = WholeAnswer(
            seconds=0.02 + tokens * s_per_token + 100 * 0.02,
            uncached_tokens=tokens,
            computed_tokens=tokens,
            tokens=101,
            others=0,
        )
        if learned.takes_whole(rank, now_s=100.0 + number):
            learned.on_whole(rank, whole)


def test_answers_in_one_piece_teach_each_rank_its_own_pace() -> None:
    """And a rank that has answered little yet the fleet's."""
    learned = LearnedRates()
    answer_whole(learned, s_per_token=1e-4)
    known = learned.knows_prefill
    of_new = learned.rates(OTHER).prefill_s_per_token
    answer_whole(learned, s_per_token=4e-4, rank=OTHER)

    assert known
    assert of_new == pytest.approx(1e-4)
    assert learned.rates(RANK).prefill_s_per_token == pytest.approx(1e-4)
    assert learned.rates(OTHER).prefill_s_per_token == pytest.approx(4e-4)
    assert learned.rates(OTHER).step_s == pytest.approx(0.02, rel=0.2)


def test_of_many_answers_in_one_piece_fifty_a_second_are_looked_at() -> None:
    """Each rank's own; those between would cost more than they tell."""
    learned = LearnedRates()
    ends_s = [100 + number / 1000 for number in range(1000)]
    taken = [learned.takes_whole(RANK, now_s) for now_s in ends_s]

    assert 45 <= sum(taken) <= 50
    assert learned.takes_whole(OTHER, ends_s[-1])


def test_streams_know_better_than_answers_in_one_piece() -> None:
    """A rank that streams learns nothing of the others, and one that nobody knows takes the streams'."""
    learned = LearnedRates()
    answer_whole(learned, s_per_token=4e-4)
    prefill(learned, tokens=1000, seconds=0.12, times=3)
    seen = learned.rates(RANK)
    answer_whole(learned, s_per_token=4e-4)

    assert seen.prefill_s_per_token == pytest.approx(1e-4)
    assert learned.rates(RANK) == seen
    assert learned.rates(OTHER).prefill_s_per_token == pytest.approx(1e-4)


def test_first_tokens_of_one_step_are_one_sample() -> None:
    """Three prompts that left the engine together took the time of all three."""
    learned = LearnedRates()
    for offset_s in (0.0, 0.001, 0.0015):
        learned.on_first_token(RANK, sent_s=0.0, now_s=0.62 + offset_s, tokens=1000)
    learned.settle(RANK, 0.6215)
    too_early = learned.rates(RANK)
    learned.settle(RANK, 1.0)
    learned.settle(RANK, 2.0)

    assert too_early == PRIOR
    assert learned.rates(RANK).prefill_s_per_token == pytest.approx(2e-4)


def test_a_queued_prompt_starts_when_the_one_before_is_done() -> None:
    """Both were sent at 0; each took a second of its own."""
    learned = LearnedRates()
    learned.on_first_token(RANK, sent_s=0.0, now_s=1.02, tokens=1000)
    learned.on_first_token(RANK, sent_s=0.0, now_s=2.04, tokens=1000)
    learned.settle(RANK, 3.0)

    assert learned.rates(RANK).prefill_s_per_token == pytest.approx(1e-3)


def test_waits_move_a_low_quantile_little() -> None:
    """Three of ten first tokens waited for memory: the rate is still that of the others."""
    learned = LearnedRates()
    now_s = prefill(learned, tokens=1000, seconds=0.12, times=9)
    for _ in range(20):
        now_s = prefill(learned, tokens=1000, seconds=0.12, times=2, start_s=now_s)
        now_s = prefill(learned, tokens=1000, seconds=5.0, times=1, start_s=now_s)

    assert learned.rates(RANK).prefill_s_per_token == pytest.approx(1e-4, rel=0.15)


def test_a_rate_follows_a_change() -> None:
    """The tracker finds a rank that became three times slower."""
    learned = LearnedRates()
    now_s = prefill(learned, tokens=2000, seconds=0.22, times=9)
    prefill(learned, tokens=2000, seconds=0.62, times=80, start_s=now_s)

    assert learned.rates(RANK).prefill_s_per_token == pytest.approx(3e-4, rel=0.1)


def test_cached_prompts_teach_the_fixed_part_not_the_rate() -> None:
    """A few uncached tokens took 5 ms: that is overhead."""
    learned = LearnedRates()
    prefill(learned, tokens=10, seconds=0.006, times=5)

    rates = learned.rates(RANK)
    assert rates.fixed_s == pytest.approx(0.005)
    assert rates.prefill_s_per_token == PRIOR.prefill_s_per_token


def test_the_fixed_part_is_at_most_a_tenth_of_a_second() -> None:
    """A small prompt that waited for seconds says nothing about overhead."""
    learned = LearnedRates()
    prefill(learned, tokens=10, seconds=7.0, times=5)

    assert learned.rates(RANK).fixed_s == 0.1


def test_work_that_overhead_could_explain_teaches_nothing() -> None:
    """Neither before a rate is known nor after."""
    learned = LearnedRates()
    prefill(learned, tokens=100, seconds=0.03)
    before = learned.rates(RANK)
    prefill(learned, tokens=1000, seconds=0.12, times=9)
    known = learned.rates(RANK)
    prefill(learned, tokens=100, seconds=3.0, times=9)
    prefill(learned, tokens=4000, seconds=0.001, times=9)

    assert before == PRIOR
    assert learned.rates(RANK) == known


def test_many_tiny_prompts_of_a_step_teach_nothing() -> None:
    """They came at our pace, so the time between such steps is ours."""
    learned = LearnedRates()
    prefill(learned, tokens=10, seconds=0.001, times=5)
    known = learned.rates(RANK)
    for step in range(20):
        for _ in range(10):
            learned.on_first_token(RANK, sent_s=100.0, now_s=101.0 + step / 100, tokens=16)
    learned.settle(RANK, 200.0)

    assert not learned.knows_prefill
    assert learned.rates(RANK) == known


def answer(learned: LearnedRates, *, step_s: float, times: int, rank: RankId = RANK) -> None:
    for _ in range(times):
        learned.on_decoded(rank, decode_s=step_s * 10, tokens=11, others=0)


def test_answers_are_stalled_by_what_the_fastest_need_not() -> None:
    """Three times as long as the fleet's fastest: two thirds of their time are lost."""
    learned = LearnedRates()
    answer(learned, step_s=0.02, times=5)
    answer(learned, step_s=0.06, times=50, rank=OTHER)

    assert learned.rates(RANK).stalled_share == 0
    assert learned.rates(OTHER).stalled_share == pytest.approx(2 / 3, abs=0.05)


def test_two_hundred_tokens_a_second_are_not_stalled() -> None:
    """Whatever an engine without a model did before."""
    learned = LearnedRates()
    answer(learned, step_s=0.0001, times=20)
    answer(learned, step_s=0.005, times=50)

    assert learned.rates(RANK).stalled_share == 0


def test_decode_steps_are_learned_per_rank() -> None:
    """Ten steps in half a second; a new rank starts at the fleet's step."""
    learned = LearnedRates()
    for _ in range(3):
        learned.on_decoded(RANK, decode_s=0.5, tokens=11, others=0)

    assert learned.rates(RANK).step_s == pytest.approx(0.05)
    assert learned.rates(OTHER).step_s == pytest.approx(0.05)


@pytest.mark.parametrize(("decode_s", "tokens"), [(1.0, 1), (0.0, 5)])
def test_an_answer_without_steps_teaches_no_step(decode_s: float, tokens: int) -> None:
    """One token takes no decode step, and no time is no measurement."""
    learned = LearnedRates()
    learned.on_decoded(RANK, decode_s=decode_s, tokens=tokens, others=0)

    assert learned.rates(RANK) == PRIOR


def test_the_growth_of_a_step_is_the_slope_over_others() -> None:
    """20 ms alone, 1 ms more for each other request."""
    learned = LearnedRates()
    for round_number in range(200):
        others = round_number * 7 % 10
        step_s = 0.02 + 0.001 * others
        learned.on_decoded(RANK, decode_s=step_s * 100, tokens=101, others=others)

    rates = learned.rates(RANK)
    assert rates.step_s_per_request == pytest.approx(0.001, rel=0.1)
    assert rates.step_s == pytest.approx(0.02, rel=0.1)


def test_growth_is_never_negative_nor_above_a_tenth_of_a_step() -> None:
    """Noise must not make a busy rank look fast, nor one request look like ten."""
    falling, rising = LearnedRates(), LearnedRates()
    for round_number in range(100):
        others = round_number % 10
        falling.on_decoded(RANK, decode_s=10 - 0.5 * others, tokens=101, others=others)
        rising.on_decoded(RANK, decode_s=1 + 10 * others, tokens=101, others=others)

    assert falling.rates(RANK).step_s_per_request == 0
    rates = rising.rates(RANK)
    assert rates.step_s_per_request <= 0.1 * rates.step_s


def test_output_length_is_the_fleets_mean() -> None:
    """Many answers outweigh the prior."""
    learned = LearnedRates()
    for _ in range(300):
        learned.on_output(1000)

    assert learned.rates(RANK).output_tokens == pytest.approx(1000, rel=0.02)


def test_a_forgotten_rank_starts_at_the_fleets_rate() -> None:
    """It may come back on other hardware."""
    learned = LearnedRates()
    prefill(learned, tokens=1000, seconds=0.12, times=9)
    prefill(learned, tokens=1000, seconds=0.52, times=3, rank=OTHER)
    learned.forget(OTHER)

    assert learned.rates(OTHER).prefill_s_per_token == pytest.approx(1e-4, rel=0.1)


@given(samples=st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=60))
def test_a_tracker_stays_near_its_samples(samples: list[float]) -> None:
    """It never leaves their range by more than one step."""
    tracker = QuantileTracker()
    for sample in samples:
        tracker.add(sample)

    assert min(samples) * 0.96 <= tracker.value <= max(samples) * 1.03


def test_decode_time_is_a_mean_per_rank() -> None:
    """Of whole answers; 0 until there was one."""
    learned = LearnedRates()
    unknown_s = learned.rates(RANK).decode_s
    for seconds in (1.0, 3.0):
        learned.on_decoded(RANK, decode_s=seconds, tokens=10, others=0)

    assert unknown_s == 0
    assert learned.rates(RANK).decode_s == 2.0
