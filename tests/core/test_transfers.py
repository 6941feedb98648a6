"""Transfer times learned from hand-overs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.core.load.ledger import TransferRates
from balancer.core.load.transfers import STALE_S, LearnedTransfers
from indexer.core.types import InstanceId, RankId

P0, P1, D0 = (RankId(InstanceId(f"http://{name}:8000"), 0) for name in ("p0", "p1", "d0"))


def hand_over(
    learned: LearnedTransfers,
    seconds: float,
    *,
    source: RankId = P0,
    tokens: int = 1000,
    now_s: float = 0.0,
    times: int = 1,
) -> None:
    for _ in range(times):
        learned.on_hand_over(source, D0, seconds=seconds, tokens=tokens, now_s=now_s)


def test_nothing_is_known_before_three_hand_overs() -> None:
    """Until then the priors hold."""
    learned = LearnedTransfers()
    hand_over(learned, 1.005, times=2)

    known_before, rates_before = learned.are_known, learned.rates(P0, D0, 0.0)
    hand_over(learned, 1.005)

    assert (known_before, rates_before) == (False, TransferRates())
    assert learned.are_known
    assert learned.rates(P0, D0, 0.0).s_per_token == pytest.approx(1e-3)


def test_pairs_are_learned_apart() -> None:
    """A new pair is taken for a usual one."""
    learned = LearnedTransfers()
    hand_over(learned, 1.005, times=3)
    hand_over(learned, 0.105, source=P1, times=9)

    assert learned.rates(P0, D0, 0.0).s_per_token == pytest.approx(1e-3)
    assert learned.rates(P1, D0, 0.0).s_per_token == pytest.approx(1e-4)
    assert learned.rates(D0, P1, 0.0).s_per_token == pytest.approx(1e-4, rel=0.2)


def test_small_hand_overs_tell_the_fixed_part() -> None:
    """Where the tokens themselves take next to nothing."""
    learned = LearnedTransfers()
    hand_over(learned, 1.005, times=3)
    hand_over(learned, 0.051, tokens=1, times=3)

    rates = learned.rates(P0, D0, 0.0)
    assert rates.fixed_s == pytest.approx(0.05)
    assert rates.s_per_token == pytest.approx(1e-3)


def test_a_rate_that_was_too_good_to_be_true_is_mended() -> None:
    """By hand-overs of many tokens that take longer than any fixed part."""
    learned = LearnedTransfers()
    hand_over(learned, 0.0101, tokens=100_000, times=3)
    hand_over(learned, 1.5, tokens=30_000, times=60)

    rates = learned.rates(P0, D0, 0.0)
    assert rates.seconds(30_000) == pytest.approx(1.5, rel=0.1)
    assert rates.fixed_s < 0.01


def test_a_long_wait_of_a_few_tokens_tells_no_rate() -> None:
    """They waited for memory."""
    learned = LearnedTransfers()
    hand_over(learned, 1.005, times=3)
    before = learned.rates(P0, D0, 0.0).s_per_token
    hand_over(learned, 0.5, tokens=1, times=20)

    assert learned.rates(P0, D0, 0.0).s_per_token == before


@pytest.mark.parametrize("tokens", [4, 8], ids=["neither-nor", "hardly-more"])
def test_hand_overs_in_between_tell_nothing(tokens: int) -> None:
    """Waits of the same size would be taken for rate or for overhead."""
    learned = LearnedTransfers()
    hand_over(learned, 1.005, times=3)
    before = learned.rates(P0, D0, 0.0)
    hand_over(learned, 0.5, tokens=tokens, times=20)

    assert learned.rates(P0, D0, 0.0) == before


def test_what_took_no_longer_than_the_fixed_part_tells_no_rate() -> None:
    """A rate of nothing would make every hand-over look free."""
    learned = LearnedTransfers()
    hand_over(learned, 1.005, times=3)
    hand_over(learned, 0.004, times=20)

    assert learned.rates(P0, D0, 0.0).s_per_token == pytest.approx(1e-3)


@pytest.mark.parametrize(("seconds", "tokens"), [(0.0, 10), (-1.0, 10), (1.0, 0)])
def test_impossible_hand_overs_are_ignored(seconds: float, tokens: int) -> None:
    """The step may have been overestimated; a prompt may have been there already."""
    learned = LearnedTransfers()
    hand_over(learned, seconds, tokens=tokens, times=9)

    assert not learned.are_known


def test_a_slow_pair_gets_another_chance() -> None:
    """Nobody renews an estimate by which nobody goes; a fast one needs no second chance."""
    learned = LearnedTransfers()
    hand_over(learned, 0.105, source=P1, times=9)
    hand_over(learned, 1.005, times=3)
    usual = learned.rates(D0, D0, 0.0).s_per_token

    assert learned.rates(P0, D0, STALE_S).s_per_token == pytest.approx(1e-3)
    assert learned.rates(P0, D0, 1.5 * STALE_S).s_per_token < 9e-4
    assert learned.rates(P0, D0, 2 * STALE_S).s_per_token < 2 * usual
    assert learned.rates(P0, D0, 99 * STALE_S).s_per_token == pytest.approx(1e-5)


def test_a_restarted_rank_is_unknown() -> None:
    """It may be back behind another link."""
    learned = LearnedTransfers()
    hand_over(learned, 0.105, source=P1, times=9)
    hand_over(learned, 1.005, times=3)

    learned.forget(P0)

    assert learned.rates(P0, D0, 0.0).s_per_token == learned.rates(D0, D0, 0.0).s_per_token
    assert learned.rates(P1, D0, 0.0).s_per_token == pytest.approx(1e-4)


@given(st.lists(st.tuples(st.floats(1e-6, 60), st.integers(1, 100_000)), max_size=60))
def test_rates_stay_within_what_was_seen(samples: list[tuple[float, int]]) -> None:
    """Whatever is learned is positive and no slower than the slowest hand-over or the prior."""
    learned = LearnedTransfers()
    for seconds, tokens in samples:
        hand_over(learned, seconds, tokens=tokens)

    rates = learned.rates(P0, D0, 0.0)
    slowest = max([seconds / tokens for seconds, tokens in samples], default=0.0)
    assert 0 < rates.fixed_s <= 0.1
    assert 0 < rates.s_per_token <= 1.5 * max(slowest, TransferRates().s_per_token)


def test_pairs_of_ranks_that_left_are_dropped() -> None:
    """They are as new ones; the others stay."""
    learned = LearnedTransfers()
    hand_over(learned, 9.005, source=P1, times=4)
    hand_over(learned, 0.105, times=40)
    stays, left = (learned.rates(source, D0, 0.0) for source in (P0, P1))
    learned.retain(frozenset({P0, D0}))

    assert learned.rates(P0, D0, 0.0) == stays
    assert learned.rates(P1, D0, 0.0) == learned.rates(P0, P1, 0.0) != left
