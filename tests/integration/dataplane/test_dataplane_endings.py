"""A client that leaves stops everything that was done for it, in every phase."""

import asyncio
import json
from collections.abc import Coroutine, Mapping
from typing import Any

import pytest

from balancer.connectors.contract import Connector, LegContext, LegRequest, Style
from balancer.core.errors import ClientGoneError
from balancer.core.fleet.snapshot import Fleet, Role
from balancer.core.http.body import PiecedBody
from balancer.core.http.prefill_rewrite import prefill_body
from balancer.core.prompt.known_ids import IdTexts
from balancer.core.request import GenerateRequest, PromptView

COMPLETIONS = "/v1/completions"
LONG = list(range(1000))
TOKEN = b'data: {"choices":[{"text":"a"}]}\n\n'


class PushConnector(Connector):
    """A fake concurrent connector."""

    name = "push"

    def style(self, context: LegContext) -> Style:  # noqa: ARG002 - the contract's signature
        return "concurrent"

    def prefill_leg(self, context: LegContext) -> LegRequest:
        return LegRequest(body=prefill_body(context.body))

    def decode_leg(
        self,
        context: LegContext,
        prefill_answer: Mapping[str, Any] | None,  # noqa: ARG002 - the contract's signature
    ) -> LegRequest:
        return LegRequest(body=context.body)


async def stay_silent(received: Any, wire: Any) -> None:
    await received.gone.wait()


async def stream_for_ever(received: Any, wire: Any) -> None:
    await wire.head(content_type="text/event-stream")
    while not received.gone.is_set():
        await wire.chunk(TOKEN)
        await asyncio.sleep(0.005)


async def prefill_ok(received: Any, wire: Any) -> None:
    await wire.json({"kv_transfer_params": {"do_remote_prefill": True}})


