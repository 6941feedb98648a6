"""What nixl and nixl_push send with both legs."""

from collections.abc import Callable
from typing import Any

import pytest

from balancer.connectors.available import connectors
from balancer.connectors.contract import LegRequest, NoTransferError
from balancer.connectors.nixl_push import read_server_info
from balancer.core.fleet.snapshot import Instance
from balancer.core.fleet.transfer_facts import TransferFacts

One = Callable[..., Instance]
Legs = Callable[..., tuple[LegRequest, LegRequest]]
Params = Callable[[LegRequest], Any]


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
def test_nixl_hands_every_releases_fields_over_verbatim(
    release: str, one: One, legs: Legs, params: Params
) -> None:
    """Whatever the prefill engine says is the decode engine's business."""
    known = list(FIELDS_BY_RELEASE)
    told: dict[str, Any] = {}
    for each in known[: known.index(release) + 1]:
        told |= FIELDS_BY_RELEASE[each]

    prefill, decode = legs(one("p0", "nixl"), one("d0", "nixl"), {"kv_transfer_params": told})

    assert params(decode) == told
    assert (prefill.request_id, decode.request_id) == (None, None)


def test_nixl_gives_the_prefill_engine_what_an_earlier_turn_left(
    one: One, legs: Legs, params: Params
) -> None:
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


def test_nixl_wants_both_ways_on_both_sides(one: One) -> None:
    """One engine would keep blocks that the other never reads."""
    connector = connectors()["nixl"]

    assert connector.mismatch(one("p0", "nixl", bidirectional=True), one("d0", "nixl")) == (
        "`transfer.bidirectional` is set on one side only"
    )


# nixl_push


def test_nixl_push_tells_decode_where_the_prefill_engine_listens(
    one: One, legs: Legs, params: Params, attempt_id: str
) -> None:
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
        "transfer_id": f"xfer-{attempt_id}",
    }
    assert params(decode) == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "prefill-1",
        "remote_host": "10.0.0.1",
        "remote_port": 5600,
        "tp_size": 2,
        "pp_size": 3,
        "remote_request_id": f"abc-{attempt_id}",
        "transfer_id": f"xfer-{attempt_id}",
    }
    assert prefill.request_id == decode.request_id == f"abc-{attempt_id}"


def test_nixl_push_counts_a_ranks_port_and_id(one: One, legs: Legs, params: Params) -> None:
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


def test_nixl_push_takes_what_the_engine_told_where_nothing_is_set(
    one: One, legs: Legs, params: Params
) -> None:
    """Settings win over it."""
    facts = TransferFacts(
        engine_ids={0: "told"}, kv_host="kv.example", kv_port=6000, tp_size=4, pp_size=2
    )

    _, decode = legs(one("p0", "nixl_push", facts=facts, tp_size=8), one("d0", "nixl_push"))

    told = params(decode)
    assert (told["remote_engine_id"], told["remote_host"]) == ("told", "kv.example")
    assert (told["remote_port"], told["tp_size"], told["pp_size"]) == (6000, 8, 2)


def test_nixl_push_without_an_engine_id_fails_the_leg_by_name(one: One, legs: Legs) -> None:
    """It says whose, and what to set."""
    with pytest.raises(NoTransferError, match=r"p0.*`transfer\.engine_id`"):
        legs(one("p0", "nixl_push"), one("d0", "nixl_push"))


def test_nixl_push_asks_only_who_prefills_and_has_no_id(one: One) -> None:
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
