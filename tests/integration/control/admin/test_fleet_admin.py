"""`/instances/...` over a real server: who gets in, what is added, and what isn't."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

Post = Callable[..., Awaitable[Any]]

IDS = {"model": "tiny", "prompt": [1, 2, 3]}
KEY = {"x-api-key": "k"}
ADMIN = {"admin": {"api_key": "k"}}


def host_and_port(engine: Any) -> str:
    address: str = engine.url.removeprefix("http://")
    return address


@pytest.mark.parametrize(
    "path",
    ["/instances/add", "/instances/remove", "/instances/drain", "/instances/undrain", "/sleep"],
)
async def test_closed_unless_a_key_is_set(engine: Any, balancer_factory: Any, path: str) -> None:
    """Also to this machine; nothing reaches an engine."""
    async with balancer_factory({"instances": [{"url": engine.url}]}) as balancer:
        answer = await balancer.http.post(path, json={"url": "http://h:1"}, headers=KEY)

    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "forbidden"
    assert engine.calls("/sleep") == 0


@pytest.mark.parametrize("headers", [{}, {"x-api-key": "other"}, {"x-api-key": "ké"}])
async def test_wrong_key_opens_nothing(
    engine: Any, balancer_factory: Any, headers: dict[str, str]
) -> None:
    """Being on this machine isn't enough to change something."""
    config = {"instances": [{"url": engine.url}], **ADMIN}
    encoded = {name: value.encode() for name, value in headers.items()}
    async with balancer_factory(config) as balancer:
        answer = await balancer.http.post("/instances/add", json={}, headers=encoded)
        listed = await balancer.http.get("/instances")

    assert answer.status_code == 401
    assert listed.status_code == 200


async def test_instances_are_for_operators(engine: Any, balancer_factory: Any) -> None:
    """The list tells addresses: this machine, or the key."""
    elsewhere = {"x-forwarded-for": "203.0.113.1"}
    config = {"instances": [{"url": engine.url}], **ADMIN}
    async with balancer_factory(config) as balancer:
        refused = await balancer.http.get("/instances", headers=elsewhere)
        allowed = await balancer.http.get("/instances", headers={**elsewhere, **KEY})

    assert refused.status_code == 401
    (shown,) = allowed.json()["instances"]
    assert (shown["alias"], shown["url"], shown["origin"]) == ("m0", engine.url, "file")


@pytest.mark.parametrize(
    "write",
    [
        pytest.param(
            lambda engine: {"type": "decode", "instance": host_and_port(engine)}, id="the-example's"
        ),
        pytest.param(lambda engine: {"url": engine.url, "role": "decode"}, id="ours"),
        pytest.param(
            lambda engine: {"url": engine.url.replace("127.0.0.1", "localhost"), "role": "decode"},
            id="host-name",
        ),
    ],
)
async def test_added_instance_gets_requests(
    engine_factory: Any, balancer_factory: Any, write: Callable[[Any], Any], post: Post
) -> None:
    """Once a probe has found it well."""
    async with engine_factory() as engine, balancer_factory(ADMIN) as balancer:
        answer = await post(balancer, "/instances/add", write(engine))
        await balancer.available()
        served = await balancer.http.post("/v1/completions", json=IDS)
        status = (await balancer.http.get("/status")).json()

    assert answer.status_code == 200
    shown = answer.json()["instance"]
    assert (shown["role"], shown["origin"]) == ("decode", "added")
    assert served.status_code == 200
    assert served.headers["x-kvlb-instance"] == shown["alias"]
    assert (status["prefill_node_count"], status["decode_node_count"]) == (0, 1)
    assert status["decode_nodes"] == [shown["url"].removeprefix("http://")]
    assert status["prefill_nodes"] == []


async def test_instance_at_an_ipv6_address_can_be_added(
    balancer_factory: Any, engine_factory: Any, post: Post
) -> None:
    """In brackets, with or without a scheme: refused here only because nobody is there."""
    async with balancer_factory(ADMIN) as balancer:
        answer = await post(balancer, "/instances/add", {"type": "prefill", "instance": "[::1]:9"})

    assert answer.status_code == 422
    assert "http://[::1]:9" in answer.json()["error"]["message"]


