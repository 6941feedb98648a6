"""What moriio sends with both legs."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.connectors.available import connectors
from balancer.connectors.contract import LegRequest, NoTransferError
from balancer.core.fleet.snapshot import Instance
from balancer.core.fleet.transfer_facts import Registration, TransferFacts

One = Callable[..., Instance]
Legs = Callable[..., tuple[LegRequest, LegRequest]]
Params = Callable[[LegRequest], Any]

P_ADDRESS = "host:10.0.0.1,handshake:6301,notify:61005"
D_ADDRESS = "host:fd00::2,handshake:6302,notify:61006"


@pytest.fixture(scope="session")
def moriio(one: One) -> One:
    """An instance whose address is known."""

    def describe(alias: str, address: str, **transfer: Any) -> Instance:
        return one(alias, "moriio", zmq_address=address, **transfer)

    return describe


def test_moriio_write_tells_each_leg_the_others_address_and_sizes(
    moriio: One, legs: Legs, params: Params, client_body: Mapping[str, Any], attempt_id: str
) -> None:
    """Both at once, under one transfer's name, and the client keeps its tokens."""
    prefill, decode = legs(
        moriio("p0", P_ADDRESS, dp_size=1, tp_size=4), moriio("d0", D_ADDRESS, dp_size=2, tp_size=8)
    )

    assert params(prefill) == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "transfer_id": f"tx-{attempt_id}",
        "remote_dp_size": 2,
        "remote_tp_size": 8,
        "remote_host": "fd00::2",
        "remote_handshake_port": 6302,
        "remote_notify_port": 61006,
    }
    assert params(decode) == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "transfer_id": f"tx-{attempt_id}",
        "remote_dp_size": 1,
        "remote_tp_size": 4,
        "remote_host": "10.0.0.1",
        "remote_handshake_port": 6301,
        "remote_notify_port": 61005,
        "remote_dp_rank": 0,
    }
    assert decode.body["max_tokens"] == client_body["max_tokens"]
    assert (prefill.request_id, decode.request_id) == (None, None)


def test_moriio_can_put_the_addresses_into_the_id(
    moriio: One, legs: Legs, params: Params, attempt_id: str
) -> None:
    """In the form that the engines' patterns take apart; then not into fields."""
    prefill, decode = legs(moriio("p0", P_ADDRESS, addresses="request_id"), moriio("d0", D_ADDRESS))

    expected = f"___prefill_addr_{P_ADDRESS}___decode_addr_{D_ADDRESS}_{attempt_id}"
    assert prefill.request_id == decode.request_id == expected
    assert "remote_host" not in params(prefill) | params(decode)


def test_moriio_read_copies_the_prefill_answer(moriio: One, legs: Legs, params: Params) -> None:
    """Every returned field wins over what we would say."""
    returned = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[1, 2]],
        "remote_engine_id": "e",
        "remote_host": "10.0.0.1",
        "remote_handshake_port": 6301,
        "remote_notify_port": 61005,
        "remote_dp_rank": 1,
        "remote_dp_rank_override": True,
        "remote_dp_size": 2,
        "remote_dp_size_local": 2,
        "tp_size": 4,
        "transfer_id": "tx-told",
    }
    source, target = moriio("p0", P_ADDRESS, mode="READ"), moriio("d0", D_ADDRESS, mode="READ")

    _, decode = legs(source, target, {"kv_transfer_params": returned})

    assert returned.items() <= params(decode).items()
    for answer in (None, {}, {"kv_transfer_params": {"do_remote_prefill": False}}):
        with pytest.raises(NoTransferError, match="no blocks"):
            legs(source, target, answer)


@pytest.mark.parametrize(("decode_rank", "agreed"), [(1, True), (0, False)])
def test_moriio_says_that_both_legs_agree_on_a_rank_only_if_they_do(
    decode_rank: int, agreed: bool, one: One, moriio: One, legs: Legs, params: Params
) -> None:
    """With the claim, only that rank of the decode engine would tell the prefill engine."""
    source = one("p0", "moriio", ranks=(0, 1), zmq_address=P_ADDRESS)

    _, decode = legs(source, moriio("d0", D_ADDRESS), prefill_rank=1, decode_rank=decode_rank)

    assert params(decode)["remote_dp_rank"] == 1
    assert params(decode)["remote_dp_size"] == 2
    assert params(decode).get("remote_dp_rank_override", False) is agreed


def test_moriio_knows_registered_engines(one: One, moriio: One, legs: Legs, params: Params) -> None:
    """Address, sizes and mode as the engine announces them; settings win."""
    registered = Registration(
        http_address="10.0.0.1:8000",
        zmq_address=P_ADDRESS,
        dp_size=2,
        tp_size=4,
        transfer_mode="READ",
    )
    source = one("p0", "moriio", facts=TransferFacts(registration=registered))
    connector = connectors()["moriio"]

    prefill, _ = legs(
        source,
        one("d0", "moriio", facts=TransferFacts(registration=registered), tp_size=1),
        {"kv_transfer_params": {"do_remote_prefill": True}},
    )

    assert (params(prefill)["remote_dp_size"], params(prefill)["remote_tp_size"]) == (2, 1)
    assert connector.mismatch(source, moriio("d0", D_ADDRESS)) == (
        "one runs in mode READ, one in WRITE"
    )


@pytest.fixture
def target(request: pytest.FixtureRequest, one: One, moriio: One) -> Instance:
    """A decode instance with this address, if any."""
    return moriio("d0", request.param) if request.param else one("d0", "moriio")


@pytest.mark.parametrize(
    ("target", "words"),
    [
        pytest.param(None, r"d0 is unknown.*`transfer\.zmq_address`", id="unknown"),
        pytest.param("10.0.0.1:6301", "d0 is not", id="other-form"),
        pytest.param("host:a,handshake:x,notify:1", "d0 is not", id="no-number"),
    ],
    indirect=["target"],
)
def test_moriio_without_an_address_fails_the_leg_by_name(
    target: Instance, words: str, moriio: One, legs: Legs
) -> None:
    """It says whose, and what to set."""
    with pytest.raises(NoTransferError, match=words):
        legs(moriio("p0", P_ADDRESS), target)


@given(host=st.ip_addresses().map(str), ports=st.tuples(st.integers(1, 65535), st.integers(1)))
def test_moriio_takes_any_address_apart(
    moriio: One, legs: Legs, params: Params, host: str, ports: tuple[int, int]
) -> None:
    """An IPv6 host keeps its colons."""
    address = f"host:{host},handshake:{ports[0]},notify:{ports[1]}"

    prefill, _ = legs(moriio("p0", P_ADDRESS), moriio("d0", address))

    told = params(prefill)
    found = (told["remote_host"], told["remote_handshake_port"], told["remote_notify_port"])
    assert found == (host, *ports)
