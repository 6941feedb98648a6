"""The breaker of `/tokenize`."""

from balancer.core.breaker import Breaker


def opened() -> Breaker:
    """A breaker that opened at 0 s."""
    breaker = Breaker(failures=2, cool_down_s=5.0)
    breaker.failed(0.0)
    breaker.failed(0.0)
    return breaker


def test_opens_after_failures_in_a_row() -> None:
    """One failure is not enough, two are."""
    breaker = Breaker(failures=2, cool_down_s=5.0)
    breaker.failed(0.0)
    assert breaker.allows(0.0)

    breaker.failed(0.0)
    assert not breaker.allows(1.0)


def test_success_between_failures_keeps_it_closed() -> None:
    """Only failures in a row count."""
    breaker = Breaker(failures=2, cool_down_s=5.0)
    breaker.failed(0.0)
    breaker.succeeded()
    breaker.failed(0.0)

    assert breaker.allows(0.0)


def test_lets_one_trial_through_per_cool_down() -> None:
    """A crowd must not run into a dead engine after each pause."""
    breaker = opened()

    assert breaker.allows(5.0)
    assert not breaker.allows(5.1)
    assert breaker.allows(10.0)


def test_successful_trial_closes_it() -> None:
    """From then on everybody is let through."""
    breaker = opened()
    assert breaker.allows(5.0)
    breaker.succeeded()

    assert breaker.allows(5.1)
    assert breaker.allows(5.2)
