"""Every field on both legs, connector by connector, as vLLM reads them (docs/connectors.md)."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.connectors.available import connectors
from balancer.connectors.contract import (
    LegContext,
    LegRequest,
    NoTransferError,
    PullContext,
    bracketed,
    host_of,
)
from balancer.connectors.mooncake import read_engine_ids
from balancer.connectors.nixl_push import read_server_info
from balancer.core.fleet.snapshot import Instance, Role
from balancer.core.fleet.transfer_facts import NO_FACTS, Registration, TransferFacts
from balancer.core.http.prefill_rewrite import prefill_body
from balancer.core.settings.transfer import read_transfer
from indexer.core.types import InstanceId

ATTEMPT = "0123456789abcdef" * 2
BODY: dict[str, Any] = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 50, "stream": True}
NOTHING: Mapping[str, Any] = {}


def one(
    alias: str,
    connector: str,
    *,
    url: str = "http://10.0.0.1:8000",
    ranks: tuple[int, ...] = (0,),
    rank_base: int = 0,
    facts: TransferFacts = NO_FACTS,
    **transfer: Any,
) -> Instance:
    role = {"p": Role.PREFILL, "d": Role.DECODE, "m": Role.MIXED}[alias[0]]
    return Instance(
        id=InstanceId(url),
        alias=alias,
        role=role,
        connector=connector,
        ranks=ranks,
        rank_base=rank_base,
        facts=facts,
        transfer=read_transfer(connector, transfer),
    )


def legs(
    prefill: Instance,
    decode: Instance,
    answer: Mapping[str, Any] | None = None,
    *,
    prefill_rank: int = 0,
    decode_rank: int = 0,
    earlier: Mapping[str, Any] | None = None,
) -> tuple[LegRequest, LegRequest]:
    connector = connectors()[prefill.connector]
    context = LegContext(
        request_id="abc",
        attempt_id=ATTEMPT,
        path="/v1/completions",
        body=BODY,
        prefill=prefill,
        prefill_rank=prefill_rank,
        decode=decode,
        decode_rank=decode_rank,
        earlier=earlier,
    )
    return connector.prefill_leg(context), connector.decode_leg(context, answer)


def params(leg: LegRequest) -> Any:
    return leg.body["kv_transfer_params"]


# nixl, pull

FIELDS_BY_RELEASE: dict[str, dict[str, Any]] = {
    "0.9.0": {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [1, 2],
        "remote_engine_id": "e",
        "remote_host": "10.0.0.1",
        "remote_port": 5600,
    },
    "0.9.2": {"tp_size": 2},
    "0.13.0": {"remote_request_id": "cmpl-abc-0-01234567"},
    "0.21.0": {"remote_num_tokens": 32, "remote_block_ids": [[1, 2]]},
    "0.26.0": {"remote_blocks_expiry_time": None},
    "0.28.0": {"transfer_mode": "pull"},
    "0.29.0": {"dcp_size": 1, "pp_size": 1},
    "0.31.0": {"remote_prefill_cached_tokens": 16},
    "0.33.0": {"remote_registration_generation": 3},
}


@pytest.mark.parametrize("release", FIELDS_BY_RELEASE)
def test_nixl_hands_every_releases_fields_over_verbatim(release: str) -> None:
    """Whatever the prefill engine says is the decode engine's business."""
    known = list(FIELDS_BY_RELEASE)
    told: dict[str, Any] = {}
    for each in known[: known.index(release) + 1]:
        told |= FIELDS_BY_RELEASE[each]

    prefill, decode = legs(one("p0", "nixl"), one("d0", "nixl"), {"kv_transfer_params": told})

    assert params(decode) == told
    assert (prefill.request_id, decode.request_id) == (None, None)


def test_nixl_gives_the_prefill_engine_what_an_earlier_turn_left() -> None:
    """The decode engine's own answer, asked of the prefill engine to be kept again."""
    left = {
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "remote_block_ids": [[7, 8]],
        "remote_engine_id": "d",
        "remote_request_id": "cmpl-x-0-01234567",
        "remote_host": "10.0.0.2",
        "remote_port": 5600,
        "tp_size": 1,
        "remote_num_tokens": 32,
    }

    prefill, _ = legs(
        one("p0", "nixl", bidirectional=True),
        one("d0", "nixl", bidirectional=True),
        {"kv_transfer_params": FIELDS_BY_RELEASE["0.9.0"]},
        earlier=left,
    )

    assert params(prefill) == left


