"""Two legs at once: each may end the other."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import httpx
import pytest

from balancer.connectors.contract import Connector, LegContext, LegRequest, Style
from balancer.core.http.prefill_rewrite import prefill_body

Ask = Callable[..., Awaitable[httpx.Response]]


class PushConnector(Connector):
    """A fake concurrent connector: both legs at once, matched by request id."""

    name = "push"

    def style(self, context: LegContext) -> Style:  # noqa: ARG002 - the contract's signature
        return "concurrent"

    def prefill_leg(self, context: LegContext) -> LegRequest:
        return LegRequest(
            body={**prefill_body(context.body), "kv_transfer_params": {"push": True}},
            headers=((b"x-leg", b"prefill"),),
        )

    def decode_leg(
        self, context: LegContext, prefill_answer: Mapping[str, Any] | None
    ) -> LegRequest:
        assert prefill_answer is None
        return LegRequest(
            body={**context.body, "kv_transfer_params": {"from": context.prefill.alias}}
        )


CONCURRENT = {"push": PushConnector()}


@pytest.mark.parametrize("stream", [False, True])
async def test_concurrent_legs_run_at_once(
    engine: Any, balancer: Any, pair: Any, stream: bool, ask: Ask, says: Any
) -> None:
    """Each engine answers only after the other has its request."""
    met = asyncio.Barrier(2)

    async def prefill(received: Any, wire: Any) -> None:
        await met.wait()
        await wire.json({"choices": [{"finish_reason": "length"}], "usage": says.usage(1000, 0)})

    async def decode(received: Any, wire: Any) -> None:
        await met.wait()
        await says.answer_ok(received, wire)

    async with (
        engine(prefill) as p,
        engine(decode) as d,
        balancer(*pair(p, d, "push"), connectors=CONCURRENT) as proxy,
    ):
        answer = await ask(proxy, stream=stream)
        (record,) = await proxy.wait_for_records(1)

    assert answer.status_code == 200
    assert p.received[0].header("x-leg") == "prefill"
    assert d.received[0].json["kv_transfer_params"] == {"from": "p0"}
    assert p.received[0].header("x-request-id") == d.received[0].header("x-request-id")
    assert record.cached_tokens == 0
    assert proxy.in_flight() == 0


async def test_concurrent_prefill_failure_cancels_decode_and_tries_another(
    engine: Any, balancer: Any, pair: Any, ask: Ask, says: Any
) -> None:
    """A decode engine left alone would wait for minutes."""
    decodes = 0

    async def decode(received: Any, wire: Any) -> None:
        nonlocal decodes
        decodes += 1
        if received.json["kv_transfer_params"] == {"from": "p0"}:
            await wire.head(content_type="text/event-stream")
            started.set()
            await received.gone.wait()
        else:
            await says.answer_ok(received, wire)

    async def bad_prefill(received: Any, wire: Any) -> None:
        await started.wait()
        await says.refuse(500)(received, wire)

    started = asyncio.Event()
    async with (
        engine(bad_prefill) as bad,
        engine(says.prefill_ok) as good,
        engine(decode) as d,
        balancer(*pair([bad, good], d, "push"), connectors=CONCURRENT) as proxy,
    ):
        for number in range(2):
            answer = await ask(proxy, number, stream=True)
            assert answer.headers["x-kvlb-prefill"] == "p1"
        async with asyncio.timeout(20):
            await d.received[0].gone.wait()

    assert decodes == 2 + len(bad.received)
    assert proxy.in_flight() == 0


async def test_concurrent_decode_refusal_cancels_prefill(
    engine: Any, balancer: Any, pair: Any, ask: Ask, says: Any
) -> None:
    """The prefill engine sees its connection close; the client sees decode's answer."""

    async def decode(received: Any, wire: Any) -> None:
        await p.wait_for_requests(1)
        await says.refuse(400)(received, wire)

    async with (
        engine(says.stay_silent) as p,
        engine(decode) as d,
        balancer(*pair(p, d, "push"), connectors=CONCURRENT) as proxy,
    ):
        answer = await ask(proxy)
        await p.wait_for_connections(0)
        (record,) = await proxy.wait_for_records(1)

    assert answer.status_code == 400
    assert {leg.kind: leg.error for leg in record.legs} == {
        "prefill": "cancelled",
        "decode": "engine_refused",
    }
    assert proxy.in_flight() == 0


async def test_concurrent_answer_waits_for_its_prefill(
    engine: Any, balancer: Any, pair: Any, ask: Ask, says: Any
) -> None:
    """Decode's early 200 is no answer yet: a prefill that fails later still gets its status."""

    async def bad_prefill(received: Any, wire: Any) -> None:
        await d.wait_for_requests(1)
        await says.refuse(400)(received, wire)

    async with (
        engine(bad_prefill) as p,
        engine(says.answer_ok) as d,
        balancer(*pair(p, d, "push"), connectors=CONCURRENT) as proxy,
    ):
        answer = await ask(proxy, stream=True)

    assert answer.status_code == 400
