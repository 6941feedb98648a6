"""Event streams through the balancer: exact to the byte, whole or visibly broken."""

import asyncio
import json
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest

from balancer.core.settings.dataplane import DataPlaneSettings

CHAT = "/v1/chat/completions"
DONE = b"data: [DONE]\n\n"
USAGE = {
    "prompt_tokens": 8,
    "completion_tokens": 2,
    "prompt_tokens_details": {"cached_tokens": 4},
}
USAGE_EVENT = b'data: {"choices":[],"usage":' + json.dumps(USAGE).encode() + b"}\n\n"
MESSAGES = [{"role": "user", "content": "hi"}]


def token(text: str) -> bytes:
    chunk = {"choices": [{"index": 0, "delta": {"content": text}}]}
    return b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n"


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": MESSAGES, "stream": True} | fields


async def like_vllm(received: Any, wire: Any) -> None:
    """Two tokens; a usage chunk for whoever asks."""
    options = received.json.get("stream_options") or {}
    usage = [USAGE_EVENT] if options.get("include_usage") else []
    await wire.events(token("a"), token("b"), *usage, DONE)


@pytest.mark.parametrize(
    ("options", "sees_usage"),
    [
        pytest.param({"stream_options": {"include_usage": True}}, True, id="asked"),
        pytest.param({"stream_options": {"include_usage": False}}, False, id="false"),
        pytest.param({"stream_options": {}}, False, id="empty"),
        pytest.param({"stream_options": None}, False, id="null"),
        pytest.param({}, False, id="absent"),
    ],
)
async def test_usage_chunk_reaches_only_who_asked(
    engine: Any,
    balancer: Any,
    instance: Any,
    client: httpx.AsyncClient,
    options: dict[str, Any],
    sees_usage: bool,
) -> None:
    """Our counters have the numbers each time (F46)."""
    async with engine(like_vllm) as fake, balancer(instance(fake)) as proxy:
        answer = await client.post(proxy.url + CHAT, json=chat(**options))
        (record,) = await proxy.wait_for_records(1)

    shown = USAGE_EVENT if sees_usage else b""
    assert answer.content == token("a") + token("b") + shown + DONE
    assert fake.received[0].json["stream_options"]["include_usage"] is True
    assert (record.cached_tokens, record.legs[0].completion_tokens) == (4, 2)