def test_nixl_wants_both_ways_on_both_sides() -> None:
    """One engine would keep blocks that the other never reads."""
    connector = connectors()["nixl"]

    assert connector.mismatch(one("p0", "nixl", bidirectional=True), one("d0", "nixl")) == (
        "`transfer.bidirectional` is set on one side only"
    )


# nixl_push


def test_nixl_push_tells_decode_where_the_prefill_engine_listens() -> None:
    """No blocks: they are the decode engine's own. Both legs name the attempt's transfer."""
    source = one("p0", "nixl_push", engine_id="prefill-1", tp_size=2, pp_size=3)

    prefill, decode = legs(source, one("d0", "nixl_push", url="http://10.0.0.2:8000"))

    assert params(prefill) == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
        "transfer_id": f"xfer-{ATTEMPT}",
    }
    assert params(decode) == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "prefill-1",
        "remote_host": "10.0.0.1",
        "remote_port": 5600,
        "tp_size": 2,
        "pp_size": 3,
        "remote_request_id": f"abc-{ATTEMPT}",
        "transfer_id": f"xfer-{ATTEMPT}",
    }
    assert prefill.request_id == decode.request_id == f"abc-{ATTEMPT}"


def test_nixl_push_counts_a_ranks_port_and_id() -> None:
    """Each rank has a side channel and an engine id of its own."""
    source = one(
        "p0",
        "nixl_push",
        engine_id="e",
        kv_host="kv.example",
        side_channel_port=7000,
        ranks=(4, 5),
        rank_base=4,
    )

    _, decode = legs(source, one("d0", "nixl_push"), prefill_rank=5)

    assert params(decode)["remote_engine_id"] == "e_dp5"
    assert (params(decode)["remote_host"], params(decode)["remote_port"]) == ("kv.example", 7005)


def test_nixl_push_takes_what_the_engine_told_where_nothing_is_set() -> None:
    """Settings win over it."""
    facts = TransferFacts(
        engine_ids={0: "told"}, kv_host="kv.example", kv_port=6000, tp_size=4, pp_size=2
    )

    _, decode = legs(one("p0", "nixl_push", facts=facts, tp_size=8), one("d0", "nixl_push"))

    told = params(decode)
    assert (told["remote_engine_id"], told["remote_host"]) == ("told", "kv.example")
    assert (told["remote_port"], told["tp_size"], told["pp_size"]) == (6000, 8, 2)


def test_nixl_push_without_an_engine_id_fails_the_leg_by_name() -> None:
    """It says whose, and what to set."""
    with pytest.raises(NoTransferError, match=r"p0.*`transfer\.engine_id`"):
        legs(one("p0", "nixl_push"), one("d0", "nixl_push"))


def test_nixl_push_asks_only_who_prefills_and_has_no_id() -> None:
    """Of a decode engine nothing is needed."""
    connector = connectors()["nixl_push"]

    asked = connector.inquiry(one("p0", "nixl_push"))

    assert asked is not None
    assert asked.url == "http://10.0.0.1:8000/server_info?config_format=json"
    assert connector.inquiry(one("p0", "nixl_push", engine_id="e")) is None
    assert connector.inquiry(one("d0", "nixl_push")) is None


SERVER_INFO = {
    "vllm_config": {
        "kv_transfer_config": {"engine_id": "e", "kv_connector": "NixlPushConnector"},
        "parallel_config": {
            "tensor_parallel_size": 2,
            "pipeline_parallel_size": 1,
            "data_parallel_rank": 0,
        },
    },
    "vllm_env": {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "10.0.0.9",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": 5601,
    },
}


def test_server_info_tells_a_side_channel() -> None:
    """As development mode shows it."""
    assert read_server_info(SERVER_INFO) == TransferFacts(
        engine_ids={0: "e"}, kv_host="10.0.0.9", kv_port=5601, tp_size=2, pp_size=1
    )


