"""JSON without a length: only itself shows that it was cut, on every path that runs a model."""

import asyncio
from typing import Any

import httpx
import pytest

ASKED = {"model": "m", "input": "x", "messages": [{"role": "user", "content": "x"}]}
GENERATING = ["/v1/chat/completions", "/v1/messages"]
INFERRING = ["/v1/embeddings", "/v1/score", "/pooling", "/v2/embed"]
WHOLE = b'{"id": "a", "content": [{"text": "a"}], "data": [{"embedding": [0.25, 0.5]}]}'
CUT = WHOLE[:60]
BEHIND_NESTED = b'{"id": "a", "data": [{"embedding": [0.25, 0.5]}'
LONG_NUMBER = b'{"id": "a", "n": ' + b"1" * 5000 + b', "content": [{"text": "a"}]}'
LARGE = b'{"id": "a", "text": "' + b"x" * 3_000_000 + b'", "content": [{"text": "a"}]}'
JSON = b"application/json"


def unframed(body: bytes, kind: bytes = JSON, extra: bytes = b"connection: close\r\n") -> Any:
    """An engine that closes the connection behind `body`."""

    async def script(received: Any, wire: Any) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: " + kind + b"\r\n" + extra + b"\r\n"
        await wire.raw(head + body)
        wire.close()

    return script


@pytest.mark.parametrize("path", [*GENERATING, *INFERRING])
@pytest.mark.parametrize(
    ("body", "kind"),
    [
        pytest.param(CUT, JSON, id="cut"),
        pytest.param(BEHIND_NESTED, JSON, id="behind-nested"),
        pytest.param(b"", JSON, id="empty"),
        pytest.param(CUT, b"Application/JSON; charset=utf-8", id="any-case"),
        pytest.param(CUT, b"application/problem+json", id="of-json"),
    ],
)
async def test_cut_json_is_asked_of_another_instance(
    engine: Any,
    balancer: Any,
    instance: Any,
    client: httpx.AsyncClient,
    path: str,
    body: bytes,
    kind: bytes,
) -> None:
    """Or it is a 502, where no other has it whole (F48)."""
    script = unframed(body, kind)
    async with engine(script) as one, engine(script) as other:
        async with balancer(instance(one), instance(other)) as proxy:
            answer = await client.post(proxy.url + path, json=ASKED)
            (record,) = await proxy.wait_for_records(1)

        assert len(one.received) == len(other.received) == 1

    assert answer.status_code == 502
    assert {leg.error for leg in record.legs} <= {"stream_cut", "engine_closed"}


@pytest.mark.parametrize("path", [*GENERATING, *INFERRING])
@pytest.mark.parametrize(
    ("body", "kind"),
    [
        pytest.param(WHOLE, JSON, id="whole"),
        pytest.param(WHOLE + b"\r\n", b"Application/JSON", id="blank-behind"),
        pytest.param(LONG_NUMBER, JSON, id="long-number"),
        pytest.param(LARGE, JSON, id="large"),
        pytest.param(WHOLE + b'\n{"id', b"application/jsonl", id="lines"),
    ],
)
async def test_whole_json_passes(
    engine: Any,
    balancer: Any,
    instance: Any,
    client: httpx.AsyncClient,
    path: str,
    body: bytes,
    kind: bytes,
) -> None:
    """So does what is no JSON, however it ends."""
    async with engine(unframed(body, kind)) as fake, balancer(instance(fake)) as proxy:
        answer = await client.post(proxy.url + path, json=ASKED)
        (record,) = await proxy.wait_for_records(1)

    assert answer.status_code == 200
    assert answer.content == body
    assert record.error is None


@pytest.mark.parametrize("path", [*GENERATING, *INFERRING])
@pytest.mark.parametrize("size", [len(LARGE) - 1, len(LARGE) - 2, 2_000_000])
async def test_large_json_that_is_cut_breaks_the_connection(
    engine: Any, balancer: Any, instance: Any, raw_client: Any, path: str, size: int
) -> None:
    """What is too large to be held has begun, so that is all that its client can be told."""
    async with (
        engine(unframed(LARGE[:size])) as fake,
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


async def test_cut_response_in_the_background_is_not_asked_for_again(
    engine: Any, balancer: Any, instance: Any, raw_client: Any
) -> None:
    """Its engine goes on with it: what there is of it passes, and the connection breaks."""
    script = unframed(b'{"id": "resp_1", "status": "que')
    async with (
        engine(script) as one,
        engine(script) as other,
        balancer(instance(one), instance(other)) as proxy,
        raw_client(proxy) as client,
    ):
        await client.post("/v1/responses", ASKED | {"background": True})
        rest = await client.read_rest()
        (record,) = await proxy.wait_for_records(1)

        assert len(one.received) + len(other.received) == 1

    assert b"resp_1" in rest
    assert not rest.endswith(b"0\r\n\r\n")
    assert record.error == "stream_cut"


async def test_head_has_nothing_that_could_be_cut(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """Its answer is whole without a byte."""
    async with engine(unframed(b"")) as fake, balancer(instance(fake)) as proxy:
        answer = await client.head(proxy.url + "/v1/responses/resp_1")
        (record,) = await proxy.wait_for_records(1)

    assert answer.status_code == 200
    assert record.error is None


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings"])
async def test_redirect_without_a_body_passes(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient, path: str
) -> None:
    """Whatever kind it names, there was nothing to be whole."""

    async def script(received: Any, wire: Any) -> None:
        head = b"HTTP/1.1 307 Elsewhere\r\nlocation: /x\r\ncontent-type: application/json\r\n\r\n"
        await wire.raw(head)
        await asyncio.sleep(0.05)
        wire.close()

    async with engine(script) as fake, balancer(instance(fake)) as proxy:
        answer = await client.post(proxy.url + path, json=ASKED)

    assert answer.status_code == 307
    assert len(fake.received) == 1
