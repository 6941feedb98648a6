"""Retries: how many a fleet has to bear."""

from hypothesis import given
from hypothesis import strategies as st

from balancer.core.reliability.retry_budget import RetryBudget


def made(*, share: float = 0.2, least: int = 0) -> RetryBudget:
    return RetryBudget(share=share, least=least, window_s=10.0, now_s=0.0)


def test_few_are_allowed_whatever_the_share() -> None:
    """A fleet with one request a minute retries, too."""
    budget = made(least=2)

    assert [budget.take(0.0) for _ in range(3)] == [True, True, False]
    assert (budget.made, budget.refused) == (2, 1)


def test_share_of_the_requests() -> None:
    """A fifth of fifty."""
    budget = made()
    for _ in range(50):
        budget.requested(0.0)

    assert [budget.take(0.0) for _ in range(11)] == [True] * 10 + [False]


def test_both_fade() -> None:
    """Retries of long ago are forgiven, requests of long ago earn nothing."""
    budget = made(least=1)
    assert budget.take(0.0)
    assert not budget.take(0.1)
    assert budget.take(1000.0)

    busy = made()
    for _ in range(50):
        busy.requested(0.0)
    assert not busy.take(1000.0)


@given(st.lists(st.tuples(st.booleans(), st.floats(min_value=0, max_value=20))))
def test_storm_never_passes(steps: list[tuple[bool, float]]) -> None:
    """Law: over all time there are at most `least` per window and the share of all requests."""
    budget, now_s, requests = made(least=3), 0.0, 0
    for is_request, after_s in steps:
        now_s += after_s
        if is_request:
            budget.requested(now_s)
            requests += 1
        else:
            budget.take(now_s)

    assert budget.made <= 3 * (1 + now_s / 10.0) + 0.2 * requests + 1e-6