async def test_usage_is_not_asked_for_when_switched_off(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """Then cached tokens are unknown, which is not 0."""
    settings = DataPlaneSettings(usage_inject=False)
    async with engine(like_vllm) as fake, balancer(instance(fake), settings=settings) as proxy:
        await client.post(proxy.url + CHAT, json=chat())
        (record,) = await proxy.wait_for_records(1)

    assert "stream_options" not in fake.received[0].json
    assert record.cached_tokens is None


async def test_continuous_usage_asked_for_in_vain_stays_so(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """An engine ignores it without include_usage, and ours must not wake it."""
    options = {"include_usage": False, "continuous_usage_stats": True, "other": 1}
    async with engine(like_vllm) as fake, balancer(instance(fake)) as proxy:
        await client.post(proxy.url + CHAT, json=chat(stream_options=options))

        assert fake.received[0].json["stream_options"] == {"include_usage": True, "other": 1}


@pytest.mark.parametrize(
    "events",
    [
        pytest.param([token("😀 漢字"), DONE], id="multi-byte"),
        pytest.param([token("a").replace(b"\n", b"\r\n"), b"data: [DONE]\r\n\r\n"], id="crlf"),
        pytest.param([b": ping\n\n", token("a"), b": keep-alive\n\n", DONE], id="comments"),
        pytest.param([b'data: {"choices":[],"prompt":1}\n\n', token("a"), DONE], id="empty-first"),
        pytest.param([USAGE_EVENT, token("a"), DONE], id="usage-first"),
        pytest.param([token("a\ud800".encode("utf-8", "replace").decode()), DONE], id="replaced"),
        pytest.param([b'data: {"text":"\\ud83d","usage":null}\n\n', DONE], id="lone-surrogate"),
        pytest.param([b"data: not json\n\n", b"event: x\ndata:y\n\n", DONE], id="odd-events"),
        pytest.param([token("x" * 1_000_000), DONE], id="megabyte"),
        pytest.param([token("a"), b"data: [DONE]\n"], id="unterminated-done"),
    ],
)
@pytest.mark.parametrize("size", [1, 7, 1_000_000], ids=["bytewise", "sevens", "whole"])
async def test_stream_passes_byte_for_byte(
    engine: Any,
    balancer: Any,
    instance: Any,
    client: httpx.AsyncClient,
    events: list[bytes],
    size: int,
) -> None:
    """However the engine cuts it and whatever it says, up to [DONE] (F45, F47)."""
    sent = b"".join(events)
    size = max(size, len(sent) // 1500)

    async def script(received: Any, wire: Any) -> None:
        await wire.events(*(sent[at : at + size] for at in range(0, len(sent), size)))

    async with engine(script) as fake, balancer(instance(fake)) as proxy:
        answer = await client.post(proxy.url + CHAT, json=chat())
        (record,) = await proxy.wait_for_records(1)

    assert answer.content == sent
    assert record.error is None


async def test_usage_on_every_chunk_is_not_the_end(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """The last usage counts, everything passes (F45)."""
    first = b'data: {"choices":[{"text":"a"}],"usage":{"prompt_tokens":8}}\n\n'
    sent = [first, b'data: {"choices":[{"finish_reason":""}]}\n\n', first, USAGE_EVENT, DONE]

    async def script(received: Any, wire: Any) -> None:
        await wire.events(*sent)

    async with engine(script) as fake, balancer(instance(fake)) as proxy:
        asked = {"include_usage": True, "continuous_usage_stats": True}
        answer = await client.post(proxy.url + CHAT, json=chat(stream_options=asked))
        (record,) = await proxy.wait_for_records(1)

    assert answer.content == b"".join(sent)
    assert record.cached_tokens == 4


async def test_first_token_reaches_the_client_at_once(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """Nothing waits for the next event."""

    async def script(received: Any, wire: Any) -> None:
        await wire.head(content_type="text/event-stream")
        await wire.chunk(token("a"))
        await seen.wait()
        await wire.chunk(DONE)
        await wire.end()

    seen = asyncio.Event()
    async with (
        engine(script) as fake,
        balancer(instance(fake)) as proxy,
        asyncio.timeout(20),
        client.stream("POST", proxy.url + CHAT, json=chat()) as answer,
    ):
        chunks = answer.aiter_raw()
        assert await anext(chunks) == token("a")
        seen.set()
        assert b"".join([chunk async for chunk in chunks]) == DONE


async def cut(wire: Any, how: str, received: Any) -> None:
    if how == "close":
        wire.close()
    elif how == "reset":
        wire.reset()
    elif how == "stall":
        await received.gone.wait()
    else:
        await wire.end()


@pytest.mark.parametrize("how", ["close", "reset", "stall", "end"])
async def test_cut_stream_ends_in_an_error_event_and_a_broken_connection(
    engine: Any, balancer: Any, instance: Any, raw_client: Any, how: str
) -> None:
    """Never a made-up [DONE], never an end that looks like one; no retry (F48)."""

    async def script(received: Any, wire: Any) -> None:
        await wire.head(content_type="text/event-stream")
        await wire.chunk(token("a"))
        await go_on.wait()
        await wire.chunk(b'data: {"half')
        await cut(wire, how, received)

    go_on = asyncio.Event()
    settings = DataPlaneSettings(idle_timeout_s=0.2)
    async with (
        engine(script) as fake,
        balancer(instance(fake), settings=settings) as proxy,
        raw_client(proxy) as client,
    ):
        await client.post(CHAT, chat())
        await client.read_until(token("a"))
        go_on.set()
        rest = await client.read_rest()
        (record,) = await proxy.wait_for_records(1)

    event = rest.split(b"data: ", 1)[1].split(b"\n\n")[0]
    assert json.loads(event)["error"]["code"] in {"stream_cut", "engine_timeout"}
    assert b"half" not in rest
    assert b"[DONE]" not in rest
    assert not rest.endswith(b"0\r\n\r\n")
    assert record.error == json.loads(event)["error"]["code"]
    assert record.status == 200
    assert len(fake.received) == 1


async def test_large_event_that_is_cut_is_separated_from_the_error(
    engine: Any, balancer: Any, instance: Any, raw_client: Any
) -> None:
    """What had to pass unfinished is closed before the error event begins."""

    async def script(received: Any, wire: Any) -> None:
        await wire.head(content_type="text/event-stream")
        await wire.chunk(b"data: " + b"x" * 200_000)
        wire.close()

    async with (
        engine(script) as fake,
        balancer(instance(fake)) as proxy,
        raw_client(proxy) as client,
    ):
        await client.post(CHAT, chat())
        answer = await client.read_rest()

    assert b'\n\ndata: {"error"' in answer


async def test_end_of_connection_after_done_is_a_good_end(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """An engine that forgets its last chunk after [DONE] has said everything."""

    async def script(received: Any, wire: Any) -> None:
        await wire.head(content_type="text/event-stream")
        await wire.chunk(token("a") + DONE)
        wire.close()

    async with engine(script) as fake, balancer(instance(fake)) as proxy:
        answer = await client.post(proxy.url + CHAT, json=chat())

        assert answer.content == token("a") + DONE
        assert (await proxy.wait_for_records(1))[0].error is None


async def test_error_event_of_the_engine_passes_and_is_counted(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """An error inside a 200 stream is the engine's to tell and ours to count."""
    event = b'data: {"error":{"message":"m","code":500}}\n\n'

    async def script(received: Any, wire: Any) -> None:
        await wire.events(token("a"), event, DONE)

    async with engine(script) as fake, balancer(instance(fake)) as proxy:
        answer = await client.post(proxy.url + CHAT, json=chat())
        (record,) = await proxy.wait_for_records(1)

    assert answer.content == token("a") + event + DONE
    assert record.error == "engine_error_event"


async def test_stream_of_many_minutes_has_no_total_limit(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """A silent prefill within its limit, then chunks within theirs (F49), scaled down."""

    async def script(received: Any, wire: Any) -> None:
        await wire.head(content_type="text/event-stream")
        await asyncio.sleep(1.2)
        for _ in range(20):
            await wire.chunk(token("a"))
            await asyncio.sleep(0.1)
        await wire.chunk(DONE)
        await wire.end()

    settings = DataPlaneSettings(first_byte_timeout_s=3.0, idle_timeout_s=1.0)
    async with engine(script) as fake, balancer(instance(fake), settings=settings) as proxy:
        answer = await client.post(proxy.url + CHAT, json=chat())

        assert answer.content == token("a") * 20 + DONE


async def test_slow_client_holds_its_engine_back(
    engine: Any, balancer: Any, instance: Any, raw_client: Any
) -> None:
    """Memory per stream is bounded from the client's socket to the engine's."""
    sent = 0

    async def script(received: Any, wire: Any) -> None:
        nonlocal sent
        await wire.head(content_type="text/event-stream")
        for _ in range(2000):
            await wire.chunk(token("x" * 32_000))
            sent += 32_000

    async with engine(script) as fake, balancer(instance(fake)) as proxy:
        async with raw_client(proxy) as client:
            await client.post(CHAT, chat())
            before = -1
            async with asyncio.timeout(20):
                while before != sent:
                    before = sent
                    await asyncio.sleep(0.2)

        assert 0 < sent < 40_000_000
        assert (await proxy.wait_for_records(1))[0].error == "ClientClosedRequest"


async def test_slow_clients_cost_a_bounded_memory_each(
    engine: Any, balancer: Any, instance: Any, raw_client: Any, eventually: Any
) -> None:
    """What waits for a client that doesn't read is a few hundred kilobytes, and its engine stands."""

    async def script(received: Any, wire: Any) -> None:
        await wire.head(content_type="text/event-stream")
        while not received.gone.is_set():
            await wire.chunk(token("x" * 32_000))

    async with engine(script) as fake, balancer(instance(fake)) as proxy, AsyncExitStack() as stack:
        for _ in range(20):
            client = await stack.enter_async_context(raw_client(proxy))
            await client.post(CHAT, chat())
        await fake.wait_for_requests(20)
        (pool,) = proxy.upstream._pools.values()
        await eventually(lambda: len(pool.used) == 20 and all(each.is_paused for each in pool.used))
        waiting = [each._answer._buffered_bytes for each in pool.used]

    assert max(waiting) <= 256 * 1024 + 256 * 1024, "the limit, and what one read may bring"
