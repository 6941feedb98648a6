"""Responses API: what an instance keeps is asked of that instance."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from balancer.core.settings.dataplane import DataPlaneSettings


class Keeper:
    """An engine that keeps what it answers, as vLLM with its store switched on."""

    def __init__(self, name: str, *, release: asyncio.Event | None = None) -> None:
        self._name = name
        self._release = release
        self._kept: dict[str, dict[str, Any]] = {}

    async def __call__(self, received: Any, wire: Any) -> None:
        parts = received.target.partition("?")[0].split("/")
        named = parts[3] if len(parts) > 3 else received.json.get("previous_response_id")
        if named is not None and named not in self._kept:
            message = f"Response with id '{named}' not found."
            await wire.json({"error": {"message": message, "type": "invalid_request_error"}}, 404)
        elif len(parts) == 3:
            await self._create(received, wire)
        else:
            await wire.json({**self._kept[named], "from": self._name})
            if received.method == "DELETE":
                del self._kept[named]

    async def _create(self, received: Any, wire: Any) -> None:
        response = {"id": f"resp_{self._name}_{len(self._kept)}", "model": "m"}
        self._kept[response["id"]] = response
        if not received.json.get("stream"):
            await wire.json(response)
            return
        opening = {"type": "response.created", "response": response, "sequence_number": 0}
        await wire.head(content_type="text/event-stream")
        await wire.chunk(f"event: response.created\ndata: {json.dumps(opening)}\n\n".encode())
        assert self._release is not None
        await self._release.wait()
        await wire.chunk(b"event: response.completed\ndata: {}\n\n")
        await wire.end()


async def created(client: httpx.AsyncClient, url: str, **fields: Any) -> dict[str, Any]:
    answer = await client.post(url + "/v1/responses", json={"model": "m", "input": "x", **fields})
    assert answer.status_code == 200, answer.text
    read: dict[str, Any] = answer.json()
    return read


async def test_kept_responses_are_asked_of_who_keeps_them(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """Reading, cancelling and deleting go where the response was made; nobody else is asked."""
    async with engine(Keeper("a")) as one, engine(Keeper("b")) as two:
        async with balancer(instance(one, "e0"), instance(two, "e1")) as proxy:
            ids = [(await created(client, proxy.url))["id"] for _ in range(4)]
            base = proxy.url + "/v1/responses/"
            for each in ids:
                name = each.split("_")[1]
                assert (await client.get(base + each)).json()["from"] == name
                assert (await client.post(base + each + "/cancel")).json()["from"] == name
                assert (await client.delete(base + each)).json()["from"] == name
                assert (await client.get(base + each)).status_code == 404

        assert {each.split("_")[1] for each in ids} == {"a", "b"}


async def test_conversation_goes_on_where_it_is_kept(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """`previous_response_id` is an address."""
    async with engine(Keeper("a")) as one, engine(Keeper("b")) as two:
        async with balancer(instance(one, "e0"), instance(two, "e1")) as proxy:
            last = await created(client, proxy.url)
            for _ in range(5):
                following = await created(client, proxy.url, previous_response_id=last["id"])
                assert following["id"].split("_")[1] == last["id"].split("_")[1]
                last = following

        assert sorted([len(one.received), len(two.received)]) == [0, 6]


async def test_stream_is_known_from_its_first_event(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """Somebody may want to cancel it long before its end."""
    release = asyncio.Event()
    scripts = Keeper("a", release=release), Keeper("b", release=release)
    async with engine(scripts[0]) as one, engine(scripts[1]) as two:
        async with balancer(instance(one, "e0"), instance(two, "e1")) as proxy:
            body = {"model": "m", "input": "x", "stream": True, "background": True}
            async with client.stream("POST", proxy.url + "/v1/responses", json=body) as answer:
                chunks = answer.aiter_raw()
                first = json.loads((await anext(chunks)).partition(b"data: ")[2])
                response = first["response"]["id"]
                read = await client.get(f"{proxy.url}/v1/responses/{response}")
                release.set()
                rest = b"".join([each async for each in chunks])

        assert read.json()["from"] == response.split("_")[1]
        assert rest.endswith(b"data: {}\n\n")
        assert len(one.received) + len(two.received) == 2


@pytest.mark.parametrize("how", ["read", "go-on"])
async def test_what_nobody_remembers_is_found_by_asking(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient, how: str
) -> None:
    """Another balancer made it, or it was forgotten; found once, it is remembered."""
    async with engine(Keeper("a")) as one, engine(Keeper("b")) as two:
        fleet = (instance(one, "e0"), instance(two, "e1"))
        async with balancer(*fleet) as other:
            ids = [(await created(client, other.url))["id"] for _ in range(2)]
        async with balancer(*fleet) as proxy:
            for _ in range(2):
                for each in ids:
                    if how == "read":
                        found = (await client.get(f"{proxy.url}/v1/responses/{each}")).json()
                        assert found["from"] == each.split("_")[1]
                    else:
                        found = await created(client, proxy.url, previous_response_id=each)
                        assert found["id"].split("_")[1] == each.split("_")[1]

    asked = [each for each in (*one.received, *two.received) if each.method == "GET"]
    assert len(asked) == (4 + 4 if how == "read" else 4)


@pytest.mark.parametrize("how", ["GET", "DELETE", "cancel", "go-on"])
async def test_unknown_response_is_told_clearly(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient, how: str
) -> None:
    """In the words that engines have for it, and nothing is remembered of it."""
    path = "/v1/responses/resp_x"
    async with (
        engine(Keeper("a")) as one,
        engine(Keeper("b")) as two,
        balancer(instance(one, "e0"), instance(two, "e1")) as proxy,
    ):
        if how == "go-on":
            body = {"model": "m", "input": "x", "previous_response_id": "resp_x"}
            answer = await client.post(proxy.url + "/v1/responses", json=body)
        elif how == "cancel":
            answer = await client.post(proxy.url + path + "/cancel")
        else:
            answer = await client.request(how, proxy.url + path)

    error = answer.json()["error"]
    assert answer.status_code == 404
    assert error["message"] == "Response with id 'resp_x' not found."
    assert (error["type"], error["param"]) == ("invalid_request_error", "response_id")


@pytest.mark.parametrize(
    "named",
    [
        pytest.param("x HTTP/1.1\r\nhost: e\r\n\r\nPOST /pause", id="a-second-request"),
        pytest.param("../../pause", id="another-path"),
        pytest.param("resp_\u20ac", id="not-ascii"),
        pytest.param("x" * 257, id="too-long"),
    ],
)
async def test_id_that_is_none_is_never_written_into_a_path(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient, named: str
) -> None:
    """A body could ask engines for anything by it. One of them says what is wrong with it."""
    async with engine(Keeper("a")) as one, engine(Keeper("b")) as two:
        async with balancer(instance(one, "e0"), instance(two, "e1")) as proxy:
            body = {"model": "m", "input": "x", "previous_response_id": named}
            answer = await client.post(proxy.url + "/v1/responses", json=body)

        targets = [each.target for each in (*one.received, *two.received)]
        assert targets == ["/v1/responses"]
        assert answer.status_code == 404
        assert "not found" in answer.json()["error"]["message"]


async def test_silent_instance_delays_a_search_and_nothing_more(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """One that hangs or refuses connections keeps nothing as far as anybody can tell."""

    async def hang(received: Any, wire: Any) -> None:
        await received.gone.wait()

    async with engine(Keeper("a")) as one, engine(hang) as two:
        fleet = (instance(one, "e0"), instance(two, "e1"), instance("http://127.0.0.1:9", "e2"))
        async with balancer(instance(one, "e0")) as alone:
            response = (await created(client, alone.url))["id"]
        async with balancer(*fleet) as proxy:
            found = await client.get(f"{proxy.url}/v1/responses/{response}")

        assert found.json()["from"] == "a"


async def test_holder_that_is_down_is_told(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """503: it may come back. Nobody else can answer. One that is drained still answers."""
    async with engine(Keeper("a")) as one, engine(Keeper("b")) as two:
        fleet = (instance(one, "e0"), instance(two, "e1", draining=True))
        async with balancer(*fleet) as proxy:
            response = (await created(client, proxy.url))["id"]
            proxy.fleet = type(proxy.fleet)(
                instances=(instance(one, "e0", draining=True), instance(two, "e1"))
            )
            drained = await client.get(f"{proxy.url}/v1/responses/{response}")
            proxy.fleet = type(proxy.fleet)(
                instances=(instance(one, "e0", healthy=False), instance(two, "e1"))
            )
            down = await client.get(f"{proxy.url}/v1/responses/{response}")

    assert drained.json()["from"] == "a"
    assert (down.status_code, down.json()["error"]["code"]) == (503, "no_instance")


async def test_only_one_instance_answers_for_itself(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """There is nothing to search: its own 404 is the answer."""
    async with engine(Keeper("a")) as one, balancer(instance(one)) as proxy:
        answer = await client.get(proxy.url + "/v1/responses/resp_x?stream=true")

        assert answer.status_code == 404
        assert [each.target for each in one.received] == ["/v1/responses/resp_x?stream=true"]


async def test_model_is_looked_up_before_the_response(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """As engines do it."""
    async with engine(Keeper("a")) as one, balancer(instance(one)) as proxy:
        body = {"model": "nope", "input": "x", "previous_response_id": "resp_x"}
        answer = await client.post(proxy.url + "/v1/responses", json=body)

        assert answer.json()["error"]["code"] == "model_not_found"


async def test_memory_of_responses_is_bounded(
    engine: Any, balancer: Any, instance: Any, client: httpx.AsyncClient
) -> None:
    """What is forgotten costs a question more, no answer."""
    settings = DataPlaneSettings(remembered_responses=1)
    async with engine(Keeper("a")) as one, engine(Keeper("b")) as two:
        async with balancer(instance(one), instance(two, "e1"), settings=settings) as proxy:
            ids = [(await created(client, proxy.url))["id"] for _ in range(3)]
            found = [(await client.get(f"{proxy.url}/v1/responses/{each}")).json() for each in ids]

        assert [each["from"] for each in found] == [each.split("_")[1] for each in ids]
