"""Health: what probes and legs change, and how fast."""

from hypothesis import given
from hypothesis import strategies as st

from balancer.core.fleet.probe_state import ProbeOutcome, ProbeState, ProbeThresholds

LIMITS = ProbeThresholds(unhealthy_after=3, healthy_after=2)
UP = ProbeState().after_probe(ProbeOutcome.OK, None, LIMITS)


def probe(state: ProbeState, *reasons: str | None) -> ProbeState:
    """Probe results in a row; None is a good one."""
    for reason in reasons:
        outcome = ProbeOutcome.FAILED if reason else ProbeOutcome.OK
        state = state.after_probe(outcome, reason, LIMITS)
    return state


def test_first_good_probe_is_enough() -> None:
    """A starting fleet must not wait for hysteresis."""
    assert UP.healthy
    assert UP.reason is None


def test_one_bad_probe_changes_nothing() -> None:
    """A late answer under load is no outage."""
    assert probe(UP, "probe_timeout", "probe_timeout").healthy
    assert not probe(UP, "probe_timeout", "probe_timeout", "probe_timeout").healthy


def test_a_good_probe_starts_the_count_anew() -> None:
    """Only failures in a row count."""
    assert probe(UP, "x", "x", None, "x", "x").healthy


def test_refused_connection_needs_no_second_opinion() -> None:
    """Nobody listens there."""
    state = probe(UP, "engine_unreachable")

    assert not state.healthy
    assert state.reason == "engine_unreachable"


def test_comes_back_after_enough_good_probes() -> None:
    """After a failure `healthy_after` probes in a row are asked for."""
    down = probe(UP, "engine_unreachable")

    assert not probe(down, None).healthy
    assert probe(down, None).reason == "engine_unreachable"
    assert probe(down, None, None).healthy
    assert not probe(down, None, "x", None).healthy


def test_reason_follows_the_last_failure_while_down() -> None:
    """The status page shows what is wrong now."""
    assert probe(ProbeState(), "engine_unreachable", "unauthorized").reason == "unauthorized"


def test_failure_without_a_reason_has_one() -> None:
    """There is always something to show."""
    assert ProbeState().after_probe(ProbeOutcome.FAILED, None, LIMITS).reason == "probe_failed"


def test_draining_stops_at_the_next_good_probe() -> None:
    """503 takes new requests away at once and gives them back at once."""
    draining = UP.after_probe(ProbeOutcome.DRAINING, None, LIMITS)

    assert draining.draining
    assert draining.healthy
    assert not probe(draining, None).draining


def test_draining_from_the_start_says_so() -> None:
    """An instance that was never healthy shows why."""
    state = ProbeState().after_probe(ProbeOutcome.DRAINING, None, LIMITS)

    assert not state.healthy
    assert state.reason == "draining"


def test_leg_that_could_not_connect_counts_at_once() -> None:
    """The next request must not run into the same wall."""
    down = UP.after_leg(False, "engine_unreachable")

    assert (down.healthy, down.reason) == (False, "engine_unreachable")


def test_other_legs_change_nothing() -> None:
    """Those that break off are counted by the breaker, those that work cost nothing."""
    assert UP.after_leg(False, "stream_cut") is UP
    assert UP.after_leg(False, None) is UP
    assert UP.after_leg(True, None) is UP


steps = st.lists(st.one_of(st.booleans(), st.sampled_from(list(ProbeOutcome))))
"""A leg that went well or didn't, or a probe."""


@given(steps)
def test_nothing_bans_an_instance_for_good(history: list[bool | ProbeOutcome]) -> None:
    """Law: whatever happened, `healthy_after` good probes bring it back."""
    state = ProbeState()
    for what in history:
        if isinstance(what, bool):
            state = state.after_leg(what, "engine_unreachable")
        else:
            state = state.after_probe(what, "probe_timeout", LIMITS)

    state = probe(state, *[None] * LIMITS.healthy_after)

    assert state.healthy
    assert not state.draining
