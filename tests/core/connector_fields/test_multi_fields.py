"""What multi sends for its children; hosts of instances."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from balancer.connectors.available import connectors
from balancer.connectors.contract import LegRequest, bracketed, host_of
from balancer.core.fleet.snapshot import Instance
from balancer.core.http.prefill_rewrite import prefill_body

One = Callable[..., Instance]
Legs = Callable[..., tuple[LegRequest, LegRequest]]
Params = Callable[[LegRequest], Any]
Pulled = Callable[..., Any]

NOTHING: Mapping[str, Any] = {}


def test_multi_merges_what_its_children_send(
    one: One, legs: Legs, params: Params, attempt_id: str
) -> None:
    """One body, every child's keys."""
    children = {"nixl": {}, "offloading": {"p2p_host": "10.0.0.1"}}
    told = {"do_remote_prefill": True, "remote_block_ids": [1]}

    prefill, decode = legs(
        one("p0", "multi", children=children),
        one("d0", "multi", children=children),
        {"kv_transfer_params": told},
    )

    assert params(prefill)["do_remote_decode"] is True
    assert params(prefill)["remote_decoder"] == {"kv_request_id": attempt_id}
    assert params(decode).items() >= told.items()
    assert params(decode)["remote_prefiller"]["remote_host"] == "10.0.0.1"


def test_multi_runs_both_legs_at_once_if_one_child_does(
    one: One, legs: Legs, params: Params
) -> None:
    """A child that looks for what has been stored is told that nothing has been yet."""
    children = {"nixl_push": {"engine_id": "e"}, "lmcache": {}, "p2p_nccl": {"zmq_address": "a:1"}}
    source, target = one("p0", "multi", children=children), one("d0", "multi", children=children)

    prefill, decode = legs(source, target)

    assert params(decode)["remote_engine_id"] == "e"
    assert prefill.request_id == decode.request_id


def test_multi_without_anything_to_send_leaves_the_body_alone(
    one: One, legs: Legs, client_body: Mapping[str, Any]
) -> None:
    """Caches only: the client's own bytes go out."""
    children: dict[str, Any] = {"example": {}, "lmcache": {}}
    source, target = one("p0", "multi", children=children), one("d0", "multi", children=children)

    prefill, decode = legs(source, target, NOTHING)

    assert prefill.body == prefill_body(client_body)
    assert decode.body is client_body


def test_multi_asks_what_a_child_asks(one: One) -> None:
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
def test_multi_fits_where_its_children_fit(
    theirs: dict[str, Any], told: str | None, one: One
) -> None:
    """The same ones, each with the other's."""
    connector = connectors()["multi"]

    found = connector.mismatch(
        one("p0", "multi", children={"nixl": {}}), one("d0", "multi", children=theirs)
    )

    assert (found is None) == (told is None)
    assert told is None or (found is not None and told in found)


def test_multi_fetches_as_its_child_does(pulled: Pulled) -> None:
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
def test_an_instances_host(url: str, host: str, shown: str, one: One) -> None:
    """Without brackets for an engine, with them in an address."""
    instance = one("p0", "nixl", url=url)

    assert (host_of(instance), bracketed(host_of(instance))) == (host, shown)