async def test_example_response_names_what_was_added(
    engine: Any, balancer_factory: Any, post: Post
) -> None:
    """Scripts written for the example look for `message`."""
    async with balancer_factory(ADMIN) as balancer:
        body = {"type": "prefill", "instance": host_and_port(engine)}
        answer = await post(balancer, "/instances/add", body)

    assert answer.json()["message"] == f"Added {engine.url} to the prefill instances."


BAD = [
    pytest.param(b"{", 400, id="no-json"),
    pytest.param(b"[]", 400, id="no-object"),
    pytest.param(b"{}", 400, id="nothing-named"),
    pytest.param(b'{"type": "decode"}', 400, id="no-instance"),
    pytest.param(b'{"instance": 7}', 400, id="address-of-wrong-type"),
    pytest.param(b'{"instance": null}', 400, id="address-null"),
    pytest.param(b'{"instance": ""}', 400, id="address-empty"),
    pytest.param(b'{"instance": "h"}', 400, id="no-port"),
    pytest.param(b'{"instance": "h:x"}', 400, id="port-of-letters"),
    pytest.param(b'{"instance": "h:70000"}', 400, id="port-too-large"),
    pytest.param(b'{"instance": "h:0"}', 400, id="port-zero"),
    pytest.param(b'{"instance": "a:b:c"}', 400, id="colons"),
    pytest.param(b'{"instance": "u:p@h:1"}', 400, id="credentials"),
    pytest.param(b'{"instance": "h:1/path"}', 400, id="path"),
    pytest.param(b'{"url": "ftp://h:1"}', 400, id="scheme"),
    pytest.param(b'{"url": "http://h:1", "instance": "h:1"}', 400, id="said-twice"),
    pytest.param(b'{"url": "http://h:1", "role": "boss"}', 400, id="role"),
    pytest.param(b'{"url": "http://h:1", "type": 3}', 400, id="type-of-wrong-type"),
    pytest.param(b'{"url": "http://h:1", "ranks": 0}', 400, id="ranks"),
    pytest.param(b'{"url": "http://h:1", "ranks": "two"}', 400, id="ranks-of-wrong-type"),
    pytest.param(b'{"url": "http://h:1", "alias": "a b"}', 400, id="alias"),
    pytest.param(b'{"url": "http://h:1", "connector": "nope"}', 400, id="connector"),
    pytest.param(b'{"url": "http://h:1", "nope": 1}', 400, id="unknown-key"),
    pytest.param(b'{"url": "http://h:1", "api_key": "a\\nb"}', 400, id="key-no-header"),
    pytest.param(b'{"url": "http://h:1", "api_key_env": "HOME"}', 400, id="variable"),
    pytest.param(b'{"url": "http://\\ud800:1"}', 400, id="lone-surrogate"),
    pytest.param(b'{"url": "http://xn--a.' + b"a" * 300 + b':1"}', 422, id="name-nobody-has"),
    pytest.param(b"[" * 100_000, 413, id="too-long"),
    pytest.param(b"[" * 60_000, 400, id="too-deep"),
    pytest.param(b"\xff\xfe", 400, id="no-utf-8"),
]


@pytest.mark.parametrize(("body", "status"), BAD)
async def test_bad_addition_is_refused(
    balancer_factory: Any, engine: Any, body: bytes, status: int
) -> None:
    """In OpenAI's form, never by a 500, and nothing has changed."""
    config = {"instances": [{"url": engine.url}], **ADMIN}
    async with balancer_factory(config) as balancer:
        answer = await balancer.http.post("/instances/add", content=body, headers=KEY)
        listed = (await balancer.http.get("/instances")).json()["instances"]

    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]
    assert len(listed) == 1