def request(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": LONG} | fields


async def assert_all_over(proxy: Any, *engines: Any) -> None:
    """Soon: connections closed, nothing in flight, one record that says why."""
    async with asyncio.timeout(20):
        for each in engines:
            await each.wait_for_connections(0)
        (record,) = await proxy.wait_for_records(1)
    assert record.error == "ClientClosedRequest"
    assert proxy.in_flight() == 0
    assert all(leg.ended_s is not None for leg in record.legs)


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_before_the_answer(
    engine: Any, balancer: Any, instance: Any, raw_client: Any, stream: bool
) -> None:
    """Waiting for headers, streamed or not (F42)."""
    async with (
        engine(stay_silent) as fake,
        balancer(instance(fake)) as proxy,
        raw_client(proxy) as client,
    ):
        await client.post(COMPLETIONS, request(stream=stream))
        await fake.wait_for_requests(1)
        client.leave()

        await assert_all_over(proxy, fake)


async def test_leaving_in_the_middle_of_a_stream(
    engine: Any, balancer: Any, instance: Any, raw_client: Any
) -> None:
    """The engine stops generating (F41)."""
    async with (
        engine(stream_for_ever) as fake,
        balancer(instance(fake)) as proxy,
        raw_client(proxy) as client,
    ):
        await client.post(COMPLETIONS, request(stream=True))
        await client.read_until(TOKEN)
        client.leave()

        await assert_all_over(proxy, fake)


async def test_leaving_in_a_silence_of_the_stream(
    engine: Any, balancer: Any, instance: Any, raw_client: Any
) -> None:
    """No write has to fail first."""

    async def script(received: Any, wire: Any) -> None:
        await wire.head(content_type="text/event-stream")
        await wire.chunk(TOKEN)
        await received.gone.wait()

    async with (
        engine(script) as fake,
        balancer(instance(fake)) as proxy,
        raw_client(proxy) as client,
    ):
        await client.post(COMPLETIONS, request(stream=True))
        await client.read_until(TOKEN)
        client.leave()

        await assert_all_over(proxy, fake)


@pytest.fixture
def pd_fleet(instance: Any) -> Any:
    def describe(prefill: Any, decode: Any) -> list[Any]:
        return [
            instance(prefill, "p0", role=Role.PREFILL, connector="nixl"),
            instance(decode, "d0", role=Role.DECODE, connector="nixl"),
        ]

    return describe


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_while_the_prefill_leg_runs(
    engine: Any, balancer: Any, pd_fleet: Any, raw_client: Any, stream: bool
) -> None:
    """Prefill stops and decode never starts (F42)."""
    async with (
        engine(stay_silent) as p,
        engine(stay_silent) as d,
        balancer(*pd_fleet(p, d)) as proxy,
        raw_client(proxy) as client,
    ):
        await client.post(COMPLETIONS, request(stream=stream))
        await p.wait_for_requests(1)
        client.leave()

        await assert_all_over(proxy, p)
        assert d.received == []


@pytest.mark.parametrize("decode", [stay_silent, stream_for_ever])
async def test_leaving_while_the_decode_leg_runs(
    engine: Any, balancer: Any, pd_fleet: Any, raw_client: Any, decode: Any
) -> None:
    """The second leg of a pair is stopped like a single one (F41)."""
    async with (
        engine(prefill_ok) as p,
        engine(decode) as d,
        balancer(*pd_fleet(p, d)) as proxy,
        raw_client(proxy) as client,
    ):
        await client.post(COMPLETIONS, request(stream=True))
        await d.wait_for_requests(1)
        client.leave()

        await assert_all_over(proxy, d)


async def test_leaving_while_the_body_is_sent(
    engine: Any, balancer: Any, instance: Any, raw_client: Any
) -> None:
    """Half a body reaches no engine."""
    async with (
        engine(stay_silent) as fake,
        balancer(instance(fake)) as proxy,
        raw_client(proxy) as client,
    ):
        await client.send(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"
        )
        client.leave()

        await assert_all_over(proxy)
        assert fake.received == []


class SlowPrompts:
    """A tokens stage that waits until it is cancelled."""

    texts = IdTexts(limit_bytes=0)

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def read(self, fleet: Fleet, request: GenerateRequest) -> PromptView:  # noqa: ARG002
        self.started.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()
        raise AssertionError("unreachable")


async def test_leaving_while_tokens_are_read(
    engine: Any, balancer: Any, instance: Any, raw_client: Any
) -> None:
    """The tokens stage is cancelled, no engine is asked."""
    reader = SlowPrompts()
    async with (
        engine(stay_silent) as fake,
        balancer(instance(fake), reader=reader) as proxy,
        raw_client(proxy) as client,
        asyncio.timeout(20),
    ):
        await client.post(COMPLETIONS, request())
        await reader.started.wait()
        client.leave()
        await reader.cancelled.wait()

        await assert_all_over(proxy)
        assert fake.received == []


async def test_a_hundred_leave_and_nothing_is_left(
    engine: Any, balancer: Any, instance: Any, raw_client: Any, eventually: Any
) -> None:
    """No phantom load, no connection, no task (F25)."""

    async def one(proxy: Any) -> None:
        async with raw_client(proxy) as client:
            await client.post(COMPLETIONS, request(stream=True))
            await client.read_until(TOKEN)

    async with engine(stream_for_ever) as fake, balancer(instance(fake)) as proxy:
        tasks_before = len(asyncio.all_tasks())
        async with asyncio.TaskGroup() as group:
            for _ in range(100):
                group.create_task(one(proxy))
        await proxy.wait_for_records(100)
        await fake.wait_for_connections(0)

        assert proxy.in_flight() == 0
        await eventually(lambda: len(asyncio.all_tasks()) <= tasks_before + 2)


class BrokenPrompts:
    """A tokens stage with a bug."""

    texts = IdTexts(limit_bytes=0)

    async def read(self, fleet: Fleet, request: GenerateRequest) -> PromptView:  # noqa: ARG002
        raise ZeroDivisionError("secret prompt")


async def test_a_bug_costs_one_request_with_500(
    engine: Any, balancer: Any, instance: Any, raw_client: Any
) -> None:
    """The client learns nothing of it but the status, and the record is written."""
    async with (
        engine(stay_silent) as fake,
        balancer(instance(fake), reader=BrokenPrompts()) as proxy,
        raw_client(proxy) as client,
    ):
        await client.post(COMPLETIONS, request())
        head = await client.read_until(b"\r\n\r\n")
        (record,) = await proxy.wait_for_records(1)

    assert head.startswith(b"HTTP/1.1 500 ")
    assert (record.status, record.error) == (500, "ZeroDivisionError")


async def test_connection_serves_the_next_request(
    engine: Any, balancer: Any, instance: Any, raw_client: Any
) -> None:
    """A finished answer is not taken for a client that left."""

    async def script(received: Any, wire: Any) -> None:
        await wire.json({"choices": []})

    async with (
        engine(script) as fake,
        balancer(instance(fake)) as proxy,
        raw_client(proxy) as client,
    ):
        for _ in range(3):
            await client.post(COMPLETIONS, request())
            answer = await client.read_until(b'"choices": []}')
            assert json.loads(answer.split(b"\r\n\r\n")[1]) == {"choices": []}
        records = await proxy.wait_for_records(3)

    assert [record.error for record in records] == [None] * 3


async def test_leaving_while_concurrent_legs_run(
    engine: Any, balancer: Any, instance: Any, raw_client: Any
) -> None:
    """Both engines see it."""
    async with engine(stay_silent) as p, engine(stay_silent) as d:
        fleet = (
            instance(p, "p0", role=Role.PREFILL, connector="push"),
            instance(d, "d0", role=Role.DECODE, connector="push"),
        )
        connectors = {"push": PushConnector()}
        async with balancer(*fleet, connectors=connectors) as proxy, raw_client(proxy) as client:
            await client.post(COMPLETIONS, request(stream=True))
            await p.wait_for_requests(1)
            await d.wait_for_requests(1)
            client.leave()

            await assert_all_over(proxy, p, d)


class DeafExchange:
    """A client that is gone without the server's knowing; waits for ever if asked."""

    method = "POST"
    query = b""
    headers = ()

    def __init__(self, path: str) -> None:
        self.path = path

    async def read_body(self, limit_bytes: int) -> PiecedBody:  # noqa: ARG002
        return PiecedBody((json.dumps(request()).encode(),))

    async def start(self, status: int, headers: object) -> None:  # noqa: ARG002
        raise ClientGoneError("gone")

    async def write(self, chunk: bytes) -> None:  # noqa: ARG002
        raise ClientGoneError("gone")

    async def finish(self) -> None:
        raise ClientGoneError("gone")

    async def answer(self, status: int, headers: object, body: bytes) -> None:  # noqa: ARG002
        raise ClientGoneError("gone")

    async def abort(self) -> None:
        """There is nothing to break."""

    def push(self, chunk: bytes) -> bool:  # noqa: ARG002
        return False

    async def drain(self) -> None:
        raise ClientGoneError("gone")

    async def while_present(self, work: Coroutine[Any, Any, None]) -> None:
        await work


async def test_error_that_nobody_reads_is_recorded_as_itself(balancer: Any) -> None:
    """The client left before it could be told."""
    async with balancer() as proxy:
        await proxy.dataplane.handle(DeafExchange("/v1/nonsense"))

        assert proxy.records[0].error == "path_not_found"


async def test_shutdown_in_the_middle_of_a_request_leaves_a_record(
    engine: Any, balancer: Any, instance: Any
) -> None:
    """Cancelled from outside, everything is put back, too."""
    async with engine(stay_silent) as fake, balancer(instance(fake)) as proxy:
        async with asyncio.TaskGroup() as group:
            handling = group.create_task(proxy.dataplane.handle(DeafExchange(COMPLETIONS)))
            await fake.wait_for_requests(1)
            handling.cancel()
        await fake.wait_for_connections(0)

        assert [record.error for record in proxy.records] == ["cancelled"]
        assert proxy.in_flight() == 0
