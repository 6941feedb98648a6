"""Bodies and methods: limits, pieces, uploads, and what a server is asked beside POST."""

import asyncio
import gzip
import json
from functools import partial
from typing import Any

import httpx
import pytest

from balancer.core.settings.dataplane import DataPlaneSettings

LIMIT = 1000
SMALL = DataPlaneSettings(max_body_bytes=LIMIT)
PATHS = ["/v1/completions", "/v1/embeddings", "/v1/audio/transcriptions"]
HEAD = "POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


@pytest.fixture(params=[True, False], ids=["direct", "asgi"])
def balancer(balancer: Any, request: pytest.FixtureRequest) -> Any:
    """Both ways into the data plane: past the framework's interface, and through it."""
    return partial(balancer, is_direct=request.param)


async def echo(received: Any, wire: Any) -> None:
    head = (
        f"HTTP/1.1 200 OK\r\ncontent-length: {len(received.body)}\r\n"
        "content-type: application/octet-stream\r\n\r\n"
    )
    await wire.raw(head.encode() + received.body)


@pytest.mark.parametrize("path", PATHS)
async def test_too_large_a_body_is_refused_before_it_is_sent(
    engine: Any, balancer: Any, instance: Any, raw_client: Any, path: str
) -> None:
    """By its length alone: not a byte is read, and a client that waits gets no `100 Continue`."""
    async with (
        engine(echo) as fake,
        balancer(instance(fake), settings=SMALL) as proxy,
        raw_client(proxy) as client,
    ):
        head = HEAD.format(path=path) + f"content-length: {LIMIT + 1}\r\n"
        await client.send(head.encode() + b"expect: 100-continue\r\n\r\n")
        answer = await client.read_rest()

        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b"body_too_large" in answer
        assert b"connection: close\r\n" in answer
        assert not fake.received


@pytest.mark.parametrize("path", PATHS)
async def test_chunked_body_over_the_limit_is_refused_on_the_way(
    engine: Any, balancer: Any, instance: Any, raw_client: Any, path: str
) -> None:
    """It doesn't say how long it is; more than the limit is never held."""
    async with (
        engine(echo) as fake,
        balancer(instance(fake), settings=SMALL) as proxy,
        raw_client(proxy) as client,
    ):
        await client.send(HEAD.format(path=path).encode() + b"transfer-encoding: chunked\r\n\r\n")
        for _ in range(3):
            await client.send(b"190\r\n" + b" " * 0x190 + b"\r\n")

        assert (await client.read_until(b"\r\n")).startswith(b"HTTP/1.1 413 ")
        assert not fake.received


async def test_body_is_asked_for_where_the_client_waits(
    engine: Any, balancer: Any, instance: Any, raw_client: Any
) -> None:
    """`Expect: 100-continue` is met here and told to no engine."""
    body = b'{"model":"m"}'
    async with (
        engine(echo) as fake,
        balancer(instance(fake)) as proxy,
        raw_client(proxy) as client,
    ):
        head = HEAD.format(path="/v1/embeddings") + f"content-length: {len(body)}\r\n"
        await client.send(head.encode() + b"expect: 100-continue\r\n\r\n")
        assert b"100 Continue" in await client.read_until(b"\r\n\r\n")
        await client.send(body)

        assert (await client.read_until(b"\r\n")).startswith(b"HTTP/1.1 200 ")
        assert fake.received[0].body == body
        assert fake.received[0].header("expect") is None


async def test_chunked_body_with_trailers_arrives_whole(
    engine: Any, balancer: Any, instance: Any, raw_client: Any
) -> None:
    """It goes on with a length; trailers end here, as hop-by-hop as they are."""
    async with (
        engine(echo) as fake,
        balancer(instance(fake)) as proxy,
        raw_client(proxy) as client,
    ):
        head = HEAD.format(path="/v1/embeddings") + "transfer-encoding: chunked\r\n"
        await client.send(head.encode() + b"trailer: x-sum\r\n\r\n")
        await client.send(b"5;ext=1\r\n" + b'{"mod' + b"\r\n8\r\n" + b'el":"m"}' + b"\r\n")
        await client.send(b"0\r\nx-sum: 1\r\n\r\n")

        assert (await client.read_until(b"\r\n")).startswith(b"HTTP/1.1 200 ")
        assert fake.received[0].json == {"model": "m"}
        assert fake.received[0].header("content-length") == "13"
        assert fake.received[0].header("x-sum") is None


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b"\xef\xbb\xbf" + json.dumps({"model": "m"}).encode(), id="byte-order-mark"),
        pytest.param(json.dumps({"model": "m"}).encode("utf-16"), id="utf-16"),
        pytest.param(b'{"model":"m","input":"\\ud800"}', id="lone-surrogate"),
        pytest.param(b'{"model":"m","input":NaN}', id="nan"),
        pytest.param(b'{"model":"nope","model":"m"}', id="named-twice"),
    ],
)
async def test_json_is_read_as_engines_read_it(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient, raw: bytes
) -> None:
    """Python's parser takes these, so they are routed, and passed on byte for byte."""
    async with engine(echo) as other, engine(echo) as right:
        async with balancer(instance(other, base="other"), instance(right, "e1")) as proxy:
            answer = await client.post(
                proxy.url + "/v1/embeddings",
                content=raw,
                headers={"content-type": "application/json"},
            )

        assert (answer.status_code, answer.content) == (200, raw)
        assert not other.received


