"""What every connector does: the contract of `balancer.connectors`, rule by rule."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.connectors.available import connectors
from balancer.connectors.contract import (
    Connector,
    HandOver,
    LegContext,
    LegRequest,
    NoTransferError,
    PullContext,
    Style,
)
from balancer.connectors.none import NoConnector
from balancer.core.fleet.snapshot import Instance, Role
from balancer.core.http.prefill_rewrite import prefill_body
from balancer.core.settings.transfer import read_transfer

InstanceOf = Callable[..., Instance]
ContextOf = Callable[..., LegContext]

ATTEMPT = "0123456789abcdef" * 2
BODY = {
    "model": "m",
    "messages": [{"role": "user", "content": "hi"}],
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 50,
    "min_tokens": 5,
    "n": 2,
}
ANSWER = {
    "choices": [{"finish_reason": "length"}],
    "kv_transfer_params": {"do_remote_prefill": True, "remote_block_ids": [1]},
}


class WriteConnector(Connector):
    """Both legs at once: the prefill engine writes to whoever announced the same transfer."""

    name = "write"

    def style(self, context: LegContext) -> Style:  # noqa: ARG002 - the contract's signature
        return "concurrent"

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


CASES: list[tuple[str, Connector, dict[str, Any]]] = [
    *((name, each, {}) for name, each in connectors().items() if name not in {"none", "multi"}),
    (
        "lmcache-receiver",
        connectors()["lmcache"],
        {
            "receiver_host": "10.0.0.2",
            "receiver_init_ports": [7300],
            "receiver_alloc_ports": [7400],
        },
    ),
    ("moriio-read", connectors()["moriio"], {"mode": "READ"}),
    ("moriio-ids", connectors()["moriio"], {"addresses": "request_id"}),
    ("offloading-p2p", connectors()["offloading"], {"p2p_host": "10.0.0.1"}),
    (
        "offloading-decoder-first",
        connectors()["offloading"],
        {"p2p_host": "10.0.0.1", "decoder_first": True},
    ),
    ("multi-serial", connectors()["multi"], {"children": {"nixl": {}, "offloading": {}}}),
    (
        "multi-concurrent",
        connectors()["multi"],
        {"children": {"mooncake": {}, "offloading": {"p2p_host": "10.0.0.1"}}},
    ),
    ("write", WriteConnector(), {}),
]


@pytest.fixture(params=CASES, ids=lambda each: each[0])
def case(request: pytest.FixtureRequest) -> tuple[str, Connector, dict[str, Any]]:
    found: tuple[str, Connector, dict[str, Any]] = request.param
    return found


@pytest.fixture
def connector(case: tuple[str, Connector, dict[str, Any]]) -> Connector:
    return case[1]


@pytest.fixture
def context(case: tuple[str, Connector, dict[str, Any]], context_of: ContextOf) -> LegContext:
    return context_of(case[1].name, case[2])


@pytest.fixture
def context_of(instance: InstanceOf) -> ContextOf:
    """Both legs of one request over a connector with this `transfer`."""

    def make(name: str, transfer: dict[str, Any] | None = None) -> LegContext:
        settings = read_transfer(name, transfer or {})
        return LegContext(
            request_id="abc",
            attempt_id=ATTEMPT,
            path="/v1/chat/completions",
            body=copy.deepcopy(BODY),
            prefill=replace(instance("p0", Role.PREFILL, name), transfer=settings),
            prefill_rank=0,
            decode=replace(instance("d0", Role.DECODE, name), transfer=settings),
            decode_rank=0,
        )

    return make


def answer_for(connector: Connector, context: LegContext) -> Mapping[str, Any] | None:
    return ANSWER if connector.style(context) == "serial" else None


def test_the_clients_body_is_not_mutated(connector: Connector, context: LegContext) -> None:
    """Every leg is written from a copy; a retry starts from the same body."""
    connector.prefill_leg(context)
    connector.decode_leg(context, answer_for(connector, context))

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
    """Plus the transfer, minus nothing: no token is taken off."""
    body = dict(connector.decode_leg(context, answer_for(connector, context)).body)
    body.pop("kv_transfer_params", None)

    assert body == BODY


def test_legs_are_the_same_when_written_again(connector: Connector, context: LegContext) -> None:
    """A connector remembers nothing."""
    assert connector.prefill_leg(context) == connector.prefill_leg(context)
    answer = answer_for(connector, context)
    assert connector.decode_leg(context, answer) == connector.decode_leg(context, answer)


def test_both_legs_carry_one_request_id(connector: Connector, context: LegContext) -> None:
    """The client's, or the same one made for the attempt."""
    prefill = connector.prefill_leg(context)
    decode = connector.decode_leg(context, answer_for(connector, context))

    assert prefill.request_id == decode.request_id


