"""Decisions in virtual time: a seeded slice of what `python -m benchmarks.routing.pd` measures."""

import pytest

from balancer.core.routing.judgement import judge
from balancer.core.routing.plan import Reason
from balancer.core.settings.routing import PdSettings
from benchmarks.routing.fleet import LINKS, SimulatedFleet
from benchmarks.routing.pd import WAYS, Result, Scenario, run
from benchmarks.routing.replay import Outcome, replay
from benchmarks.routing.traces import load_calls
from benchmarks.routing.virtual_time import VirtualClock

SLICE = Scenario(trace="weka", ranks=2, link="fast", speed=5.0, seed=3, limit=150)


@pytest.fixture(scope="module")
def results() -> dict[str, Result]:
    return {way: run(SLICE, pd) for way, pd in WAYS.items()}


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    """The same slice, call by call."""
    clock = VirtualClock()
    fleet = SimulatedFleet(
        clock, prefill=2, decode=2, link=LINKS["fast"], pd=PdSettings(), seed=SLICE.seed
    )
    calls = load_calls(SLICE.trace, speed=SLICE.speed, seed=SLICE.seed, limit=SLICE.limit)
    done = replay(clock, fleet, calls)
    assert all(rank.core.load().open_reservations == 0 for rank in fleet.ranks.values())
    return done


def test_comparing_times_beats_both_extremes(results: dict[str, Result]) -> None:
    """In time to the first token, by a fifth, without a longer tail to the last one."""
    extremes = [results[way] for way in ("remote", "local")]
    decided = results["time"]

    assert decided.ttft_s <= 0.8 * min(each.ttft_s for each in extremes)
    assert decided.e2e_p99_s <= 1.02 * min(each.e2e_p99_s for each in extremes)


def test_it_beats_the_threshold(results: dict[str, Result]) -> None:
    """Which knows neither queues nor who would be stalled."""
    assert results["time"].ttft_s < results["threshold"].ttft_s


def test_regret_is_little(results: dict[str, Result]) -> None:
    """Estimates hold, or the other way would not have been better."""
    assert results["time"].regret < 0.1


def test_a_replay_is_the_same_every_time(results: dict[str, Result]) -> None:
    """By its seed; another one gives other figures."""
    assert run(SLICE, WAYS["time"]) == results["time"]


def test_times_are_compared_after_a_few_requests(outcomes: list[Outcome]) -> None:
    """The limit decides the first ones, then both ways are taken."""
    judged = [judge(each.plan, each.first_token_s) for each in outcomes]
    reasons = [each.plan.reason for each in outcomes]
    first_compared = next(number for number, each in enumerate(judged) if each is not None)

    assert first_compared <= 20
    assert {Reason.LOCAL_FASTER, Reason.REMOTE_PREFILL} <= set(reasons[first_compared:])
    assert None not in judged[first_compared:]


def test_estimates_of_the_first_token_hold_on_average(outcomes: list[Outcome]) -> None:
    """What was expected of the way taken is within a tenth of what it took."""
    judged = [each for one in outcomes if (each := judge(one.plan, one.first_token_s))]
    expected_s = sum(each.estimated_s for each in judged)
    paid_s = sum(each.paid_s or 0.0 for each in judged)

    assert paid_s == pytest.approx(expected_s, rel=0.1)