@pytest.mark.parametrize(
    ("body", "status"),
    [
        pytest.param(b"{", 400, id="no-json"),
        pytest.param(b"{}", 400, id="nobody-named"),
        pytest.param(b'{"url": "http://h:1", "alias": "m0"}', 400, id="named-twice"),
        pytest.param(b'{"url": ["h"]}', 400, id="address-of-wrong-type"),
        pytest.param(b'{"alias": 3}', 400, id="alias-of-wrong-type"),
        pytest.param(b'{"alias": "m0", "force": "yes"}', 400, id="force-of-wrong-type"),
        pytest.param(b'{"alias": "m0", "nope": 1}', 400, id="unknown-key"),
        pytest.param(b'{"alias": "m9"}', 404, id="unknown-alias"),
        pytest.param(b'{"instance": "h:1"}', 404, id="unknown-address"),
        pytest.param(b'{"alias": "m0", "type": "prefill"}', 404, id="another-role"),
    ],
)
async def test_bad_name_is_refused(
    engine: Any, balancer_factory: Any, body: bytes, status: int
) -> None:
    """Nobody else is hit."""
    config = {"instances": [{"url": engine.url}], **ADMIN}
    async with balancer_factory(config) as balancer:
        answers = [
            await balancer.http.post(f"/instances/{what}", content=body, headers=KEY)
            for what in ("remove", "drain", "undrain")
        ]
        (shown,) = (await balancer.http.get("/instances")).json()["instances"]

    assert [each.status_code for each in answers] == [status] * 3
    assert shown["hold"] is None


async def test_instance_of_the_fleet_is_not_added_twice(
    engine: Any, balancer_factory: Any, post: Post
) -> None:
    """By none of the names of this machine, and under no alias that is taken."""
    config = {"instances": [{"url": engine.url}], **ADMIN}
    async with balancer_factory(config) as balancer:
        same = await post(balancer, "/instances/add", {"url": engine.url})
        other_name = engine.url.replace("127.0.0.1", "localhost")
        named = await post(balancer, "/instances/add", {"url": other_name})
        alias = await post(balancer, "/instances/add", {"url": "http://h:1", "alias": "m0"})

    assert [each.status_code for each in (same, named, alias)] == [409, 409, 409]


async def test_instance_that_cannot_be_asked_is_refused(
    engine_factory: Any, balancer_factory: Any, post: Post
) -> None:
    """With what is wrong as the code."""
    async with (
        engine_factory(api_key="secret") as locked,
        engine_factory(answers={"/v1/models": (200, b"nope")}) as odd,
        engine_factory() as down,
        balancer_factory(ADMIN) as balancer,
    ):
        down.server.should_exit = True
        await asyncio.sleep(0)
        answers = {
            "unauthorized": await post(balancer, "/instances/add", {"url": locked.url}),
            "bad_model_list": await post(balancer, "/instances/add", {"url": odd.url}),
            "engine_unreachable": await post(balancer, "/instances/add", {"url": "http://[::1]:9"}),
            "name_unknown": await post(balancer, "/instances/add", {"url": "http://no.invalid:9"}),
        }
        with_key = await post(balancer, "/instances/add", {"url": locked.url, "api_key": "secret"})
        await balancer.available()
        served = await balancer.http.post("/v1/completions", json=IDS)

    assert {code: each.status_code for code, each in answers.items()} == dict.fromkeys(answers, 422)
    assert [each.json()["error"]["code"] for each in answers.values()] == list(answers)
    assert with_key.status_code == 200
    assert "secret" not in with_key.text
    assert served.status_code == 200


async def test_another_model_has_to_be_named(
    engine: Any, engine_factory: Any, balancer_factory: Any, post: Post
) -> None:
    """An address that was given away to somebody else must not slip in."""
    config = {"instances": [{"url": engine.url}], **ADMIN}
    async with (
        engine_factory(model="large") as other,
        balancer_factory(config) as balancer,
    ):
        await balancer.available()
        answer = await post(balancer, "/instances/add", {"url": other.url})

    assert answer.status_code == 422
    assert answer.json()["error"]["code"] == "wrong_model"


async def test_clients_are_never_told_addresses(
    engine_factory: Any, balancer_factory: Any, post: Post
) -> None:
    """An instance that was added without an alias gets a made one."""
    async with engine_factory() as engine, balancer_factory(ADMIN) as balancer:
        await post(balancer, "/instances/add", {"url": engine.url})
        await balancer.available()
        served = await balancer.http.post("/v1/completions", json=IDS)
        ready = await balancer.http.get("/ready")

    port = engine.url.rpartition(":")[2]
    assert port not in str(dict(served.headers)).replace(str(served.headers.get("date")), "")
    assert port not in ready.text
