"""Comments by which an engine keeps a stream alive while it computes: its client sees them at once."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from balancer.core.fleet.snapshot import Role

KEEP_ALIVE = b": keep-alive\n\n"
WORDS = {
    "/v1/chat/completions": b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n',
    "/v1/completions": b'data: {"choices":[{"index":0,"text":"a"}]}\n\n',
    "/inference/v1/generate": b'data: {"choices":[{"index":0,"token_ids":[1]}]}\n\n',
    "/v1/messages": b'event: content_block_delta\ndata: {"type":"content_block_delta"}\n\n',
    "/v1/responses": b'event: response.x.delta\ndata: {"type":"response.x.delta"}\n\n',
}
MARKS = {
    "/v1/messages": b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
    "/v1/responses": b'event: response.completed\ndata: {"type":"response.completed"}\n\n',
}
DONE = b"data: [DONE]\n\n"
FAILED = b'event: error\ndata: {"error":{"message":"m","type":"T","param":null,"code":500}}\n\n'
COMPUTED_S = 7.0


def asked(path: str) -> dict[str, Any]:
    fields = {"input": "x", "messages": [], "token_ids": [1], "sampling_params": {}}
    if path == "/v1/completions":
        fields = {"prompt": [1, 2]}
    return {"model": "m", "stream": True} | fields


class Computing:
    """An engine that says nothing but comments until it is let go on; and the clock."""

    def __init__(self, *rest: bytes) -> None:
        self.rest = rest
        self.goes_on = asyncio.Event()
        self.now_s = 0.0

    def clock(self) -> float:
        return self.now_s

    def go_on(self) -> None:
        self.now_s = COMPUTED_S
        self.goes_on.set()

    async def __call__(self, _: Any, wire: Any) -> None:
        await wire.head(content_type="text/event-stream")
        await wire.chunk(KEEP_ALIVE)
        await self.goes_on.wait()
        for each in self.rest:
            await wire.chunk(each)
        await wire.end()


@pytest.mark.parametrize("path", WORDS)
async def test_comment_begins_the_answer_and_is_no_first_token(
    engine: Any, balancer: Any, instance: Any, raw_client: Any, path: str
) -> None:
    """Status, headers and the comment are there while the engine computes; times wait for its word."""
    end = MARKS.get(path, DONE)
    script = Computing(KEEP_ALIVE, WORDS[path], end)
    async with (
        engine(script) as fake,
        balancer(instance(fake), clock=script.clock) as proxy,
        raw_client(proxy) as client,
        asyncio.timeout(20),
    ):
        await client.post(path, asked(path))
        head = await client.read_until(KEEP_ALIVE)
        (rank,) = (rank for each in proxy.fleet.instances for rank in each.rank_ids())
        decoding = proxy.ledger.load(rank).decoding
        script.go_on()
        rest = await client.read_until(end)
        (record,) = await proxy.wait_for_records(1)

    assert head.startswith(b"HTTP/1.1 200")
    assert WORDS[path] not in head
    assert rest.index(KEEP_ALIVE) < rest.index(WORDS[path])
    assert decoding == 0
    (leg,) = record.legs
    assert (record.error, record.first_byte_s, leg.computed_s) == (None, COMPUTED_S, COMPUTED_S)


@pytest.mark.parametrize("path", WORDS)
async def test_error_behind_a_comment_passes_as_it_is(
    engine: Any, balancer: Any, instance: Any, raw_client: Any, path: str
) -> None:
    """The answer has begun: nobody else is asked, and nothing counts as computed."""
    script = Computing(FAILED, MARKS.get(path, DONE))
    async with (
        engine(script) as one,
        engine(script) as other,
        balancer(instance(one, "e0"), instance(other, "e1")) as proxy,
        raw_client(proxy) as client,
        asyncio.timeout(20),
    ):
        await client.post(path, asked(path))
        await client.read_until(KEEP_ALIVE)
        script.go_on()
        rest = await client.read_until(MARKS.get(path, DONE))
        (record,) = await proxy.wait_for_records(1)

    assert FAILED in rest
    assert (record.status, record.error, record.retries) == (200, "engine_error_event", 0)
    assert (record.first_byte_s, record.legs[0].computed_s) == (None, None)


@pytest.mark.parametrize("path", WORDS)
async def test_stream_of_comments_that_is_cut_is_no_end(
    engine: Any, balancer: Any, instance: Any, raw_client: Any, path: str
) -> None:
    """As behind any other byte (F48)."""
    script = Computing()
    async with (
        engine(script) as fake,
        balancer(instance(fake)) as proxy,
        raw_client(proxy) as client,
        asyncio.timeout(20),
    ):
        await client.post(path, asked(path))
        await client.read_until(KEEP_ALIVE)
        script.go_on()
        rest = await client.read_rest()
        (record,) = await proxy.wait_for_records(1)

    assert not rest.endswith(b"0\r\n\r\n")
    assert (record.status, record.error) == (200, "stream_cut")
    assert len(fake.received) == 1


async def test_comments_of_a_leg_that_loads_blocks_wait(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """Until its first token a hand-over may fail, and both legs run again: the client gets a status."""

    async def prefill(received: Any, wire: Any) -> None:
        await wire.json({"choices": [], "kv_transfer_params": {"do_remote_prefill": True}})

    script = Computing(FAILED, DONE)
    async with engine(prefill) as p, engine(script) as d:
        fleet = (
            instance(p, "p0", role=Role.PREFILL, connector="nixl"),
            instance(d, "d0", role=Role.DECODE, connector="nixl"),
        )
        async with balancer(*fleet) as proxy, asyncio.TaskGroup() as group:
            body = {"model": "m", "prompt": list(range(1000)), "stream": True}
            asking = group.create_task(client.post(proxy.url + "/v1/completions", json=body))
            await d.wait_for_requests(1)
            script.go_on()

    answer = asking.result()
    assert (answer.status_code, json.loads(answer.content)["error"]["code"]) == (
        502,
        "hand_over_failed",
    )
