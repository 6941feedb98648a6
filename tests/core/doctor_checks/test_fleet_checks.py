"""Checks of engines that must fit together: one model, a pair, an encoder and its consumers."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from balancer.core.fleet.snapshot import Role
from indexer.core.model_cards import ServedModels
from kvlb.doctor.core import fleet_checks
from kvlb.doctor.core.examination import examine
from kvlb.doctor.core.exposition import EngineMetrics
from kvlb.doctor.core.facts import FleetFacts, InstanceFacts, Transfer
from kvlb.doctor.core.findings import Finding, Level, by_severity

MakeEngine = Callable[..., InstanceFacts]
MakeFleet = Callable[..., FleetFacts]
MakePair = Callable[..., tuple[InstanceFacts, InstanceFacts]]
FAR: dict[str, Any] = {"port": 5600, "decode": "d0", "decode_host": "10.0.0.2"}
SILENT: dict[str, Any] = {"host": "10.9.9.9", "dial_problem": "where nobody answers"}
FAILED: dict[str, Any] = {"decode_problem": "status 500"}


def test_block_sizes_of_one_model_are_compared(
    engine: MakeEngine, second: MakeEngine, fleet: MakeFleet, models: Callable[..., ServedModels]
) -> None:
    """By events, else by metrics; engines that say neither, and other models, are left out."""
    small, large = engine(streams=[]), second(stream={"block_size": 32})
    silent = engine("m2", told={"url": "http://10.0.0.3:8000"}, streams=[], metrics=EngineMetrics())
    (finding,) = examine(fleet(small, large, silent))

    assert finding.name == "block_sizes_differ"
    assert "16: m0; 32: m1" in finding.seen
    assert examine(fleet(small, replace(large, models=models("other")))) == []


def test_connectors_of_a_pair_are_compared(pair: MakePair, fleet: MakeFleet) -> None:
    """They can't hand over to each other."""
    (finding,) = fleet_checks.connectors_differ(fleet(*pair(connector="example")))

    assert (finding.name, finding.instance) == ("connectors_differ", "p0")
    assert "'example'" in finding.seen


def test_a_consumer_without_an_address_is_found(engine: MakeEngine, fleet: MakeFleet) -> None:
    """Encode instances would push to nobody."""
    told = {"role": Role.ENCODE, "connector": "ec_mooncake", "url": "http://10.0.0.9:8000"}
    (finding,) = fleet_checks.encoders_differ(fleet(engine(), engine("e0", told=told)))

    assert (finding.name, finding.instance) == ("encoders_differ", "m0")
    assert "`ec_ip`" in finding.change


def test_prefill_without_decode_is_an_error_and_the_other_way_a_warning(
    engine: MakeEngine, pair: MakePair, fleet: MakeFleet
) -> None:
    """A decode instance alone still answers."""
    prefill, decode = pair()

    assert [each.level for each in fleet_checks.role_alone(fleet(prefill))] == [Level.ERROR]
    assert [each.level for each in fleet_checks.role_alone(fleet(decode))] == [Level.WARNING]
    assert list(fleet_checks.role_alone(fleet(engine()))) == []


def test_releases_of_a_pair_are_compared(pair: MakePair, fleet: MakeFleet) -> None:
    """NIXL refuses another release."""
    prefill, decode = pair()
    old = replace(decode, version=(0, 32))
    (finding,) = examine(fleet(prefill, old))

    assert finding.name == "releases_differ"
    assert "p0: 0.33, d0: 0.32" in finding.seen
    unknown = fleet(prefill, old, replace(decode, version=None))
    assert "unknown" in next(iter(fleet_checks.releases_differ(unknown))).seen


@pytest.mark.parametrize(
    ("transfer", "names"),
    [
        pytest.param(
            Transfer(**SILENT, decode_problem="x", **FAR), ["nixl_unreachable"], id="nobody-there"
        ),
        pytest.param(
            Transfer(host="localhost", **FAILED, **FAR),
            ["nixl_unreachable"],
            id="the-decode-engine-dials-itself",
        ),
        pytest.param(
            Transfer(host="127.0.0.1", **FAILED, **FAR), ["nixl_unreachable"], id="loopback"
        ),
        pytest.param(Transfer(**SILENT, port=5600), ["nixl_unreachable"], id="nobody-to-try"),
        pytest.param(Transfer(**SILENT, **FAR), [], id="only-from-here"),
        pytest.param(
            Transfer(host="p0.example", **FAILED, **FAR), ["transfer_failed"], id="named-host"
        ),
        pytest.param(Transfer(decode="d0", **FAILED), ["transfer_failed"], id="no-address"),
    ],
)
def test_transfer_is_judged_by_what_the_decode_engine_did(
    transfer: Transfer, names: list[str], pair: MakePair, found: Callable[..., list[str]]
) -> None:
    """A side channel out of reach, another failure, or none."""
    assert found(*pair(transfer)) == names


def test_findings_come_worst_first() -> None:
    """Errors, warnings, notes; then by instance."""
    found = [
        Finding(name="c", level=Level.INFO, instance="a", seen="", change=""),
        Finding(name="b", level=Level.ERROR, instance="b", seen="", change=""),
        Finding(name="a", level=Level.ERROR, instance="a", seen="", change=""),
    ]

    assert [each.name for each in by_severity(found)] == ["a", "b", "c"]
