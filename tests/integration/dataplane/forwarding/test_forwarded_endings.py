"""How answers end that are handed on unread: complete, or visibly broken."""

from typing import Any

import httpx
import pytest

WORD = b'data: {"choices":[{"index":0,"token_ids":[1]}]}\n\n'
DELTA = b'event: content_block_delta\ndata: {"type":"content_block_delta"}\n\n'
DONE = b"data: [DONE]\n\n"
HALF = b'data: {"ty'
STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
COMPLETED = b'event: response.completed\ndata: {"type":"response.completed"}\n\n'
MARKED = {
    "/v1/messages": STOP,
    "/v1/responses": COMPLETED,
    "/inference/v1/generate": DONE,
    "/invocations": DONE,
}
UNMARKED = ["/v1/chat/completions/batch", "/v1/audio/transcriptions", "/cohere/v2/chat"]
ASKED = {"model": "m", "input": "x", "messages": [], "token_ids": [1], "stream": True}


@pytest.mark.parametrize("framing", ["chunked", "connection"])
@pytest.mark.parametrize(
    ("path", "events"),
    [
        *(pytest.param(path, DELTA, id=f"{path}-no-mark") for path in MARKED),
        *(pytest.param(path, WORD + HALF, id=f"{path}-inside") for path in [*MARKED, *UNMARKED]),
    ],
)
async def test_stream_that_ends_too_early_is_cut(
    engine: Any,
    balancer: Any,
    instance: Any,
    raw_client: Any,
    path: str,
    events: bytes,
    framing: str,
) -> None:
    """The client's connection breaks, and the request has failed, however clean the engine's end (F48)."""

    async def script(received: Any, wire: Any) -> None:
        if framing == "chunked":
            await wire.events(events)
            return
        await wire.raw(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + events)
        wire.close()

    async with (
        engine(script) as fake,
        balancer(instance(fake)) as proxy,
        raw_client(proxy) as client,
    ):
        await client.post(path, ASKED)
        rest = await client.read_rest()
        (record,) = await proxy.wait_for_records(1)

        assert proxy.in_flight() == 0

    assert rest.startswith(b"HTTP/1.1 200")
    assert not rest.endswith(b"0\r\n\r\n")
    assert (record.error, record.legs[-1].error) == ("stream_cut", "stream_cut")
    assert len(fake.received) == 1


@pytest.mark.parametrize(
    ("path", "events", "error"),
    [
        *(pytest.param(path, DELTA + MARKED[path], None, id=path) for path in MARKED),
        *(pytest.param(path, WORD, None, id=path) for path in UNMARKED),
        pytest.param(
            "/v1/messages",
            DELTA + b'event: error\ndata: {"type":"error","error":{"type":"api_error"}}\n\n',
            "engine_error_event",
            id="error",
        ),
    ],
)
async def test_stream_that_ends_as_it_should_passes(
    engine: Any,
    balancer: Any,
    instance: Any,
    client: httpx.AsyncClient,
    path: str,
    events: bytes,
    error: str | None,
) -> None:
    """Where a path has no mark behind any event."""

    async def script(received: Any, wire: Any) -> None:
        await wire.events(events)

    async with engine(script) as fake, balancer(instance(fake)) as proxy:
        answer = await client.post(proxy.url + path, json=ASKED)
        (record,) = await proxy.wait_for_records(1)

    assert answer.content == events
    assert (record.error, record.legs[-1].error) == (error, error)


async def test_background_stream_may_end_anywhere(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """The response goes on without it."""
    created = b'event: response.created\ndata: {"type":"response.created","response":{}}\n\n'

    async def script(received: Any, wire: Any) -> None:
        await wire.events(created)

    async with engine(script) as fake, balancer(instance(fake)) as proxy:
        body = ASKED | {"background": True}
        answer = await client.post(proxy.url + "/v1/responses", json=body)

    assert answer.content == created
