"""Engines that are well but for what a test changes, and fleets of them."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from balancer.core.fleet.snapshot import Role
from indexer.core.model_cards import ServedModels
from kvlb.doctor.core.examination import examine
from kvlb.doctor.core.exposition import EngineMetrics
from kvlb.doctor.core.facts import (
    Declared,
    FleetFacts,
    InstanceFacts,
    Probed,
    Stream,
    Told,
    Transfer,
)

WELL = Stream(
    rank=0,
    endpoint="tcp://10.0.0.1:5557",
    is_connected=True,
    answers_replay=True,
    probed=Probed(prompt_tokens=33, tells_cached=True, cached_tokens=32),
    batches=2,
    named_ranks=frozenset({0}),
    block_size=16,
    first_hash=7,
    tiers=frozenset({"gpu"}),
)


def _models(base: str = "tiny", *more: str) -> ServedModels:
    return ServedModels(
        base=base, aliases=frozenset({base, *more}), adapters=frozenset(), cards=({"id": base},)
    )


@pytest.fixture
def models() -> Callable[..., ServedModels]:
    """What an engine answers of the names it serves a model by, the first one first."""
    return _models


def _told(name: str = "m0", **changes: Any) -> Told:
    return Told(**{"name": name, "url": "http://10.0.0.1:8000", **changes})


@pytest.fixture
def told() -> Callable[..., Told]:
    """What our configuration says of an instance."""
    return _told


def _engine(
    name: str = "m0",
    *,
    told: Mapping[str, Any] | None = None,
    stream: Mapping[str, Any] | None = None,
    **facts: Any,
) -> InstanceFacts:
    well: dict[str, Any] = {
        "told": _told(name, **told or {}),
        "health_status": 200,
        "version": (0, 33),
        "models": _models(),
        "declared": {0: Declared(endpoint="tcp://*:5557", replay="tcp://*:5657")},
        "metrics": EngineMetrics(block_size=16, has_prefix_caching=True, hash_algorithm="sha256"),
        "streams": [replace(WELL, **stream or {})],
    }
    return InstanceFacts(**{**well, **facts})


@pytest.fixture
def engine() -> Callable[..., InstanceFacts]:
    """One that is well, but for `facts`, what is `told` of it, and what its `stream` showed."""
    return _engine


@pytest.fixture
def second() -> Callable[..., InstanceFacts]:
    """A well engine on another machine."""

    def make(
        url: str = "http://10.0.0.2:8000", told: dict[str, Any] | None = None, **facts: Any
    ) -> InstanceFacts:
        return _engine("m1", told={"url": url, **(told or {})}, **facts)

    return make


@pytest.fixture
def pair() -> Callable[..., tuple[InstanceFacts, InstanceFacts]]:
    """A prefill and a decode engine; `decode` is what is told of the second."""

    def make(
        transfer: Transfer | None = None, **decode: Any
    ) -> tuple[InstanceFacts, InstanceFacts]:
        nixl = {"role": Role.PREFILL, "connector": "nixl"}
        wanted = {"role": Role.DECODE, "connector": "nixl", "url": "http://10.0.0.2:8000", **decode}
        return _engine("p0", told=nixl, transfer=transfer), _engine("d0", told=wanted)

    return make


def _fleet(*instances: InstanceFacts, **changes: Any) -> FleetFacts:
    return FleetFacts(instances=instances, **changes)


@pytest.fixture
def fleet() -> Callable[..., FleetFacts]:
    """What is known of all of them."""
    return _fleet


@pytest.fixture
def found() -> Callable[..., list[str]]:
    """Names of all findings about a fleet of these instances."""
    return lambda *instances: [each.name for each in examine(_fleet(*instances))]
