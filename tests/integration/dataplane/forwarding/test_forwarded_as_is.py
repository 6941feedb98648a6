"""Engine paths that are neither scored nor split: handed on whole and untouched."""

import asyncio
from typing import Any

import httpx
import pytest


@pytest.mark.parametrize(
    "path",
    [
        "/v1/embeddings",
        "/pooling",
        "/classify",
        "/score",
        "/v1/score",
        "/rerank",
        "/v1/rerank",
        "/v2/rerank",
        "/v2/embed",
        "/tokenize",
        "/detokenize",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/inference/v1/generate",
        "/v1/chat/completions/batch",
    ],
)
async def test_json_paths_are_forwarded_as_they_are(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient, path: str, echo: Any
) -> None:
    """On their own path, byte for byte, never turned into a chat call (F54)."""
    raw = b'{"model": "m", "input": ["a", "b"]}'
    async with engine(echo) as fake, balancer(instance(fake)) as proxy:
        assert proxy.dataplane.proxies(path)
        answer = await client.post(
            proxy.url + path + "?q=1", content=raw, headers={"content-type": "application/json"}
        )

        assert (answer.status_code, answer.content) == (200, raw)
        assert fake.received[0].target == path + "?q=1"
        assert answer.headers["x-kvlb-instance"] == "e0"
        assert fake.received[0].header("x-request-id") == answer.headers["x-request-id"]


async def test_multipart_passes_untouched_to_the_model_it_names(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient, echo: Any
) -> None:
    """The form's model chooses the instance; binary parts stay what they are (F54)."""
    sound = bytes(range(256)) * 100
    async with engine(echo) as other, engine(echo) as right:
        fleet = (instance(other, "e0", base="other"), instance(right, "e1"))
        async with balancer(*fleet) as proxy:
            for _ in range(2):
                answer = await client.post(
                    proxy.url + "/v1/audio/transcriptions",
                    files={"file": ("a.wav", sound)},
                    data={"model": "m"},
                )
                assert sound in answer.content

    assert (len(other.received), len(right.received)) == (0, 2)


async def test_malformed_json_is_the_engines_to_refuse(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient, echo: Any
) -> None:
    """We don't judge bodies that we only hand over."""
    headers = {"content-type": "application/json"}
    async with engine(echo) as fake, balancer(instance(fake)) as proxy:
        answer = await client.post(proxy.url + "/v1/embeddings", content=b"{", headers=headers)

        assert answer.content == b"{"


async def test_get_is_forwarded(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient, echo: Any
) -> None:
    """A stored response is asked for without a body."""
    async with engine(echo) as fake, balancer(instance(fake)) as proxy:
        answer = await client.get(proxy.url + "/v1/responses/resp_1")

        assert answer.status_code == 200
        assert (fake.received[0].method, fake.received[0].target) == ("GET", "/v1/responses/resp_1")


async def test_transfers_are_not_for_clients_to_order(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient, echo: Any
) -> None:
    """Taken out wherever a prompt runs, not only on the scored paths."""
    asked = {"model": "m", "input": "x", "kv_transfer_params": {"do_remote_prefill": True}}
    async with engine(echo) as fake, balancer(instance(fake)) as proxy:
        for path in ("/v1/responses", "/v1/messages", "/inference/v1/generate"):
            await client.post(proxy.url + path, json=asked)

        assert [each.json for each in fake.received] == [{"model": "m", "input": "x"}] * 3


async def test_stream_is_passed_as_it_comes(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """Once something was said, events of other APIs are not looked into."""
    said = b'event: content_block_delta\ndata: {"type": "content_block_delta"}\n\nevent: ping\n'

    async def script(received: Any, wire: Any) -> None:
        await wire.head(content_type="text/event-stream")
        await wire.chunk(said)
        await seen.wait()
        await wire.chunk(b"data: {}\n\nevent: message_stop\ndata: {}\n\n")
        await wire.end()

    seen = asyncio.Event()
    async with (
        engine(script) as fake,
        balancer(instance(fake)) as proxy,
        asyncio.timeout(20),
        client.stream("POST", proxy.url + "/v1/messages", json={"model": "m"}) as answer,
    ):
        chunks = answer.aiter_raw()
        assert await anext(chunks) == said
        seen.set()
        assert b"".join([each async for each in chunks]).endswith(b"data: {}\n\n")


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/v1/audio/transcriptions"])
async def test_streams_of_other_apis_pass_byte_for_byte(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient, path: str, size: int
) -> None:
    """Line ends of all kinds, comments, data on several lines, cut anywhere; no end is made up."""
    stream = (
        b': hello\r\n\r\nevent: a\r\ndata: {"x":1,\r\ndata: "y":2}\r\n\r\n'
        b"data: \xc3\xa9 \xf0\x9f\x98\x80 \\ud800\n\nretry: 5\rid: 7\rdata: \xff\r\r"
        b"event: message_stop\ndata: {}\n\n"
    )

    async def script(received: Any, wire: Any) -> None:
        await wire.head(content_type="text/event-stream")
        for start in range(0, len(stream), size):
            await wire.chunk(stream[start : start + size])
        await wire.end()

    async with engine(script) as fake, balancer(instance(fake)) as proxy:
        answer = await client.post(proxy.url + path, json={"model": "m", "stream": True})

        assert answer.content == stream
