"""What mooncake sends with both legs, and asks beforehand."""

from collections.abc import Callable
from typing import Any

import pytest

from balancer.connectors.available import connectors
from balancer.connectors.contract import LegRequest, NoTransferError
from balancer.connectors.mooncake import read_engine_ids
from balancer.core.fleet.snapshot import Instance
from balancer.core.fleet.transfer_facts import TransferFacts

One = Callable[..., Instance]
Legs = Callable[..., tuple[LegRequest, LegRequest]]
Params = Callable[[LegRequest], Any]


def test_mooncake_names_one_transfer_on_both_legs(
    one: One, legs: Legs, params: Params, attempt_id: str
) -> None:
    """With all three fields without which a decode engine silently computes everything."""
    source = one("p0", "mooncake", facts=TransferFacts(engine_ids={0: "e0"}))

    prefill, decode = legs(source, one("d0", "mooncake"))

    assert params(prefill) == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "transfer_id": f"xfer-{attempt_id}",
    }
    assert params(decode) == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_bootstrap_addr": "http://10.0.0.1:8998",
        "remote_engine_id": "e0",
        "transfer_id": f"xfer-{attempt_id}",
    }
    assert prefill.headers == ((b"x-data-parallel-rank", b"0"),)
    assert prefill.body["min_tokens"] == 1


def test_mooncake_names_the_engine_of_the_pinned_rank(one: One, legs: Legs, params: Params) -> None:
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


def test_mooncake_takes_a_bootstrap_server_that_counts_from_zero(
    one: One, legs: Legs, params: Params
) -> None:
    """Each address of a split group may have its own."""
    facts = TransferFacts(engine_ids={0: "local"})
    source = one("p1", "mooncake", ranks=(4,), rank_base=4, facts=facts)

    _, decode = legs(source, one("d0", "mooncake"), prefill_rank=4)

    assert params(decode)["remote_engine_id"] == "local"


def test_mooncake_without_engine_ids_fails_the_leg_by_name(one: One, legs: Legs) -> None:
    """Never sent with a field missing."""
    with pytest.raises(NoTransferError, match=r"p0 .*rank 0.*`transfer\.bootstrap_port`"):
        legs(one("p0", "mooncake"), one("d0", "mooncake"))


def test_mooncake_asks_the_bootstrap_server_of_who_prefills(one: One) -> None:
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
