"""Fleets whose clients want answers in one piece: what is learned of engines all the same, and used."""

import pytest

from balancer.core.routing.policies import named_policy
from kvlb.bench.clock import VirtualClock
from kvlb.bench.fleet import VirtualFleet, equal_engines
from kvlb.bench.overload import OverloadJob, run_overload
from kvlb.bench.play import Play
from kvlb.bench.saturation import SATURATION
from kvlb.bench.workloads import WORKLOADS

ENGINES, SLOWER = 4, 4


@pytest.mark.parametrize("streamed", [0, 30])
def test_a_slow_engine_is_found_out(streamed: int) -> None:
    """It gets less than its quarter of the calls, about as little as where all are streamed."""
    workload = WORKLOADS["chat"]
    fleet = VirtualFleet(
        VirtualClock(),
        engines=equal_engines(workload.engine, ENGINES, one_slow=True),
        policy=named_policy("kvlb"),
        seed=0,
    )
    calls = workload.calls(ENGINES, 0.6 * SATURATION["chat", ENGINES], 0)
    outcomes = Play(fleet, calls, streamed=streamed).run()
    slow, *others = fleet.engines
    share = sum(each.rank == slow for each in outcomes) / len(outcomes)
    slow_s, *others_s = (fleet.ledger.load(rank).rates.step_s for rank in (slow, *others))

    assert share < 0.1
    assert slow_s > SLOWER / 2 * max(others_s)


@pytest.mark.parametrize("streamed", [0, 30])
def test_an_overloaded_fleet_keeps_its_goodput(streamed: int) -> None:
    """Half more than it can serve: the line holds back what engines would only queue."""
    with_line, without = (
        run_overload(
            OverloadJob(
                workload="chat",
                engines=ENGINES,
                load=150,
                seed=0,
                promise_s=2.0,
                has_line=has_line,
                streamed=streamed,
            )
        )
        for has_line in (True, False)
    )

    assert with_line.good_per_s > 1.5 * without.good_per_s
    assert with_line.ttft_p99_s < without.ttft_p99_s / 1.5
    assert 0 < with_line.refused < 0.35
