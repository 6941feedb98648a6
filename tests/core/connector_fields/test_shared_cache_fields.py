"""What connectors send whose engines share a cache, or name both sides in an id."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from balancer.connectors.available import connectors
from balancer.connectors.contract import LegRequest, NoTransferError
from balancer.core.fleet.snapshot import Instance
from balancer.core.fleet.transfer_facts import Registration, TransferFacts
from balancer.core.http.prefill_rewrite import prefill_body

One = Callable[..., Instance]
Legs = Callable[..., tuple[LegRequest, LegRequest]]
Params = Callable[[LegRequest], Any]
Pulled = Callable[..., Any]

NOTHING: Mapping[str, Any] = {}


# p2p_nccl


def test_p2p_nccl_puts_both_addresses_into_one_id(
    one: One, legs: Legs, client_body: Mapping[str, Any], attempt_id: str
) -> None:
    """And nothing into the bodies."""
    prefill, decode = legs(
        one("p0", "p2p_nccl", zmq_address="10.0.0.1:21001"),
        one(
            "d0",
            "p2p_nccl",
            facts=TransferFacts(
                registration=Registration(http_address="x:1", zmq_address="10.0.0.2:22001")
            ),
        ),
        NOTHING,
    )

    expected = f"___prefill_addr_10.0.0.1:21001___decode_addr_10.0.0.2:22001_{attempt_id}"
    assert prefill.request_id == decode.request_id == expected
    assert prefill.body == prefill_body(client_body)
    assert decode.body is client_body


def test_p2p_nccl_without_an_address_fails_the_leg_by_name(one: One, legs: Legs) -> None:
    """It says whose, and what to set."""
    with pytest.raises(NoTransferError, match=r"d0 is unknown.*`transfer\.zmq_address`"):
        legs(one("p0", "p2p_nccl", zmq_address="a:1"), one("d0", "p2p_nccl"), NOTHING)


# lmcache


def test_lmcache_sends_nothing_where_both_share_a_cache(
    one: One, legs: Legs, client_body: Mapping[str, Any]
) -> None:
    """V1 with a common tier, and MP's central server."""
    prefill, decode = legs(one("p0", "lmcache"), one("d0", "lmcache"), NOTHING)

    assert prefill.body == prefill_body(client_body)
    assert decode.body is client_body


def test_lmcache_names_the_decode_engines_receiver(
    one: One, legs: Legs, params: Params, client_body: Mapping[str, Any], attempt_id: str
) -> None:
    """One pair of ports for each of its tensor-parallel ranks."""
    target = one(
        "d0",
        "lmcache",
        receiver_host="10.0.0.2",
        receiver_init_ports=[7300, 7301],
        receiver_alloc_ports=[7400, 7401],
    )

    prefill, decode = legs(one("p0", "lmcache"), target, NOTHING)

    assert params(prefill) == {
        "disagg_spec": {
            "req_id": attempt_id,
            "receiver_host": "10.0.0.2",
            "receiver_init_port": [7300, 7301],
            "receiver_alloc_port": [7400, 7401],
        }
    }
    assert decode.body is client_body


# offloading


def test_offloading_sends_nothing_where_both_share_a_storage(
    one: One, legs: Legs, client_body: Mapping[str, Any]
) -> None:
    """What was stored is found by its hashes."""
    prefill, decode = legs(one("p0", "offloading"), one("d0", "offloading"), NOTHING)

    assert prefill.body == prefill_body(client_body)
    assert decode.body is client_body


def test_offloading_peers_name_one_request(
    one: One, legs: Legs, params: Params, attempt_id: str
) -> None:
    """The prefill engine keeps it, the decode engine knows where."""
    source = one("p0", "offloading", p2p_host="10.0.0.1", ranks=(0, 1))

    prefill, decode = legs(
        source, one("d0", "offloading", p2p_host="10.0.0.2"), NOTHING, prefill_rank=1
    )

    assert params(prefill) == {"remote_decoder": {"kv_request_id": attempt_id}}
    assert params(decode) == {
        "remote_prefiller": {
            "kv_request_id": attempt_id,
            "remote_host": "10.0.0.1",
            "remote_port": 5711,
        }
    }


def test_offloading_decode_engine_may_ask_first(one: One, legs: Legs) -> None:
    """The same fields, without waiting for the prefill engine's answer."""
    source = one("p0", "offloading", p2p_host="10.0.0.1")
    target = one("d0", "offloading", p2p_host="10.0.0.2", decoder_first=True)

    assert legs(source, target, None) == legs(source, target, NOTHING)
    with pytest.raises(NoTransferError):
        legs(source, one("d0", "offloading", p2p_host="10.0.0.2"), None)


def test_offloading_peers_are_both_peers(one: One) -> None:
    """A tier on one side only is a fault of the configuration."""
    told = connectors()["offloading"].mismatch(
        one("p0", "offloading", p2p_host="10.0.0.1"), one("d0", "offloading")
    )

    assert told == "`transfer.p2p_host` is set on one side only"


def test_offloading_fetches_from_the_peer_that_holds_more(
    pulled: Pulled, client_body: Mapping[str, Any], attempt_id: str
) -> None:
    """The peer is probed for the blocks; the body stays the client's otherwise."""
    source = {
        "remote_kv_source": {
            "kv_request_id": attempt_id,
            "remote_host": "10.0.0.2",
            "remote_port": 6001,
        }
    }

    assert pulled() == {**client_body, "kv_transfer_params": source}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param({"more_tokens": 511}, id="too-little"),
        pytest.param({"target": {"p2p_host": "10.0.0.1"}}, id="not-asked-for"),
        pytest.param({"target": {"pull_min_tokens": 1}}, id="no-tier"),
        pytest.param({"source": {}}, id="peer-without-tier"),
    ],
)
def test_offloading_fetches_only_where_that_is_set_up(case: dict[str, Any], pulled: Pulled) -> None:
    """Both have the tier, the operator wants it, and it is worth the trip."""
    assert pulled(**case) is None