def test_a_side_channel_on_localhost_is_no_address() -> None:
    """It is only what nobody has set; the host of the instance's own address is meant."""
    told = {**SERVER_INFO, "vllm_env": {"VLLM_NIXL_SIDE_CHANNEL_HOST": "localhost"}}

    facts = read_server_info(told)

    assert (facts.kv_host, facts.kv_port) == (None, None)


@pytest.mark.parametrize(
    ("told", "missing"),
    [
        pytest.param([], "vllm_config", id="no-object"),
        pytest.param({"vllm_config": "text"}, "vllm_config", id="text-form"),
        pytest.param(
            {"vllm_config": {"kv_transfer_config": None}}, "kv_transfer_config", id="no-transfer"
        ),
        pytest.param(
            {
                "vllm_config": {"kv_transfer_config": {"engine_id": None}, "parallel_config": {}},
                "vllm_env": {},
            },
            "engine_id",
            id="no-id",
        ),
    ],
)
def test_server_info_without_an_engine_id_is_refused(told: object, missing: str) -> None:
    """An engine that isn't set up for transfers can't take part."""
    with pytest.raises(ValueError, match=missing):
        read_server_info(told)


# mooncake


def test_mooncake_names_one_transfer_on_both_legs() -> None:
    """With all three fields without which a decode engine silently computes everything."""
    source = one("p0", "mooncake", facts=TransferFacts(engine_ids={0: "e0"}))

    prefill, decode = legs(source, one("d0", "mooncake"))

    assert params(prefill) == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "transfer_id": f"xfer-{ATTEMPT}",
    }
    assert params(decode) == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_bootstrap_addr": "http://10.0.0.1:8998",
        "remote_engine_id": "e0",
        "transfer_id": f"xfer-{ATTEMPT}",
    }
    assert prefill.headers == ((b"x-data-parallel-rank", b"0"),)
    assert prefill.body["min_tokens"] == 1


def test_mooncake_names_the_engine_of_the_pinned_rank() -> None:
    """Where several ranks are behind the address the leg is pinned anyway."""
    source = one(
        "p0",
        "mooncake",
        ranks=(2, 3),
        rank_base=2,
        facts=TransferFacts(engine_ids={2: "e2", 3: "e3"}),
        bootstrap_host="fd00::1",
        bootstrap_port=9000,
    )

    prefill, decode = legs(source, one("d0", "mooncake"), prefill_rank=3)

    assert params(decode)["remote_engine_id"] == "e3"
    assert params(decode)["remote_bootstrap_addr"] == "http://[fd00::1]:9000"
    assert prefill.headers == ()


def test_mooncake_takes_a_bootstrap_server_that_counts_from_zero() -> None:
    """Each address of a split group may have its own."""
    facts = TransferFacts(engine_ids={0: "local"})
    source = one("p1", "mooncake", ranks=(4,), rank_base=4, facts=facts)

    _, decode = legs(source, one("d0", "mooncake"), prefill_rank=4)

    assert params(decode)["remote_engine_id"] == "local"


def test_mooncake_without_engine_ids_fails_the_leg_by_name() -> None:
    """Never sent with a field missing."""
    with pytest.raises(NoTransferError, match=r"p0 .*rank 0.*`transfer\.bootstrap_port`"):
        legs(one("p0", "mooncake"), one("d0", "mooncake"))


def test_mooncake_asks_the_bootstrap_server_of_who_prefills() -> None:
    """On a port of its own."""
    connector = connectors()["mooncake"]

    asked = connector.inquiry(one("p0", "mooncake"))

    assert asked is not None
    assert asked.url == "http://10.0.0.1:8998/query"
    assert connector.inquiry(one("d0", "mooncake")) is None


def test_a_bootstrap_servers_answer_is_engine_ids_by_rank() -> None:
    """What its workers listen on is between the engines."""
    told = {
        "0": {"engine_id": "a", "worker_addr": {"0": {"0": "tcp://10.0.0.1:1"}}},
        "1": {"engine_id": "b", "worker_addr": {}},
    }

    assert read_engine_ids(told).engine_ids == {0: "a", 1: "b"}


