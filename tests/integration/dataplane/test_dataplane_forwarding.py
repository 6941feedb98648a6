"""Engine paths that are neither scored nor split: whole, untouched, to one capable instance."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from balancer.core.fleet.snapshot import Role


async def echo(received: Any, wire: Any) -> None:
    head = (
        f"HTTP/1.1 200 OK\r\ncontent-length: {len(received.body)}\r\n"
        "content-type: application/octet-stream\r\n\r\n"
    )
    await wire.raw(head.encode() + received.body)


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
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient, path: str
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
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
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


async def test_prefill_instances_are_not_asked(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """Only instances that answer clients do."""
    async with engine(echo) as p, engine(echo) as d:
        fleet = (instance(p, "p0", role=Role.PREFILL), instance(d, "d0", role=Role.DECODE))
        async with balancer(*fleet) as proxy:
            for _ in range(3):
                await client.post(proxy.url + "/tokenize", json={"model": "m"})

    assert (len(p.received), len(d.received)) == (0, 3)


async def test_equals_take_turns_and_the_busy_are_spared(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """A long call on one instance sends the others elsewhere."""

    async def slow(received: Any, wire: Any) -> None:
        arrived.set()
        await release.wait()
        await echo(received, wire)

    async def quick(received: Any, wire: Any) -> None:
        arrived.set()
        await echo(received, wire)

    arrived, release = asyncio.Event(), asyncio.Event()
    async with engine(slow) as busy, engine(quick) as free:
        fleet = (instance(busy, "e0"), instance(free, "e1"))
        async with balancer(*fleet) as proxy, asyncio.TaskGroup() as group:
            while not busy.received:
                arrived.clear()
                group.create_task(client.post(proxy.url + "/tokenize", json={"model": "m"}))
                async with asyncio.timeout(20):
                    await arrived.wait()
            for _ in range(4):
                await client.post(proxy.url + "/tokenize", json={"model": "m"})
            release.set()

    assert len(busy.received) == 1


@pytest.mark.parametrize(
    ("body", "status"),
    [
        pytest.param({"model": "nope"}, 404, id="unknown"),
        pytest.param({"model": 42}, 400, id="number"),
        pytest.param({}, 400, id="absent-of-several"),
    ],
)
async def test_model_is_looked_up(
    engine: Any,
    balancer: Any,
    instance: Any,
    client: httpx.AsyncClient,
    body: dict[str, Any],
    status: int,
) -> None:
    """The same answers as on the scored paths."""
    async with engine(echo) as one, engine(echo) as two:
        async with balancer(instance(one), instance(two, "e1", base="other")) as proxy:
            answer = await client.post(proxy.url + "/v1/embeddings", json=body)

        assert answer.status_code == status


async def test_malformed_json_is_the_engines_to_refuse(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """We don't judge bodies that we only hand over."""
    headers = {"content-type": "application/json"}
    async with engine(echo) as fake, balancer(instance(fake)) as proxy:
        answer = await client.post(proxy.url + "/v1/embeddings", content=b"{", headers=headers)

        assert answer.content == b"{"


async def test_get_is_forwarded(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """A stored response is asked for without a body."""
    async with engine(echo) as fake, balancer(instance(fake)) as proxy:
        answer = await client.get(proxy.url + "/v1/responses/resp_1")

        assert answer.status_code == 200
        assert (fake.received[0].method, fake.received[0].target) == ("GET", "/v1/responses/resp_1")


async def test_busy_or_dead_instance_is_passed_over_once(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
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
]


@pytest.mark.parametrize(
    ("path", "more", "status"),
    [
        *(pytest.param(path, {}, 200, id=path) for path in RUN),
        pytest.param("/v1/responses", {"background": True}, 500, id="background"),
        pytest.param("/tokenize", {}, 500, id="no-prompt-run"),
    ],
)
async def test_engine_that_died_is_followed_where_a_prompt_is_run(
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


async def test_transfers_are_not_for_clients_to_order(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """Taken out wherever a prompt runs, not only on the scored paths."""
    asked = {"model": "m", "input": "x", "kv_transfer_params": {"do_remote_prefill": True}}
    async with engine(echo) as fake, balancer(instance(fake)) as proxy:
        for path in ("/v1/responses", "/v1/messages", "/inference/v1/generate"):
            await client.post(proxy.url + path, json=asked)

        assert [each.json for each in fake.received] == [{"model": "m", "input": "x"}] * 3


async def test_instance_without_the_path_is_passed_over(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """In a fleet of mixed releases the others serve it, and it isn't asked again for a while."""

    async def too_old(received: Any, wire: Any) -> None:
        error = {"message": "Not Found", "type": "Not Found", "param": None, "code": 404}
        await wire.json({"error": error}, 404)

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


async def test_forwarded_requests_count_as_load(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """In the same books as scored ones, until the last byte."""

    async def slow(received: Any, wire: Any) -> None:
        await wire.head()
        await wire.chunk(b"half")
        counted.append(proxy.in_flight())
        await wire.end()

    counted: list[int] = []
    async with engine(slow) as fake, balancer(instance(fake)) as proxy:
        await client.post(proxy.url + "/v1/messages", json={"model": "m"})
        await proxy.wait_for_records(1)

        assert counted == [1]
        assert proxy.in_flight() == 0


async def test_generation_is_pinned_to_the_rank_it_is_booked_on(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """Where the engine takes the header; a client's own is never passed."""
    async with engine(echo) as fake, balancer(instance(fake, ranks=(2, 3), rank_base=2)) as proxy:
        for path in ("/v1/messages", "/v1/embeddings"):
            await client.post(
                proxy.url + path, json={"model": "m"}, headers={"x-data-parallel-rank": "7"}
            )

        assert [each.header("x-data-parallel-rank") for each in fake.received] == ["0", None]


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


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/v1/embeddings"])
async def test_refused_request_leaves_no_load(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient, path: str
) -> None:
    """Its 400 passes, and the rank is as idle as it was: nothing was computed."""

    async def refuse(received: Any, wire: Any) -> None:
        await wire.raw(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 2\r\n\r\nno")

    async with engine(refuse) as fake, balancer(instance(fake)) as proxy:
        answer = await client.post(proxy.url + path, json={"model": "m", "input": "a"})
        await proxy.wait_for_records(1)
        (rank,) = proxy.fleet.instances[0].rank_ids()

    assert (answer.status_code, answer.content) == (400, b"no")
    assert proxy.ledger.load(rank).arrivals_per_s == 0
