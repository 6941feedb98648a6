"""Two legs at once: each may end the other."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
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


Pushing = Callable[..., AbstractAsyncContextManager[tuple[Any, Any, Any]]]


@pytest.fixture
def pushing(engine: Any, balancer: Any, pair: Any) -> Pushing:
    """The prefill engine (the first of several), the decode engine, and a balancer before them."""

    @asynccontextmanager
    async def run(decode: Any, *prefills: Any) -> AsyncIterator[tuple[Any, Any, Any]]:
        async with AsyncExitStack() as stack:
            sources = [await stack.enter_async_context(engine(each)) for each in prefills]
            target = await stack.enter_async_context(engine(decode))
            fleet = pair(sources, target, "push")
            connectors = {"push": PushConnector()}
            proxy = await stack.enter_async_context(balancer(*fleet, connectors=connectors))
            yield sources[0], target, proxy

    return run


@pytest.mark.parametrize("stream", [False, True])
async def test_concurrent_legs_run_at_once(
    pushing: Pushing, stream: bool, ask: Ask, says: Any
) -> None:
    """Each engine answers only after the other has its request."""
    met = asyncio.Barrier(2)

    async def prefill(received: Any, wire: Any) -> None:
        await met.wait()
        await wire.json({"choices": [{"finish_reason": "length"}], "usage": says.usage(1000, 0)})

    async def decode(received: Any, wire: Any) -> None:
        await met.wait()
        await says.answer_ok(received, wire)

    async with pushing(decode, prefill) as (p, d, proxy):
        answer = await ask(proxy, stream=stream)
        (record,) = await proxy.wait_for_records(1)

    assert answer.status_code == 200
    assert p.received[0].header("x-leg") == "prefill"
    assert d.received[0].json["kv_transfer_params"] == {"from": "p0"}
    assert p.received[0].header("x-request-id") == d.received[0].header("x-request-id")
    assert record.cached_tokens == 0
    assert proxy.in_flight() == 0


async def test_concurrent_prefill_failure_cancels_decode_and_tries_another(
    pushing: Pushing, ask: Ask, says: Any
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
    async with pushing(decode, bad_prefill, says.prefill_ok) as (bad, d, proxy):
        for number in range(2):
            answer = await ask(proxy, number, stream=True)
            assert answer.headers["x-kvlb-prefill"] == "p1"
        async with asyncio.timeout(20):
            await d.received[0].gone.wait()

    assert decodes == 2 + len(bad.received)
    assert proxy.in_flight() == 0


async def test_concurrent_decode_refusal_cancels_prefill(
    pushing: Pushing, ask: Ask, says: Any
) -> None:
    """The prefill engine sees its connection close; the client sees decode's answer."""

    async def decode(received: Any, wire: Any) -> None:
        await p.wait_for_requests(1)
        await says.refuse(400)(received, wire)

    async with pushing(decode, says.stay_silent) as (p, _, proxy):
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
    pushing: Pushing, ask: Ask, says: Any
) -> None:
    """Decode's early 200 is no answer yet: a prefill that fails later still gets its status."""

    async def bad_prefill(received: Any, wire: Any) -> None:
        await d.wait_for_requests(1)
        await says.refuse(400)(received, wire)

    async with pushing(says.answer_ok, bad_prefill) as (_, d, proxy):
        answer = await ask(proxy, stream=True)

    assert answer.status_code == 400