def test_what_names_the_transfer_differs_from_attempt_to_attempt(
    connector: Connector, context: LegContext
) -> None:
    """Blocks of an attempt that was given up can't be taken for those of the next."""
    again = replace(context, attempt_id="f" * 32)

    for write in (
        connector.prefill_leg,
        lambda each: connector.decode_leg(each, answer_for(connector, each)),
    ):
        first, second = write(context), write(again)
        named = {ATTEMPT in repr(first.body), ATTEMPT in str(first.request_id)}
        assert "f" * 32 not in repr(first)
        if any(named):  # else the leg names no transfer, and there is nothing to mix up
            assert first != second


def test_a_serial_decode_leg_needs_the_prefill_answer(
    connector: Connector, context: LegContext
) -> None:
    """A missing one is a failed prefill leg, with a status and a code."""
    if connector.style(context) == "concurrent":
        assert connector.decode_leg(context, None).body["kv_transfer_params"]
        return
    with pytest.raises(NoTransferError) as caught:
        connector.decode_leg(context, None)
    assert (caught.value.status, caught.value.code) == (502, "no_transfer")


def test_legs_use_only_the_keys_they_declare(connector: Connector, context: LegContext) -> None:
    """What `multi` relies on to refuse children that clash."""
    declared = connector.params() | {"remote_dp_rank_override", "pp_size", "tp_size"}
    if connector.name in {"multi", "write"}:
        declared = frozenset().union(*(each.params() for each in connectors().values()))
    legs = (
        connector.prefill_leg(context),
        connector.decode_leg(context, answer_for(connector, context)),
    )

    for leg in legs:
        assert set(leg.body.get("kv_transfer_params") or {}) <= declared
        assert leg.request_id is None or "x-request-id" in declared


def test_two_of_a_kind_never_mismatch(connector: Connector, context: LegContext) -> None:
    """Instances that are set up alike can hand over to each other."""
    assert connector.mismatch(context.prefill, context.decode) is None


def test_a_lease_is_below_the_engines_own(connector: Connector, context: LegContext) -> None:
    """30 s unless configured; only pull reads what nobody checks."""
    lease_s = connector.lease_s(context)

    assert lease_s is None or 0 < lease_s < 30
    reads_unchecked = "NixlSettings" in repr(context.prefill.transfer)
    assert (lease_s is not None) == reads_unchecked


def test_who_needs_a_prefill_leg(
    case: tuple[str, Connector, dict[str, Any]], context_of: ContextOf
) -> None:
    """Engines that take every prompt for handed over; all others compute what nobody sends."""
    name, connector, transfer = case
    target = context_of(connector.name, transfer).decode

    assert connector.needs_prefill(target) == (name in {"p2p_nccl", "moriio-read"})


@given(
    tokens=st.integers(1, 5000),
    sizes=st.frozensets(st.sampled_from([1, 16, 32, 128, 784]), min_size=1),
)
def test_plain_prompts_are_carried(
    instance: InstanceOf, tokens: int, sizes: frozenset[int]
) -> None:
    """By everybody but shared storage, which refuses one length in a block."""
    request = HandOver(prompt_tokens=tokens, block_sizes=sizes)
    target = instance("d0", Role.DECODE)

    for name, each in connectors().items():
        fatal = any(size > 1 and tokens % size == 1 for size in sizes)
        assert each.carries(request, target) == (name != "example" or not fatal)


def test_no_connector_hands_nothing_over(context_of: ContextOf) -> None:
    """Its decode leg is the client's body; a prefill leg would be thrown away."""
    connector, context = NoConnector(), context_of("none")

    assert connector.decode_leg(context, None).body is context.body
    with pytest.raises(NoTransferError, match="p0"):
        connector.prefill_leg(context)


def test_nobody_pulls_by_default(instance: InstanceOf) -> None:
    """A request that one instance serves whole stays as it is."""
    target = instance("m0", Role.MIXED)
    asked = PullContext(
        attempt_id=ATTEMPT,
        body=BODY,
        target=target,
        source=instance("m1", Role.MIXED),
        source_rank=0,
        more_tokens=10_000,
    )

    assert {each.pull(asked) for each in connectors().values()} == {None}
