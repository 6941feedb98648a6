"""What every encoder connector must do, and each field it sends or reads."""

import copy
from typing import Any

import msgspec
import pytest

from balancer.connectors.available import (
    connector_conflicts,
    connector_fault,
    encoder_conflicts,
    known_connectors,
)
from balancer.connectors.contract import NoTransferError
from balancer.connectors.encoders import EncodeContext, EncoderConnector, encoder_connectors
from balancer.core.fleet.snapshot import Instance, Role
from indexer.core.model_cards import ServedModels
from indexer.core.types import InstanceId

IMAGE = {"type": "image_url", "image_url": {"url": "data:,x"}, "uuid": "cat"}
TRANSFER = "0123456789abcdef" * 2
HASH = "a" * 64
BODY = {
    "model": "m",
    "messages": [{"role": "user", "content": [{"type": "text", "text": "secret"}, IMAGE]}],
    "mm_processor_kwargs": {"max_pixels": 1000},
    "media_io_kwargs": {"image": {"mode": "RGB"}},
    "priority": 3,
    "session_id": "s",
    "cache_salt": "salt",
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_completion_tokens": 50,
    "min_tokens": 5,
    "tools": [{"type": "function"}],
    "logprobs": True,
    "n": 2,
}
HANDLE = {"peer_host": "10.0.0.5", "peer_port": 5601, "size_bytes": 9, "metadata": {"grid": [1]}}


def instance(role: Role, alias: str, **fields: Any) -> Instance:
    served = ServedModels(
        base="m", aliases=frozenset({"m"}), adapters=frozenset(), cards=({"id": "m"},)
    )
    known: dict[str, Any] = {"models": served, "connector": "none"}
    return Instance(
        id=InstanceId(f"http://{alias}:8000"), alias=alias, role=role, **(known | fields)
    )


def context(**fields: Any) -> EncodeContext:
    consumer = instance(
        Role.MIXED,
        "m0",
        ranks=(4, 5),
        rank_base=4,
        ec_zmq_addrs=("tcp://10.0.0.1:14579", "tcp://10.0.0.1:14580"),
    )
    known: dict[str, Any] = {"consumer": consumer, "consumer_rank": 5}
    return EncodeContext(body=BODY, part=IMAGE, transfer_id=TRANSFER, **(known | fields))


@pytest.fixture(params=sorted(encoder_connectors()))
def connector(request: pytest.FixtureRequest) -> EncoderConnector:
    return encoder_connectors()[request.param]


def test_the_item_goes_alone(connector: EncoderConnector) -> None:
    """No text, no tools, one token, no stream; what decides the encoding stays."""
    sent = dict(connector.encode_body(context()))
    sent.pop("ec_transfer_params", None)

    assert sent == {
        "model": "m",
        "messages": [{"role": "user", "content": [IMAGE]}],
        "mm_processor_kwargs": {"max_pixels": 1000},
        "media_io_kwargs": {"image": {"mode": "RGB"}},
        "priority": 3,
        "session_id": "s",
        "cache_salt": "salt",
        "max_tokens": 1,
        "stream": False,
    }


def test_the_clients_body_stays_as_it_is(connector: EncoderConnector) -> None:
    """Another attempt begins with it."""
    before = copy.deepcopy(BODY)

    connector.encode_body(context())

    assert before == BODY


@pytest.mark.parametrize(
    "told", [{}, {"ec_transfer_params": None}, {"ec_transfer_params": [1]}], ids=str
)
def test_an_answer_without_parameters_is_survived(
    connector: EncoderConnector, told: dict[str, Any]
) -> None:
    """Releases before 0.26 have none."""
    encoding = connector.read(context(), told)

    assert encoding.connector == connector.name
    assert msgspec.json.encode(connector.consumer_params([encoding.handle]))


def test_no_items_need_no_parameters(connector: EncoderConnector) -> None:
    """The consumer's body is the client's then."""
    assert connector.consumer_params([]) == {}


def test_only_what_is_pushed_serves_one_request(connector: EncoderConnector) -> None:
    """And only there a consumer can't help itself."""
    pushes = connector.name == "ec_mooncake"

    assert (connector.reuses, connector.allows_local) == (not pushes, not pushes)


# Field by field.


def test_example_hands_over_nothing() -> None:
    """The consumer finds the file by the item's hash, also where 0.33 tells it."""
    example = encoder_connectors()["ec_example"]
    encoding = example.read(context(), {"ec_transfer_params": {HASH: {"metadata": {}}}})

    assert "ec_transfer_params" not in example.encode_body(context())
    assert example.consumer_params([encoding.handle]) == {}


