"""Breakers: when they open, whom they let through, and how they close."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.core.reliability.breaker import Breaker, BreakerRules, BreakerState, Phase

RULES = BreakerRules(failures=2, cool_down_s=5.0, max_cool_down_s=20.0)


def opened() -> Breaker:
    """A breaker that opened at 0 s."""
    breaker = Breaker(failures=2, cool_down_s=5.0)
    breaker.failed(0.0)
    breaker.failed(0.0)
    return breaker


def failed(state: BreakerState, *times_s: float) -> BreakerState:
    """After failures of attempts that began when they failed."""
    for now_s in times_s:
        state = state.after_failure(now_s, state.generation, "stream_cut", RULES)
    return state


OPENED = failed(BreakerState(), 0.0, 0.0)


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


def test_phases_follow_the_clock() -> None:
    """Open up to its trial, half open from then on."""
    phases = [OPENED.phase(now_s) for now_s in (0.0, 4.9, 5.0, 100.0)]

    assert phases == [Phase.OPEN, Phase.OPEN, Phase.HALF_OPEN, Phase.HALF_OPEN]
    assert BreakerState().phase(0.0) is Phase.CLOSED
    assert OPENED.reason == "stream_cut"


def test_success_between_failures_starts_the_count_anew() -> None:
    """And one after no failure changes nothing at all."""
    state = failed(BreakerState(), 0.0).after_success(0.0, 0)

    assert state == BreakerState()
    assert state.after_success(0.0, 0) is state


def test_each_trial_that_fails_doubles_the_pause() -> None:
    """Up to the limit, and no further."""
    state, now_s, pauses = OPENED, 0.0, []
    for _ in range(4):
        now_s = state.trial_s
        state = state.claimed(now_s, RULES)
        state = failed(state, now_s)
        pauses.append(state.trial_s - now_s)

    assert pauses == [10.0, 20.0, 20.0, 20.0]


def test_trial_that_never_reports_makes_room_for_the_next() -> None:
    """Later each time, like one that failed."""
    once = OPENED.claimed(5.0, RULES)
    twice = once.claimed(once.trial_s, RULES)

    assert (once.phase(14.9), once.phase(15.0)) == (Phase.OPEN, Phase.HALF_OPEN)
    assert twice.trial_s == 35.0


def test_only_a_trial_can_be_claimed() -> None:
    """Those who are sent there in any case change nothing."""
    assert OPENED.claimed(4.9, RULES) is OPENED
    assert BreakerState().claimed(0.0, RULES) == BreakerState()


def test_what_began_before_it_opened_says_nothing() -> None:
    """Neither good ends nor bad ends of old streams."""
    assert OPENED.after_failure(3.0, 0, "stream_cut", RULES) is OPENED
    assert OPENED.after_success(3.0, 0) is OPENED


def test_good_trial_closes_and_a_soon_failure_waits_longer() -> None:
    """An engine that dies every other second isn't tried every five."""
    closed = OPENED.claimed(5.0, RULES).after_success(5.0, OPENED.generation)
    assert closed.phase(5.0) is Phase.CLOSED

    assert failed(closed, 6.0, 6.0).trial_s == 6.0 + 20.0
    assert failed(closed, 25.0, 25.0).trial_s == 25.0 + 5.0


def test_somebody_else_may_open_it() -> None:
    """By comparison, without a failure in a row."""
    state = BreakerState().opened(1.0, "slow", RULES)

    assert (state.reason, state.trial_s) == ("slow", 6.0)


def test_another_life_begins_closed() -> None:
    """And what is still under way of the old one says nothing."""
    state = OPENED.renewed()

    assert state.phase(0.0) is Phase.CLOSED
    assert failed(state, 0.0).after_failure(0.0, OPENED.generation, "x", RULES).failures == 1


@pytest.mark.parametrize("state", [BreakerState(), OPENED, OPENED.claimed(5.0, RULES)])
def test_state_can_be_sent(state: BreakerState) -> None:
    """To another process, and back."""
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=BreakerState) == state


steps = st.lists(
    st.tuples(
        st.sampled_from(["good", "bad", "claim"]),
        st.floats(min_value=0, max_value=30),
        st.booleans(),
    )
)
"""What happens, after how many seconds, and if it began before the last change."""


@given(steps)
def test_nobody_is_banned_for_good(history: list[tuple[str, float, bool]]) -> None:
    """Law: whatever happened, a trial is due within the longest pause."""
    state, now_s = BreakerState(), 0.0
    for what, after_s, is_old in history:
        now_s += after_s
        began_in = state.generation - is_old
        if what == "good":
            state = state.after_success(now_s, began_in)
        elif what == "bad":
            state = state.after_failure(now_s, began_in, "x", RULES)
        else:
            state = state.claimed(now_s, RULES)

    assert state.phase(now_s + RULES.max_cool_down_s) is not Phase.OPEN
