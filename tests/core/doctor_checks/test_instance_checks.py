"""Checks of one engine: the fault that each names, and the nearest case it must leave alone."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from balancer.core.fleet.snapshot import Role
from indexer.core.model_cards import ServedModels
from kvlb.doctor.core import engine_checks, event_checks
from kvlb.doctor.core.examination import FLEET_CHECKS, INSTANCE_CHECKS, examine
from kvlb.doctor.core.exposition import EngineMetrics
from kvlb.doctor.core.facts import (
    Declared,
    FleetFacts,
    InstanceFacts,
    Probed,
    Tokenized,
    Told,
    Transfer,
)
from kvlb.doctor.core.findings import Level

MakeEngine = Callable[..., InstanceFacts]
MakeFleet = Callable[..., FleetFacts]
Found = Callable[..., list[str]]

NOT_TOLD = Probed(prompt_tokens=33)
"""An answer that doesn't say how much was cached."""


def test_nothing_is_found_of_engines_that_are_well(
    engine: MakeEngine, second: MakeEngine, pair: Callable[..., Any], found: Found
) -> None:
    """Two mixed engines, a pair, and a transfer that went through."""
    done = Transfer(host="10.0.0.1", port=5600, decode="d0", decode_host="10.0.0.2")

    assert found(engine(), second()) == []
    assert found(*pair(done)) == []


def test_nothing_is_made_of_what_is_not_known(told: Callable[..., Told], found: Found) -> None:
    """Facts that could not be gathered are no faults."""
    assert found(InstanceFacts(told=told(events="tcp://10.0.0.1:5557"))) == []


INSTANCE_FAULTS: list[tuple[str, dict[str, Any], str]] = [
    ("unreachable", {"fault": "unreachable", "detail": "x"}, "start the engine"),
    ("unauthorized", {"fault": "unauthorized", "detail": "x"}, "KVLB_ENGINE_API_KEY"),
    ("not_vllm", {"fault": "not_vllm", "detail": "x"}, "vllm serve"),
    ("unhealthy", {"health_status": 503}, "engine's log"),
    ("release_too_old", {"version": (0, 8)}, "upgrade to vLLM 0.9"),
    ("release_untested", {"version": (0, 34)}, "newer kvlb"),
    ("wrong_model", {"told": {"model": "other"}}, "`model: tiny`"),
    (
        "prefix_caching_off",
        {"metrics": EngineMetrics(has_prefix_caching=False), "declared": None},
        "--enable-prefix-caching",
    ),
    ("token_details_off", {"stream": {"probed": NOT_TOLD}}, "--enable-prompt-tokens-details"),
    (
        "request_failed",
        {"stream": {"probed": Probed(prompt_tokens=3, problem="status 500")}},
        "by hand",
    ),
    (
        "tokenizer_differs",
        {"tokenized": Tokenized(directory="/t", differs_at="a chat", ours=3, theirs=4)},
        "`tokens.models`",
    ),
    ("events_off", {"declared": {}, "streams": []}, "enable_kv_cache_events"),
    ("events_unknown", {"declared": None, "streams": []}, "`events: tcp://10.0.0.1:5557`"),
    ("no_replay", {"stream": {"answers_replay": None}}, '"replay_endpoint"'),
    ("replay_silent", {"stream": {"answers_replay": False}}, "`replay`"),
    (
        "publisher_connects",
        {"declared": {1: Declared(endpoint="tcp://0.0.0.0:5558")}},
        '"endpoint": "tcp://*:5557"',
    ),
    ("events_unconnected", {"stream": {"is_connected": False, "batches": 0}}, "`events`"),
    ("events_unseen", {"stream": {"problem": "port in use", "batches": 0}}, "/status"),
    ("events_silent", {"stream": {"batches": 0}}, "prefix caching on"),
    ("wrong_rank", {"stream": {"named_ranks": frozenset({0, 3, 4})}}, "`rank_base`"),
    ("ranks_differ", {"told": {"ranks": 2}}, "`ranks: 1`"),
    (
        "ipc_with_ranks",
        {"told": {"events": "ipc:///run/e", "ranks": 2}, "declared": None},
        "TCP endpoint",
    ),
    ("no_transfer", {"transfer": Transfer(problem="names no blocks")}, "--kv-transfer-config"),
]


