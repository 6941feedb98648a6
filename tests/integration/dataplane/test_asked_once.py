"""What may be a prompt's own doing meets no engine twice, and nothing that needs no other engine meets two."""

from typing import Any

import httpx
import pytest

from balancer.core.settings.dataplane import DataPlaneSettings


async def refuse(received: Any, wire: Any) -> None:
    await wire.json({"error": {"message": "EngineCore died"}}, 500)


async def reset(received: Any, wire: Any) -> None:
    wire.reset()


async def die_in_the_middle(received: Any, wire: Any) -> None:
    await wire.head(content_type="text/event-stream")
    wire.close()


async def stay_silent(received: Any, wire: Any) -> None:
    await received.gone.wait()


@pytest.mark.parametrize("script", [refuse, reset, die_in_the_middle, stay_silent])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
async def test_no_engine_is_asked_twice(
    engine: Any,
    balancer: Any,
    instance: Any,
    client: httpx.AsyncClient,
    path: str,
    script: Any,
) -> None:
    """A prompt that kills engines must not do it again, and silence costs its limit each time."""
    limits = DataPlaneSettings(retries=5, first_byte_timeout_s=0.3)
    async with (
        engine(script) as one,
        engine(script) as other,
        balancer(instance(one, "e0"), instance(other, "e1"), settings=limits) as proxy,
    ):
        answer = await client.post(
            proxy.url + path, json={"model": "m", "prompt": [1], "input": ""}
        )

        assert answer.status_code in {500, 502, 504}
        assert (len(one.received), len(other.received)) == (1, 1)


@pytest.mark.parametrize("status", [302, 307])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", "/v1/embeddings"])
async def test_redirect_is_the_clients_to_follow(
    engine: Any,
    balancer: Any,
    instance: Any,
    client: httpx.AsyncClient,
    path: str,
    status: int,
) -> None:
    """Whatever its body says, it is the engine's answer, and nobody else is asked."""
    said = {"error": {"message": "moved", "type": "t", "param": None, "code": 1}}

    async def redirect(received: Any, wire: Any) -> None:
        await wire.json(said, status, location="/elsewhere")

    async with (
        engine(redirect) as one,
        engine(redirect) as other,
        balancer(instance(one, "e0"), instance(other, "e1")) as proxy,
    ):
        answer = await client.post(
            proxy.url + path, json={"model": "m", "prompt": [1], "input": ""}
        )

        assert (answer.status_code, answer.headers["location"]) == (status, "/elsewhere")
        assert answer.json() == said
        assert len(one.received) + len(other.received) == 1


@pytest.mark.parametrize("kind", ["text/event-stream", "application/json"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages"])
async def test_redirect_says_what_it_likes(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient, path: str, kind: str
) -> None:
    """Its body is no stream that is cut, and no JSON that isn't whole."""
    said = b"" if kind == "text/event-stream" else b'{"moved":'

    async def redirect(received: Any, wire: Any) -> None:
        await wire.raw(
            b"HTTP/1.1 307 Elsewhere\r\nlocation: /elsewhere\r\nconnection: close\r\n"
            b"content-type: %b\r\n\r\n%b" % (kind.encode(), said)
        )
        wire.close()

    asked = {
        "model": "m",
        "prompt": [1],
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 1,
        "stream": True,
    }
    async with (
        engine(redirect) as one,
        engine(redirect) as other,
        balancer(instance(one, "e0"), instance(other, "e1")) as proxy,
    ):
        answer = await client.post(proxy.url + path, json=asked)

        assert (answer.status_code, answer.headers["location"]) == (307, "/elsewhere")
        assert answer.content == said
        assert len(one.received) + len(other.received) == 1