@pytest.mark.parametrize(
    "told", [{}, [], {"0": {}}, {"x": {"engine_id": "a"}}, {"0": "a"}, {"0": {"engine_id": 1}}]
)
def test_another_answer_of_a_bootstrap_server_is_refused(told: object) -> None:
    """Also the empty one of an engine whose workers haven't registered yet."""
    with pytest.raises(ValueError, match="engine"):
        read_engine_ids(told)


# moriio

P_ADDRESS = "host:10.0.0.1,handshake:6301,notify:61005"
D_ADDRESS = "host:fd00::2,handshake:6302,notify:61006"


def moriio(alias: str, address: str, **transfer: Any) -> Instance:
    return one(alias, "moriio", zmq_address=address, **transfer)


def test_moriio_write_tells_each_leg_the_others_address_and_sizes() -> None:
    """Both at once, under one transfer's name, and the client keeps its tokens."""
    prefill, decode = legs(
        moriio("p0", P_ADDRESS, dp_size=1, tp_size=4), moriio("d0", D_ADDRESS, dp_size=2, tp_size=8)
    )

    assert params(prefill) == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "transfer_id": f"tx-{ATTEMPT}",
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
        "transfer_id": f"tx-{ATTEMPT}",
        "remote_dp_size": 1,
        "remote_tp_size": 4,
        "remote_host": "10.0.0.1",
        "remote_handshake_port": 6301,
        "remote_notify_port": 61005,
        "remote_dp_rank": 0,
    }
    assert decode.body["max_tokens"] == BODY["max_tokens"]
    assert (prefill.request_id, decode.request_id) == (None, None)


def test_moriio_can_put_the_addresses_into_the_id() -> None:
    """In the form that the engines' patterns take apart; then not into fields."""
    prefill, decode = legs(moriio("p0", P_ADDRESS, addresses="request_id"), moriio("d0", D_ADDRESS))

    expected = f"___prefill_addr_{P_ADDRESS}___decode_addr_{D_ADDRESS}_{ATTEMPT}"
    assert prefill.request_id == decode.request_id == expected
    assert "remote_host" not in params(prefill) | params(decode)


def test_moriio_read_copies_the_prefill_answer() -> None:
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
    decode_rank: int, agreed: bool
) -> None:
    """With the claim, only that rank of the decode engine would tell the prefill engine."""
    source = one("p0", "moriio", ranks=(0, 1), zmq_address=P_ADDRESS)

    _, decode = legs(source, moriio("d0", D_ADDRESS), prefill_rank=1, decode_rank=decode_rank)

    assert params(decode)["remote_dp_rank"] == 1
    assert params(decode)["remote_dp_size"] == 2
    assert params(decode).get("remote_dp_rank_override", False) is agreed


def test_moriio_knows_registered_engines() -> None:
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


@pytest.mark.parametrize(
    ("target", "words"),
    [
        pytest.param(one("d0", "moriio"), r"d0 is unknown.*`transfer\.zmq_address`", id="unknown"),
        pytest.param(moriio("d0", "10.0.0.1:6301"), "d0 is not", id="other-form"),
        pytest.param(moriio("d0", "host:a,handshake:x,notify:1"), "d0 is not", id="no-number"),
    ],
)
def test_moriio_without_an_address_fails_the_leg_by_name(target: Instance, words: str) -> None:
    """It says whose, and what to set."""
    with pytest.raises(NoTransferError, match=words):
        legs(moriio("p0", P_ADDRESS), target)


@given(host=st.ip_addresses().map(str), ports=st.tuples(st.integers(1, 65535), st.integers(1)))
def test_moriio_takes_any_address_apart(host: str, ports: tuple[int, int]) -> None:
    """An IPv6 host keeps its colons."""
    address = f"host:{host},handshake:{ports[0]},notify:{ports[1]}"

    prefill, _ = legs(moriio("p0", P_ADDRESS), moriio("d0", address))

    told = params(prefill)
    found = (told["remote_host"], told["remote_handshake_port"], told["remote_notify_port"])
    assert found == (host, *ports)


