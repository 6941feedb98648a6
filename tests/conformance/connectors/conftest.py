"""Instances of connectors, all of whose facts are known."""

from collections.abc import Callable

import pytest

from balancer.core.fleet.snapshot import Instance, Role
from balancer.core.fleet.transfer_facts import Registration, TransferFacts
from indexer.core.model_cards import ServedModels
from indexer.core.types import InstanceId

FACTS = TransferFacts(
    engine_ids={0: "engine-0"},
    registration=Registration(
        http_address="10.0.0.1:8000",
        zmq_address="host:10.0.0.1,handshake:6301,notify:61005",
        transfer_mode="WRITE",
    ),
)


@pytest.fixture(scope="session")
def instance() -> Callable[..., Instance]:
    """An instance of this role and connector; without a model, as before its first probe."""

    def describe(
        alias: str, role: Role, connector: str = "nixl", model: str | None = "m"
    ) -> Instance:
        names = frozenset({model} if model else set())
        models = (
            ServedModels(base=model, aliases=names, adapters=frozenset(), cards=())
            if model
            else None
        )
        return Instance(
            id=InstanceId(f"http://{alias}:8000"),
            alias=alias,
            role=role,
            connector=connector,
            models=models,
            facts=FACTS,
        )

    return describe
