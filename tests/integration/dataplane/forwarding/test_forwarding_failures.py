"""What is only handed on, and fails: who is asked next, and what the client is told."""

import json
from typing import Any

import httpx
import pytest


async def test_busy_or_dead_instance_is_passed_over_once(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient, echo: Any
) -> None:
    """One retry elsewhere while nothing has been answered."""

    async def busy(received: Any, wire: Any) -> None:
        await wire.json({"error": {}}, 503)

    async with engine(busy) as bad, engine(echo) as good:
        async with balancer(instance(bad, "e0"), instance(good, "e1")) as proxy:
            answers = [
                await client.post(proxy.url + "/tokenize", json={"model": "m"}) for _ in range(2)
            ]

        assert [answer.status_code for answer in answers] == [200, 200]
        assert len(bad.received) == 1


RUN = [
    "/v1/messages",
    "/v1/responses",
    "/inference/v1/generate",
    "/v1/chat/completions/batch",
    "/generative_scoring",
    "/invocations",
    "/v1/embeddings",
    "/v2/embed",
    "/pooling",
    "/classify",
    "/score",
    "/v1/score",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
]


@pytest.mark.parametrize(
    ("path", "more", "status"),
    [
        *(pytest.param(path, {}, 200, id=path) for path in RUN),
        pytest.param("/v1/responses", {"background": True}, 500, id="background"),
        pytest.param("/tokenize", {}, 500, id="no-model-run"),
    ],
)
async def test_engine_that_died_is_followed_where_a_model_is_run(
    engine: Any,
    balancer: Any,
    instance: Any,
    client: httpx.AsyncClient,
    path: str,
    more: dict[str, Any],
    status: int,
) -> None:
    """VLLM says 500 then. Where something may have been kept, its words are the answer."""
    asked: list[str] = []

    async def script(received: Any, wire: Any) -> None:
        asked.append(received.target)
        if len(asked) == 1:
            await wire.json({"error": {"message": "EngineCore died"}}, 500)
        else:
            await wire.json({"a": 1})

    async with (
        engine(script) as one,
        engine(script) as other,
        balancer(instance(one, "e0"), instance(other, "e1")) as proxy,
    ):
        answer = await client.post(proxy.url + path, json={"model": "m", **more})

    assert answer.status_code == status
    assert len(asked) == (2 if status == 200 else 1)
    assert (b"EngineCore died" in answer.content) == (status == 500)


MISSING = {"message": "Not Found", "type": "Not Found", "param": None, "code": 404}


@pytest.mark.parametrize(
    "said",
    [
        pytest.param({"error": MISSING}, id="0.10.1"),
        pytest.param({"object": "error", **MISSING}, id="0.10.0"),
        pytest.param({"detail": "Not Found"}, id="router"),
    ],
)
async def test_instance_without_the_path_is_passed_over(
    engine: Any,
    balancer: Any,
    instance: Any,
    client: httpx.AsyncClient,
    echo: Any,
    said: dict[str, Any],
) -> None:
    """In a fleet of mixed releases the others serve it, and it isn't asked again for a while."""

    async def too_old(received: Any, wire: Any) -> None:
        await wire.json(said, 404)

    async with engine(too_old) as old, engine(echo) as new:
        async with balancer(instance(old, "e0"), instance(new, "e1")) as proxy:
            answers = [
                await client.post(proxy.url + "/v1/messages", json={"model": "m"}) for _ in range(6)
            ]

        assert [answer.status_code for answer in answers] == [200] * 6
        assert len(old.received) == 1


async def test_path_that_nobody_has_is_refused_in_the_engines_words(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """Each instance is asked once per request; the last one's answer is the client's."""

    async def not_built(received: Any, wire: Any) -> None:
        # Engines' own word for a path that their release or model doesn't have.
        error = {"message": "no", "type": "NotImplementedError", "param": None, "code": 501}
        await wire.json({"error": error}, 501)

    async with engine(not_built) as one, engine(not_built) as two:
        async with balancer(instance(one, "e0"), instance(two, "e1")) as proxy:
            answer = await client.post(proxy.url + "/v1/messages", json={"model": "m"})

        assert answer.status_code == 501
        assert answer.json()["error"]["message"] == "no"
        assert (len(one.received), len(two.received)) == (1, 1)


async def test_unknown_model_is_no_missing_path(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """An adapter that was unloaded just now: the engine's own 404, from one engine."""

    async def unloaded(received: Any, wire: Any) -> None:
        error = {"message": "no m", "type": "NotFoundError", "param": "model", "code": 404}
        await wire.json({"error": error}, 404)

    async with engine(unloaded) as one, engine(unloaded) as two:
        async with balancer(instance(one, "e0"), instance(two, "e1")) as proxy:
            answer = await client.post(proxy.url + "/v1/embeddings", json={"model": "m"})

        assert answer.status_code == 404
        assert len(one.received) + len(two.received) == 1


@pytest.mark.parametrize("path", ["/v1/messages", "/tokenize"])
async def test_errors_have_the_form_of_their_api(
    balancer: Any, instance: Any, client: httpx.AsyncClient, path: str
) -> None:
    """Anthropic's on its paths, OpenAI's elsewhere."""
    async with balancer(instance("http://127.0.0.1:9")) as proxy:
        answer = await client.post(proxy.url + path, json={"model": "m"})

        assert answer.status_code == 502
        assert (answer.json().get("type") == "error") == (path == "/v1/messages")


async def test_cut_answer_breaks_the_connection(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """Nothing incomplete looks complete."""

    async def script(received: Any, wire: Any) -> None:
        await wire.head()
        await wire.chunk(b"half")
        wire.close()

    async with engine(script) as fake, balancer(instance(fake)) as proxy:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post(proxy.url + "/v1/embeddings", json={"model": "m"})


async def test_leaving_client_stops_the_engine(
    engine: Any, balancer: Any, instance: Any, raw_client: Any
) -> None:
    """Forwarded calls are watched like the others."""

    async def stay_silent(received: Any, wire: Any) -> None:
        await received.gone.wait()

    async with (
        engine(stay_silent) as fake,
        balancer(instance(fake)) as proxy,
        raw_client(proxy) as client,
    ):
        await client.post("/v1/embeddings", json.dumps({"model": "m"}).encode())
        await fake.wait_for_requests(1)
        client.leave()
        await fake.wait_for_connections(0)

        (record,) = await proxy.wait_for_records(1)
        assert [(leg.kind, leg.error) for leg in record.legs] == [("forward", "cancelled")]