# p2p_nccl


def test_p2p_nccl_puts_both_addresses_into_one_id() -> None:
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

    expected = f"___prefill_addr_10.0.0.1:21001___decode_addr_10.0.0.2:22001_{ATTEMPT}"
    assert prefill.request_id == decode.request_id == expected
    assert prefill.body == prefill_body(BODY)
    assert decode.body is BODY


def test_p2p_nccl_without_an_address_fails_the_leg_by_name() -> None:
    """It says whose, and what to set."""
    with pytest.raises(NoTransferError, match=r"d0 is unknown.*`transfer\.zmq_address`"):
        legs(one("p0", "p2p_nccl", zmq_address="a:1"), one("d0", "p2p_nccl"), NOTHING)


# lmcache


def test_lmcache_sends_nothing_where_both_share_a_cache() -> None:
    """V1 with a common tier, and MP's central server."""
    prefill, decode = legs(one("p0", "lmcache"), one("d0", "lmcache"), NOTHING)

    assert prefill.body == prefill_body(BODY)
    assert decode.body is BODY


def test_lmcache_names_the_decode_engines_receiver() -> None:
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
            "req_id": ATTEMPT,
            "receiver_host": "10.0.0.2",
            "receiver_init_port": [7300, 7301],
            "receiver_alloc_port": [7400, 7401],
        }
    }
    assert decode.body is BODY


# offloading


def test_offloading_sends_nothing_where_both_share_a_storage() -> None:
    """What was stored is found by its hashes."""
    prefill, decode = legs(one("p0", "offloading"), one("d0", "offloading"), NOTHING)

    assert prefill.body == prefill_body(BODY)
    assert decode.body is BODY


def test_offloading_peers_name_one_request() -> None:
    """The prefill engine keeps it, the decode engine knows where."""
    source = one("p0", "offloading", p2p_host="10.0.0.1", ranks=(0, 1))

    prefill, decode = legs(
        source, one("d0", "offloading", p2p_host="10.0.0.2"), NOTHING, prefill_rank=1
    )

    assert params(prefill) == {"remote_decoder": {"kv_request_id": ATTEMPT}}
    assert params(decode) == {
        "remote_prefiller": {
            "kv_request_id": ATTEMPT,
            "remote_host": "10.0.0.1",
            "remote_port": 5711,
        }
    }


def test_offloading_peers_are_both_peers() -> None:
    """A tier on one side only is a fault of the configuration."""
    told = connectors()["offloading"].mismatch(
        one("p0", "offloading", p2p_host="10.0.0.1"), one("d0", "offloading")
    )

    assert told == "`transfer.p2p_host` is set on one side only"


def pulled(
    *, more_tokens: int = 1000, connector: str = "offloading", **settings: Mapping[str, Any]
) -> Any:
    """What a mixed instance is sent that could fetch from another."""
    target = settings.get("target", {"p2p_host": "10.0.0.1", "pull_min_tokens": 512})
    source = settings.get("source", {"p2p_host": "10.0.0.2", "p2p_port": 6000})
    context = PullContext(
        attempt_id=ATTEMPT,
        body=BODY,
        target=one("m0", connector, **target),
        source=one("m1", connector, **source),
        source_rank=1,
        more_tokens=more_tokens,
    )
    return connectors()[connector].pull(context)


def test_offloading_fetches_from_the_peer_that_holds_more() -> None:
    """The peer is probed for the blocks; the body stays the client's otherwise."""
    source = {
        "remote_kv_source": {
            "kv_request_id": ATTEMPT,
            "remote_host": "10.0.0.2",
            "remote_port": 6001,
        }
    }

    assert pulled() == {**BODY, "kv_transfer_params": source}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param({"more_tokens": 511}, id="too-little"),
        pytest.param({"target": {"p2p_host": "10.0.0.1"}}, id="not-asked-for"),
        pytest.param({"target": {"pull_min_tokens": 1}}, id="no-tier"),
        pytest.param({"source": {}}, id="peer-without-tier"),
    ],
)
def test_offloading_fetches_only_where_that_is_set_up(case: dict[str, Any]) -> None:
    """Both have the tier, the operator wants it, and it is worth the trip."""
    assert pulled(**case) is None