@pytest.mark.parametrize(
    ("name", "facts", "change"), INSTANCE_FAULTS, ids=lambda each: str(each)[:24]
)
def test_fault_of_one_engine_is_named_with_its_remedy(
    name: str, facts: dict[str, Any], change: str, engine: MakeEngine, fleet: MakeFleet
) -> None:
    """That finding and no other, and what it says to change."""
    (finding,) = examine(fleet(engine(**facts)))

    assert finding.name == name
    assert finding.instance == "m0"
    assert finding.seen
    assert change in finding.change


def test_every_check_of_an_engine_is_played() -> None:
    """A new check needs a row in the table above, or a test of its own."""
    elsewhere = {"nixl_unreachable", "transfer_failed"}
    played = {name for name, _, _ in INSTANCE_FAULTS} - set(engine_checks.FAULTS)

    assert {check.__name__ for check in INSTANCE_CHECKS} == played | elsewhere | {"instance_fault"}
    assert len(FLEET_CHECKS) == 10


def test_alias_of_the_base_model_is_the_wrong_model(
    engine: MakeEngine, models: Callable[..., ServedModels]
) -> None:
    """Namespaces of keys go by the first served name."""
    facts = engine(told={"model": "short"}, models=models("tiny", "short"))
    (finding,) = engine_checks.wrong_model(facts)

    assert finding.name == "wrong_model"


def test_answers_of_old_releases_without_caching_tell_nothing(engine: MakeEngine) -> None:
    """Before 0.26 an answer with nothing cached has no details, flag or not."""
    metrics = EngineMetrics(has_prefix_caching=False)
    old = engine(version=(0, 20), metrics=metrics, stream={"probed": NOT_TOLD})
    (finding,) = engine_checks.token_details_off(replace(old, version=(0, 33)))

    assert finding.name == "token_details_off"
    assert list(engine_checks.token_details_off(old)) == []


def test_answers_are_judged_without_a_stream(engine: MakeEngine) -> None:
    """An engine that publishes nothing still has usage."""
    (finding,) = engine_checks.token_details_off(engine(streams=[], probed=NOT_TOLD))

    assert finding.name == "token_details_off"


def test_publisher_that_dials_another_machine_is_meant_to(engine: MakeEngine) -> None:
    """There we bind, and it connects to us."""
    facts = engine(declared={0: Declared(endpoint="tcp://10.0.0.9:5557")})

    assert list(event_checks.publisher_connects(facts)) == []


@pytest.mark.parametrize("host", ["0.0.0.0", "localhost", "10.0.0.1"])  # noqa: S104 - a fault
def test_publisher_that_dials_itself_is_found_and_not_called_silent(
    host: str, engine: MakeEngine, found: Found
) -> None:
    """One fault, one finding."""
    facts = engine(
        declared={0: Declared(endpoint=f"tcp://{host}:5557", replay="tcp://*:5657")},
        stream={"is_connected": False, "batches": 0},
    )

    assert found(facts) == ["publisher_connects"]


def test_bound_port_needs_no_connection(engine: MakeEngine, found: Found) -> None:
    """Whether a publisher that dials us has done so is told by its events."""
    facts = engine(stream={"is_connected": False, "binds": True, "batches": 0})

    assert found(facts) == ["events_silent"]


def test_slow_connection_pool_is_a_fault_only_below_ours(engine: MakeEngine, found: Found) -> None:
    """VLLM's 5 s are above our 4 s."""
    assert found(engine(idle_closed_s=1.0)) == ["keep_alive_too_short"]
    assert found(engine(idle_closed_s=5.0)) == []


def test_encode_instances_need_no_events_and_no_cache(engine: MakeEngine, found: Found) -> None:
    """They are asked how they are, and nothing else."""
    told = {"role": Role.ENCODE, "connector": "ec_cpu", "url": "http://10.0.0.9:8000"}
    encode = engine("e0", told=told, declared={}, streams=())

    assert found(engine(), encode) == []
    assert found(engine(), replace(encode, health_status=503)) == ["unhealthy"]


def test_that_nothing_was_sent_is_said(engine: MakeEngine, fleet: MakeFleet) -> None:
    """No finding must not look like no fault."""
    (finding,) = examine(fleet(engine(), is_probed=False))

    assert (finding.name, finding.level) == ("not_probed", Level.INFO)