async def test_large_upload_is_found_its_model_behind_the_file(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """A file that looks like a form changes nothing, and every byte arrives."""
    disguise = b'\r\nContent-Disposition: form-data; name="model"\r\n\r\nother\r\n'
    sound = disguise + bytes(range(256)) * 20_000
    body = (
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
        + sound
        + b'\r\n--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n--b--\r\n'
    )
    async with engine(echo) as other, engine(echo) as right:
        async with balancer(instance(other, base="other"), instance(right, "e1")) as proxy:
            answer = await client.post(
                proxy.url + "/v1/audio/transcriptions",
                content=body,
                headers={"content-type": "multipart/form-data; boundary=b"},
            )

        assert answer.content == body
        assert not other.received


async def test_body_that_is_no_json_needs_no_model(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """Binary as it comes, small or large, an empty one, too."""
    async with engine(echo) as fake, balancer(instance(fake)) as proxy:
        for body in (b"", b"\0\xff", bytes(range(256)) * 4000):
            answer = await client.post(
                proxy.url + "/pooling",
                content=body,
                headers={"content-type": "application/octet-stream"},
            )
            assert answer.content == body


async def test_pipelined_requests_are_answered_in_order(
    engine: Any, balancer: Any, instance: Any, raw_client: Any
) -> None:
    """Two in one packet."""
    request = HEAD.format(path="/tokenize") + "content-length: {}\r\n\r\n{}"
    first, second = (f'{{"model":"m","n":{number}}}' for number in (1, 22))
    async with (
        engine(echo) as fake,
        balancer(instance(fake)) as proxy,
        raw_client(proxy) as client,
    ):
        both = request.format(len(first), first) + request.format(len(second), second)
        await client.send(both.encode())
        await client.read_until(first.encode())
        await client.read_until(second.encode())


async def test_head_has_the_headers_of_get(
    engine: Any, balancer: Any, instance: Any, raw_client: Any
) -> None:
    """And no body, so that the connection goes on."""

    async def script(received: Any, wire: Any) -> None:
        await wire.raw(b"HTTP/1.1 200 OK\r\ncontent-length: 7\r\nx-a: b\r\n\r\n")
        if received.method == "GET":
            await wire.raw(b"0123456")

    async with (
        engine(script) as fake,
        balancer(instance(fake)) as proxy,
        raw_client(proxy) as client,
    ):
        for method in ("HEAD", "GET"):
            await client.send(f"{method} /tokenizer_info HTTP/1.1\r\nhost: x\r\n\r\n".encode())
            answer = await client.read_until(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert b"content-length: 7\r\n" in answer
            assert b"x-a: b\r\n" in answer
        assert await client.read_until(b"6") == b"0123456"
        assert [each.method for each in fake.received] == ["HEAD", "GET"]


async def test_ordinary_request_for_a_socket_is_told_what_it_is(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """404, as from an engine."""
    async with engine(echo) as fake, balancer(instance(fake)) as proxy:
        answer = await client.get(proxy.url + "/v1/realtime")

        assert answer.status_code == 404
        assert "WebSocket" in answer.json()["error"]["message"]


async def test_old_client_gets_an_answer_that_ends_with_its_connection(
    engine: Any, balancer: Any, instance: Any, raw_client: Any
) -> None:
    """HTTP/1.0 knows no chunks."""

    async def script(received: Any, wire: Any) -> None:
        await wire.head(content_type="text/event-stream")
        await wire.chunk(b"data: a\n\n")
        await wire.chunk(b"data: [DONE]\n\n")
        await wire.end()

    body = b'{"model":"m"}'
    async with (
        engine(script) as fake,
        balancer(instance(fake)) as proxy,
        raw_client(proxy) as client,
    ):
        head = HEAD.format(path="/v1/messages").replace("1.1", "1.0")
        await client.send(head.encode() + b"content-length: 13\r\n\r\n" + body)
        head, _, answer = (await client.read_rest()).decode().partition("\r\n\r\n")

        assert "chunked" not in head
        assert answer == "data: a\n\ndata: [DONE]\n\n"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize("kind", ["text/event-stream", "application/json"])
async def test_encoded_answer_passes_as_it_comes(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient, path: str, kind: str
) -> None:
    """Nobody unpacks it; a stream isn't held back, and its usage is counted as unknown."""
    packed = gzip.compress(b"data: {}\n\ndata: [DONE]\n\n" * 50)

    async def script(received: Any, wire: Any) -> None:
        await wire.head(content_type=kind, content_encoding="gzip")
        await wire.chunk(packed[:20])
        if kind == "text/event-stream":
            await seen.wait()
        await wire.chunk(packed[20:])
        await wire.end()

    seen = asyncio.Event()
    body = {"model": "m", "messages": [], "stream": True}
    async with (
        engine(script) as fake,
        balancer(instance(fake)) as proxy,
        asyncio.timeout(20),
        client.stream("POST", proxy.url + path, json=body) as answer,
    ):
        chunks = answer.aiter_raw()
        first = await anext(chunks)
        seen.set()
        whole = first + b"".join([each async for each in chunks])
        (record,) = await proxy.wait_for_records(1)

        assert answer.headers["content-encoding"] == "gzip"
        assert whole == packed
        assert record.legs[0].cached_tokens is None
        assert record.error is None
