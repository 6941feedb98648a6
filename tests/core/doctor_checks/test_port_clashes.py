"""Two listeners of one machine that want the same port."""

from collections.abc import Callable

import pytest

from kvlb.doctor.core import port_checks
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
    (finding,) = port_checks.ports_clash(fleet(engine(), second("http://10.0.0.1:8001")))

    assert (finding.name, finding.instance) == ("ports_clash", "m1")
    assert "of m0 and m1" in finding.seen


def test_names_of_one_machine_are_one_machine(
    engine: MakeEngine, second: MakeEngine, fleet: MakeFleet
) -> None:
    """`localhost` and its address, with the same event port."""
    one = engine(told={"url": "http://localhost:8000"})
    (finding,) = port_checks.ports_clash(fleet(one, second("http://127.0.0.1:8001")))

    assert "port 5557" in finding.seen


def test_ports_that_nobody_listens_on_do_not_clash(
    engine: MakeEngine, second: MakeEngine, fleet: MakeFleet, told: Callable[..., Told]
) -> None:
    """An engine that dials us has no event port; an ipc path is no port; another host neither."""
    dials, also = ({0: Declared(endpoint="tcp://10.0.0.9:5557", topic=topic)} for topic in "ab")
    ipc = engine(declared={0: Declared(endpoint="ipc:///run/e")})
    told_ipc = InstanceFacts(told=told(events="ipc:///run/e", ranks=2))
    no_replay = InstanceFacts(told=told(events="tcp://10.0.0.1:5557", ranks=2))
    both_dial = fleet(engine(declared=dials), second("http://10.0.0.1:8001", declared=also))

    assert examine(both_dial) == []
    assert list(port_checks.ports_clash(fleet(ipc, second()))) == []
    assert list(port_checks.ports_clash(fleet(told_ipc))) == []
    assert list(port_checks.ports_clash(fleet(no_replay))) == []


@pytest.mark.parametrize("topic", ["kv-events", "", None])
def test_engines_that_connect_to_one_port_need_a_topic_each(
    topic: str | None, engine: MakeEngine, second: MakeEngine, fleet: MakeFleet
) -> None:
    """Nothing else tells whose events come there."""
    dials = {0: Declared(endpoint="tcp://10.0.0.9:5557", topic=topic)}
    alone = second(declared={0: Declared(endpoint="tcp://10.0.0.9:5558", topic=topic)})
    (finding,) = examine(fleet(engine(declared=dials), second(declared=dials)))

    assert (finding.name, finding.instance) == ("topic_shared", "m0, m1")
    assert "tcp://10.0.0.9:5557" in finding.seen
    assert "`topic` of its own" in finding.change
    assert examine(fleet(engine(declared=dials), alone)) == []


def test_configured_topic_and_stream_count_for_more_than_what_the_engine_says(
    engine: MakeEngine, second: MakeEngine, fleet: MakeFleet
) -> None:
    """As they do for the indexer."""
    dials = {0: Declared(endpoint="tcp://10.0.0.9:5557", topic="kv-events")}
    other = second(declared=dials)
    named = engine(declared=dials, told={"topic": "its own"})
    elsewhere = engine(declared=dials, told={"events": "tcp://10.0.0.1:5557"})

    assert list(port_checks.topic_shared(fleet(named, other))) == []
    assert list(port_checks.topic_shared(fleet(elsewhere, other))) == []