def test_cpu_passes_on_where_each_item_is() -> None:
    """Unread, fields of later releases included, all items of the prompt in one mapping."""
    cpu = encoder_connectors()["ec_cpu"]
    first = cpu.read(context(), {"ec_transfer_params": {HASH: HANDLE}})
    second = cpu.read(context(), {"ec_transfer_params": {"b": HANDLE | {"later": 1}}})

    assert "ec_transfer_params" not in cpu.encode_body(context())
    assert cpu.consumer_params([first.handle, second.handle]) == {
        HASH: HANDLE,
        "b": HANDLE | {"later": 1},
    }


def test_cpu_does_not_announce_what_was_not_kept() -> None:
    """Its entry comes without an address; the consumer encodes the item itself."""
    cpu = encoder_connectors()["ec_cpu"]
    told = {HASH: {"metadata": {}}, "b": "no object"}

    assert cpu.read(context(), {"ec_transfer_params": told}).handle == {}


def test_mooncake_says_where_to_push_and_under_which_name() -> None:
    """The address of the very rank that will compute the prompt."""
    sent = encoder_connectors()["ec_mooncake"].encode_body(context())

    assert sent["ec_transfer_params"] == {
        "consumer_zmq": "tcp://10.0.0.1:14580",
        "ec_items": [{"transfer_id": TRANSFER}],
    }


@pytest.mark.parametrize(
    ("told", "mm_hash"),
    [
        ({"ec_items": [{"mm_hash": HASH, "transfer_id": "x"}]}, HASH),
        ({HASH: {"metadata": {}, "item_indices": [0]}}, HASH),
        ({"a": {}, "b": {}}, None),
        ({"ec_items": []}, None),
        ({}, None),
    ],
    ids=["list", "by hash", "two hashes", "empty list", "nothing"],
)
def test_mooncake_names_the_item_if_it_knows_how(told: dict[str, Any], mm_hash: str | None) -> None:
    """Without a hash the consumer goes by position."""
    mooncake = encoder_connectors()["ec_mooncake"]
    handle = mooncake.read(context(), {"ec_transfer_params": told}).handle

    expected = {"transfer_id": TRANSFER} | ({"mm_hash": mm_hash} if mm_hash else {})
    assert handle == expected
    assert mooncake.consumer_params([handle, handle]) == {"ec_items": [expected, expected]}


@pytest.mark.parametrize("rank", [3, 6])
def test_mooncake_needs_an_address_for_the_rank(rank: int) -> None:
    """The error names instance and setting."""
    with pytest.raises(NoTransferError, match=r"m0 .* rank \d: set its `ec_zmq_addrs`"):
        encoder_connectors()["ec_mooncake"].encode_body(context(consumer_rank=rank))


# Which instances go together.


def test_each_role_has_its_own_connectors() -> None:
    """An encode instance hands over no KV cache, and the others no encodings."""
    assert known_connectors(Role.ENCODE) == set(encoder_connectors())
    assert not known_connectors(Role.PREFILL) & known_connectors(Role.ENCODE)
    wrong = connector_fault(instance(Role.ENCODE, "e0", connector="nixl"))
    assert wrong is not None
    assert wrong.startswith("connector`: no connector `nixl`")
    assert connector_fault(instance(Role.ENCODE, "e0", connector="ec_cpu")) is None


def test_encode_instances_of_one_model_need_one_connector() -> None:
    """A consumer has only one."""
    fleet = [
        instance(Role.ENCODE, "e0", connector="ec_cpu"),
        instance(Role.ENCODE, "e1", connector="ec_example"),
        instance(Role.ENCODE, "e2", connector="ec_example"),
    ]

    (conflict,) = encoder_conflicts(fleet)

    assert conflict.instance == "e1"
    (sentence,) = connector_conflicts(fleet)
    assert sentence == (
        "encode instances e0 and e1 use connectors 'ec_cpu' and 'ec_example': give all of one "
        "model the same"
    )


def test_a_consumer_without_an_address_is_told_by_name() -> None:
    """At start, not when its first image waits for a minute."""
    pushing = instance(Role.ENCODE, "e0", connector="ec_mooncake")
    right = instance(Role.MIXED, "m0", ec_zmq_addrs=("tcp://10.0.0.1:14579",))
    half = instance(Role.PREFILL, "p0", ranks=(0, 1), ec_zmq_addrs=("tcp://10.0.0.2:14579",))
    decode = instance(Role.DECODE, "d0")

    (conflict,) = encoder_conflicts([pushing, right, half, decode])

    assert conflict.instance == "p0"
    assert conflict.seen == (
        "encode instance e0 pushes to p0, which has 1 `ec_zmq_addrs` for 2 ranks"
    )
    assert encoder_conflicts([instance(Role.ENCODE, "e0", connector="ec_cpu"), half]) == []