# multi


def test_multi_merges_what_its_children_send() -> None:
    """One body, every child's keys."""
    children = {"nixl": {}, "offloading": {"p2p_host": "10.0.0.1"}}
    told = {"do_remote_prefill": True, "remote_block_ids": [1]}

    prefill, decode = legs(
        one("p0", "multi", children=children),
        one("d0", "multi", children=children),
        {"kv_transfer_params": told},
    )

    assert params(prefill)["do_remote_decode"] is True
    assert params(prefill)["remote_decoder"] == {"kv_request_id": ATTEMPT}
    assert params(decode).items() >= told.items()
    assert params(decode)["remote_prefiller"]["remote_host"] == "10.0.0.1"


def test_multi_runs_both_legs_at_once_if_one_child_does() -> None:
    """A child that looks for what has been stored is told that nothing has been yet."""
    children = {"nixl_push": {"engine_id": "e"}, "lmcache": {}, "p2p_nccl": {"zmq_address": "a:1"}}
    source, target = one("p0", "multi", children=children), one("d0", "multi", children=children)

    prefill, decode = legs(source, target)

    assert params(decode)["remote_engine_id"] == "e"
    assert prefill.request_id == decode.request_id


def test_multi_without_anything_to_send_leaves_the_body_alone() -> None:
    """Caches only: the client's own bytes go out."""
    children: dict[str, Any] = {"example": {}, "lmcache": {}}
    source, target = one("p0", "multi", children=children), one("d0", "multi", children=children)

    prefill, decode = legs(source, target, NOTHING)

    assert prefill.body == prefill_body(BODY)
    assert decode.body is BODY


def test_multi_asks_what_a_child_asks() -> None:
    """The first that has a question."""
    connector = connectors()["multi"]

    asked = connector.inquiry(one("p0", "multi", children={"lmcache": {}, "mooncake": {}}))

    assert asked is not None
    assert asked.url.endswith(":8998/query")
    assert connector.inquiry(one("p0", "multi", children={"lmcache": {}})) is None


@pytest.mark.parametrize(
    ("theirs", "told"),
    [
        pytest.param({"nixl": {}, "lmcache": {}}, "`lmcache`, `nixl`", id="another-child"),
        pytest.param({"nixl": {"bidirectional": True}}, "bidirectional", id="inside-a-child"),
        pytest.param({"nixl": {}}, None, id="alike"),
    ],
)
def test_multi_fits_where_its_children_fit(theirs: dict[str, Any], told: str | None) -> None:
    """The same ones, each with the other's."""
    connector = connectors()["multi"]

    found = connector.mismatch(
        one("p0", "multi", children={"nixl": {}}), one("d0", "multi", children=theirs)
    )

    assert (found is None) == (told is None)
    assert told is None or (found is not None and told in found)


def test_multi_fetches_as_its_child_does() -> None:
    """From a peer that has the same child."""
    with_tier = {"offloading": {"p2p_host": "10.0.0.1", "pull_min_tokens": 1}, "nixl": {}}
    other = {"offloading": {"p2p_host": "10.0.0.2"}, "nixl": {}}

    body = pulled(connector="multi", target={"children": with_tier}, source={"children": other})

    assert body["kv_transfer_params"]["remote_kv_source"]["remote_host"] == "10.0.0.2"
    assert (
        pulled(connector="multi", target={"children": with_tier}, source={"children": {"nixl": {}}})
        is None
    )


@pytest.mark.parametrize(
    ("url", "host", "shown"),
    [
        ("http://10.0.0.1:8000", "10.0.0.1", "10.0.0.1"),
        ("https://engine.example:443", "engine.example", "engine.example"),
        ("http://[fd00::1]:8000", "fd00::1", "[fd00::1]"),
    ],
)
def test_an_instances_host(url: str, host: str, shown: str) -> None:
    """Without brackets for an engine, with them in an address."""
    instance = one("p0", "nixl", url=url)

    assert (host_of(instance), bracketed(host_of(instance))) == (host, shown)
