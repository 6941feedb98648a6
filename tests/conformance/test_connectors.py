"""What every PD connector must do; a made-up concurrent one proves the contract's other half."""

import copy
from collections.abc import Mapping
from typing import Any, Literal

import pytest

from balancer.connectors.available import connector_conflicts, connectors
from balancer.connectors.contract import Connector, LegContext, LegRequest, NoTransferError
from balancer.connectors.example import ExampleConnector
from balancer.connectors.nixl import NixlConnector
from balancer.connectors.none import NoConnector
from balancer.core.fleet import Instance, Role
from balancer.core.prefill_rewrite import prefill_body
from indexer.core.model_cards import ServedModels
from indexer.core.types import InstanceId

BODY = {
    "model": "m",
    "messages": [{"role": "user", "content": "hi"}],
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 50,
    "min_tokens": 5,
    "n": 2,
}


class WriteConnector:
    """Both legs at once: the prefill engine writes to whoever announced the same transfer."""

    name = "write"
    style: Literal["serial", "concurrent"] = "concurrent"

    def prefill_leg(self, context: LegContext) -> LegRequest:
        """Named by the request, so that neither leg waits for the other's answer."""
        params = {"do_remote_decode": True, "transfer_id": f"tx-{context.request_id}"}
        return LegRequest(
            body={**prefill_body(context.body), "kv_transfer_params": params},
            headers=((b"x-target", context.decode.alias.encode()),),
        )

    def decode_leg(
        self,
        context: LegContext,
        prefill_answer: Mapping[str, Any] | None,  # noqa: ARG002 - the contract's signature
    ) -> LegRequest:
        """Written before the prefill leg has answered."""
        params = {"do_remote_prefill": True, "transfer_id": f"tx-{context.request_id}"}
        return LegRequest(body={**context.body, "kv_transfer_params": params})


ANSWER = {
    "choices": [{"finish_reason": "length"}],
    "kv_transfer_params": {"do_remote_prefill": True, "remote_block_ids": [1]},
}

SPLITTING: list[Connector] = [ExampleConnector(), NixlConnector(), WriteConnector()]


def instance(alias: str, role: Role, connector: str = "nixl", model: str | None = "m") -> Instance:
    names = frozenset({model} if model else set())
    models = (
        ServedModels(base=model, aliases=names, adapters=frozenset(), cards=()) if model else None
    )
    return Instance(
        id=InstanceId(f"http://{alias}:8000"),
        alias=alias,
        role=role,
        connector=connector,
        models=models,
    )


@pytest.fixture
def context() -> LegContext:
    return LegContext(
        request_id="abc",
        path="/v1/chat/completions",
        body=copy.deepcopy(BODY),
        prefill=instance("p0", Role.PREFILL),
        prefill_rank=0,
        decode=instance("d0", Role.DECODE),
        decode_rank=0,
    )


def answer_for(connector: Connector) -> Mapping[str, Any] | None:
    return ANSWER if connector.style == "serial" else None


@pytest.fixture(params=SPLITTING, ids=lambda connector: connector.name)
def connector(request: pytest.FixtureRequest) -> Connector:
    found: Connector = request.param
    return found


def test_the_clients_body_is_not_mutated(connector: Connector, context: LegContext) -> None:
    """Every leg is written from a copy; a retry starts from the same body."""
    connector.prefill_leg(context)
    connector.decode_leg(context, answer_for(connector))

    assert context.body == BODY


def test_the_prefill_leg_is_one_token_and_no_stream(
    connector: Connector, context: LegContext
) -> None:
    """An engine accepts it, and it costs one sampled token."""
    body = connector.prefill_leg(context).body

    assert (body["stream"], body["max_tokens"], body["min_tokens"], body["n"]) == (False, 1, 1, 1)
    assert "stream_options" not in body
    assert body["messages"] == BODY["messages"]


def test_the_decode_leg_is_what_the_client_asked_for(
    connector: Connector, context: LegContext
) -> None:
    """Plus the transfer, minus nothing."""
    body = dict(connector.decode_leg(context, answer_for(connector)).body)
    body.pop("kv_transfer_params", None)

    assert body == BODY


def test_legs_are_the_same_when_written_again(connector: Connector, context: LegContext) -> None:
    """A connector remembers nothing."""
    assert connector.prefill_leg(context) == connector.prefill_leg(context)
    answer = answer_for(connector)
    assert connector.decode_leg(context, answer) == connector.decode_leg(context, answer)


def test_a_serial_decode_leg_needs_the_prefill_answer(context: LegContext) -> None:
    """A missing one is a failed prefill leg, with a status and a code."""
    for connector in SPLITTING:
        if connector.style == "serial":
            with pytest.raises(NoTransferError) as caught:
                connector.decode_leg(context, None)
            assert (caught.value.status, caught.value.code) == (502, "no_transfer")


def test_concurrent_legs_name_the_same_transfer(context: LegContext) -> None:
    """Neither saw the other's answer."""
    connector = WriteConnector()
    prefill, decode = connector.prefill_leg(context), connector.decode_leg(context, None)

    assert prefill.headers == ((b"x-target", b"d0"),)
    assert (
        prefill.body["kv_transfer_params"]["transfer_id"]
        == decode.body["kv_transfer_params"]["transfer_id"]
    )


def test_no_connector_hands_nothing_over(context: LegContext) -> None:
    """Its decode leg is the client's body; a prefill leg would be thrown away."""
    connector = NoConnector()

    assert connector.decode_leg(context, None).body is context.body
    with pytest.raises(NoTransferError, match="p0"):
        connector.prefill_leg(context)


def test_connectors_are_found_by_their_name() -> None:
    """The name in the configuration is the connector's own."""
    assert {name: each.name for name, each in connectors().items()} == {
        "example": "example",
        "nixl": "nixl",
        "none": "none",
    }


def test_a_pair_with_different_connectors_is_a_conflict() -> None:
    """The sentence names both instances and both connectors."""
    conflicts = connector_conflicts(
        [instance("p0", Role.PREFILL), instance("d0", Role.DECODE, "none")]
    )

    assert len(conflicts) == 1
    assert all(word in conflicts[0] for word in ("p0", "'nixl'", "d0", "'none'"))


@pytest.mark.parametrize(
    "fleet",
    [
        pytest.param(
            [("p0", Role.PREFILL, "nixl", "m"), ("d0", Role.DECODE, "nixl", "m")], id="fit"
        ),
        pytest.param(
            [
                ("p0", Role.PREFILL, "nixl", "m"),
                ("d0", Role.DECODE, "nixl", "m"),
                ("d1", Role.DECODE, "none", "other"),
            ],
            id="another-model",
        ),
        pytest.param(
            [
                ("p0", Role.PREFILL, "nixl", None),
                ("d0", Role.DECODE, "nixl", None),
                ("d1", Role.DECODE, "none", None),
            ],
            id="models-unknown-but-one-fits",
        ),
        pytest.param(
            [("p0", Role.PREFILL, "nixl", "m"), ("e0", Role.MIXED, "none", "m")], id="mixed"
        ),
    ],
)
def test_fleets_without_a_conflict(fleet: list[tuple[str, Role, str, str | None]]) -> None:
    """Nothing is refused that may be right."""
    assert connector_conflicts([instance(*each) for each in fleet]) == []


def test_a_prefill_instance_that_fits_nobody_is_a_conflict_before_models_are_known() -> None:
    """At configuration time there is nothing else to go by."""
    conflicts = connector_conflicts(
        [
            instance("p0", Role.PREFILL, "nixl", None),
            instance("d0", Role.DECODE, "none", None),
        ]
    )

    assert len(conflicts) == 1
