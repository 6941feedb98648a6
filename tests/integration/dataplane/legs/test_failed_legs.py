"""One leg of a serial pair fails: who is asked next, and who hears of it."""

from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from balancer.core.fleet.snapshot import Role
from balancer.core.settings.routing import PdSettings

Ask = Callable[..., Awaitable[httpx.Response]]


async def test_failed_prefill_leg_is_repeated_on_another_instance(
    engine: Any, balancer: Any, pair: Any, failed_prefill: str, ask: Ask, says: Any
) -> None:
    """Whatever a failed prefill looks like, decode starts with good parameters only (F36, F37)."""
    async with (
        engine(says.failed_prefill(failed_prefill)) as bad,
        engine(says.prefill_ok) as good,
        engine(says.answer_ok) as d,
        balancer(*pair([bad, good], d)) as proxy,
    ):
        for number in range(2):
            answer = await ask(proxy, number)
            assert answer.status_code == 200
            assert answer.headers["x-kvlb-prefill"] == "p1"
        records = await proxy.wait_for_records(2)

    assert len(bad.received) >= 1
    assert all(each.json["kv_transfer_params"] == says.params for each in d.received)
    failed = [leg for record in records for leg in record.legs if leg.error]
    assert {(leg.kind, leg.alias) for leg in failed} == {("prefill", "p0")}
    assert proxy.in_flight() == 0


async def test_answer_without_transfer_is_the_prefill_engines_failure(
    engine: Any, balancer: Any, pair: Any, ask: Ask, says: Any
) -> None:
    """The fleet's keeper hears of it as of any other failed leg, and never that all went well."""
    async with (
        engine(says.failed_prefill("no-params")) as bad,
        engine(says.decode_never) as d,
        balancer(*pair(bad, d)) as proxy,
    ):
        await ask(proxy)
        (record,) = await proxy.wait_for_records(1)

    assert {(leg.kind, leg.status, leg.error) for leg in record.legs} == {
        ("prefill", 200, "no_transfer")
    }
    assert {told[1:] for told in proxy.health} == {(False, "no_transfer")}


async def test_no_prefill_instance_left_is_503(
    engine: Any, balancer: Any, pair: Any, failed_prefill: str, ask: Ask, says: Any
) -> None:
    """Decode is never asked to do long prefills unless the operator allows it (F36)."""
    async with (
        engine(says.failed_prefill(failed_prefill)) as bad,
        engine(says.decode_never) as d,
        balancer(*pair(bad, d)) as proxy,
    ):
        answer = await ask(proxy)

        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "prefill_failed"
        assert d.received == []
        assert proxy.in_flight() == 0


async def test_decode_prefills_itself_where_that_is_allowed(
    engine: Any, balancer: Any, pair: Any, ask: Ask, says: Any
) -> None:
    """The client's body goes to decode untouched, and the reason tells."""
    pd = PdSettings(allow_local_on_failure=True)
    async with (
        engine(says.refuse(500)) as bad,
        engine(says.answer_ok) as d,
        balancer(*pair(bad, d), pd=pd) as proxy,
    ):
        answer = await ask(proxy)

        assert answer.status_code == 200
        assert answer.headers["x-kvlb-reason"] == "prefill_failed"
        assert "kv_transfer_params" not in d.received[0].json


@pytest.mark.parametrize("status", [400, 404, 422])
async def test_clients_fault_at_the_prefill_engine_is_the_answer(
    engine: Any, balancer: Any, pair: Any, status: int, ask: Ask, says: Any
) -> None:
    """Neither another prefill engine nor decode is asked (F32)."""
    async with (
        engine(says.refuse(status)) as first,
        engine(says.refuse(status)) as second,
        engine(says.decode_never) as d,
        balancer(*pair([first, second], d)) as proxy,
    ):
        answer = await ask(proxy)

        assert answer.status_code == status
        assert answer.json() == {"error": {"message": f"no {status}"}}
        assert len(first.received) + len(second.received) == 1
        assert d.received == []


async def test_refused_key_of_the_operator_is_no_clients_fault(
    engine: Any, balancer: Any, pair: Any, ask: Ask, says: Any
) -> None:
    """An instance with a wrong configured key is passed over (F52)."""
    async with (
        engine(says.refuse(401)) as bad,
        engine(says.prefill_ok) as good,
        engine(says.answer_ok) as d,
        balancer(*pair([bad, good], d), engine_key=lambda _: "k") as proxy,
    ):
        answer = await ask(proxy)

        assert answer.status_code == 200


async def test_decode_that_fails_after_prefill_is_tried_elsewhere_with_a_new_prefill(
    engine: Any, balancer: Any, instance: Any, ask: Ask, says: Any
) -> None:
    """Parameters of the first transfer may be spent, so both legs run again."""
    async with (
        engine(says.prefill_ok) as p,
        engine(says.close) as bad,
        engine(says.answer_ok) as good,
    ):
        fleet = [
            instance(p, "p0", role=Role.PREFILL, connector="nixl"),
            instance(bad, "d0", role=Role.DECODE, connector="nixl"),
            instance(good, "d1", role=Role.DECODE, connector="nixl"),
        ]
        async with balancer(*fleet) as proxy:
            for number in range(2):
                answer = await ask(proxy, number)
                assert answer.headers["x-kvlb-instance"] == "d1"

    assert len(bad.received) >= 1
    assert len(p.received) == 2 + len(bad.received)
