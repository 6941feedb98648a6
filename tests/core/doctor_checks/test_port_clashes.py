"""Two listeners of one machine that want the same port."""

from collections.abc import Callable

from kvlb.doctor.core import fleet_checks
from kvlb.doctor.core.examination import examine
from kvlb.doctor.core.facts import Declared, FleetFacts, InstanceFacts, Told

MakeEngine = Callable[..., InstanceFacts]
MakeFleet = Callable[..., FleetFacts]


def test_replay_port_of_one_rank_is_the_event_port_of_the_next(
    engine: MakeEngine, fleet: MakeFleet
) -> None:
    """VLLM's own example ports, 5557 and 5558, with two ranks."""
    declared = {
        rank: Declared(endpoint=f"tcp://*:{5557 + rank}", replay=f"tcp://*:{5558 + rank}")
        for rank in range(2)
    }
    (finding,) = examine(fleet(engine(declared=declared)))

    assert finding.name == "ports_clash"
    assert "replay of rank 0 and events of rank 1" in finding.seen
    assert "at least 2 away" in finding.change


def test_clash_is_found_in_the_configuration_of_an_engine_that_does_not_start(
    told: Callable[..., Told], found: Callable[..., list[str]]
) -> None:
    """VLLM ends at once; only the file says why."""
    asked = told(events="tcp://10.0.0.1:5557", replay="tcp://10.0.0.1:5558", ranks=2)
    facts = InstanceFacts(told=asked, fault="unreachable", detail="x")

    assert found(facts) == ["ports_clash", "unreachable"]


def test_engines_of_one_machine_need_ports_of_their_own(
    engine: MakeEngine, second: MakeEngine, fleet: MakeFleet
) -> None:
    """Two servers started with the default event port."""
    (finding,) = fleet_checks.ports_clash(fleet(engine(), second("http://10.0.0.1:8001")))

    assert (finding.name, finding.instance) == ("ports_clash", "m1")
    assert "of m0 and m1" in finding.seen


def test_ports_that_nobody_listens_on_do_not_clash(
    engine: MakeEngine, second: MakeEngine, fleet: MakeFleet, told: Callable[..., Told]
) -> None:
    """An engine that dials us has no event port; an ipc path is no port; another host neither."""
    dials = {0: Declared(endpoint="tcp://10.0.0.9:5557")}
    ipc = engine(declared={0: Declared(endpoint="ipc:///run/e")})
    told_ipc = InstanceFacts(told=told(events="ipc:///run/e", ranks=2))
    no_replay = InstanceFacts(told=told(events="tcp://10.0.0.1:5557", ranks=2))
    both_dial = fleet(engine(declared=dials), second("http://10.0.0.1:8001", declared=dials))

    assert examine(both_dial) == []
    assert list(fleet_checks.ports_clash(fleet(ipc, second()))) == []
    assert list(fleet_checks.ports_clash(fleet(told_ipc))) == []
    assert list(fleet_checks.ports_clash(fleet(no_replay))) == []
