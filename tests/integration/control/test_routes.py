"""What the balancer itself answers, over a real server."""

import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from indexer.core.types import RankId

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
IDS = {"model": "tiny", "prompt": [1, 2, 3]}


async def test_models_are_merged_over_available_instances(
    engine_factory: Any, balancer_factory: Any
) -> None:
    """Down first instance ignored, adapters joined, fields kept, and one model by name."""
    async with (
        engine_factory(adapters=("one",)) as first,
        engine_factory(adapters=("two", "org/three")) as second,
        engine_factory(health_status=500) as down,
    ):
        urls = [{"url": each.url} for each in (down, first, second)]
        async with balancer_factory({"instances": urls}) as balancer:
            await balancer.available(2)
            listed = (await balancer.http.get("/v1/models")).json()
            one = (await balancer.http.get("/v1/models/org/three")).json()
            unknown = await balancer.http.get("/v1/models/nope")

    assert listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == ["tiny", "one", "two", "org/three"]
    assert listed["data"][0]["max_model_len"] == 2048
    assert one["parent"] == "tiny"
    assert unknown.status_code == 404
    assert unknown.json()["error"]["code"] == "model_not_found"


async def test_health_is_about_the_process(balancer_factory: Any) -> None:
    """It answers 200 without any engine; ready does not."""
    async with balancer_factory({}) as balancer:
        health = await balancer.http.get("/health")
        ready = await balancer.http.get("/ready")

    assert health.status_code == 200
    assert ready.status_code == 503
    assert ready.json() == {"ready": False, "reasons": ["no instance is configured"]}


async def test_healthcheck_of_the_toy_proxy_counts_instances(
    engine: Any, balancer_factory: Any
) -> None:
    """Scripts that waited for that proxy can wait for this one."""
    fleet = [{"url": engine.url, "role": "decode"}, {"url": "http://a:1", "role": "prefill"}]
    async with balancer_factory({"instances": fleet}) as balancer:
        answer = await balancer.http.get("/healthcheck")

    assert answer.json() == {"status": "ok", "prefill_instances": 1, "decode_instances": 1}


async def test_ready_says_what_keeps_instances_out(engine: Any, balancer_factory: Any) -> None:
    """By alias, never by address."""
    engine.health_status = 500
    async with balancer_factory({"instances": [{"url": engine.url}]}) as balancer:
        await balancer.app.keeper.first_round()
        down = await balancer.http.get("/ready")
        engine.health_status = 200
        await balancer.available()
        up = await balancer.http.get("/ready")

    assert down.json()["reasons"] == ["m0: http_500"]
    assert (up.status_code, up.json()) == (200, {"ready": True, "reasons": []})


async def test_status_shows_instances_load_and_index(engine: Any, balancer_factory: Any) -> None:
    """Everything an operator asks first, and no secret."""
    config = {
        "instances": [{"url": engine.url, "alias": "one", "api_key": "s3cret"}],
        "admin": {"api_key": "t0psecret"},
    }
    facts = {RankId(engine.id, 0): {"trust": "exact", "epoch": 3, "held_blocks": 17}}
    async with balancer_factory(config, lambda: facts) as balancer:
        await balancer.available()
        answer = await balancer.http.get("/status")

    status = answer.json()
    (shown,) = status["instances"]
    assert status["ready"] is True
    assert (shown["alias"], shown["url"], shown["available"]) == ("one", engine.url, True)
    assert shown["ranks"][0]["index"] == {"trust": "exact", "epoch": 3, "held_blocks": 17}
    assert shown["ranks"][0]["load"]["requests"] == 0
    assert status["config"]["routing"]["policy"] == "kvlb"
    assert "s3cret" not in answer.text
    assert "t0psecret" not in answer.text


async def test_explain_shows_the_plan_and_why(balancer: Any, engine: Any) -> None:
    """Nothing is sent to an engine, booked or counted."""
    answer = await balancer.http.post("/explain?path=/v1/completions", json=IDS)

    plan = answer.json()
    assert answer.status_code == 200
    assert plan["reason"] == "aggregated"
    assert plan["prompt"] == {"tokens": 3, "source": "ids", "unscorable": None}
    assert plan["decode"]["why"] == "m0 is the only candidate"
    assert plan["decode"]["considered"][0]["instance"] == "m0"
    assert engine.calls("/v1/completions") == 0
    assert (await balancer.http.get("/explain/recent")).json() == {"decisions": []}
    assert "kvlb_requests_total{" not in (await balancer.http.get("/metrics")).text


async def test_explain_takes_path_and_body(balancer: Any) -> None:
    """The forms ask the same; without a path the body tells which it is."""
    wrapped = {"path": "/v1/completions", "body": IDS}

    by_query = await balancer.http.post("/explain?path=/v1/completions", json=IDS)
    by_body = await balancer.http.post("/explain", json=wrapped)
    bare = await balancer.http.post("/explain", json=IDS)
    bare_body = await balancer.http.post("/explain", json={"body": IDS})
    chat = await balancer.http.post("/explain", json=CHAT)

    assert by_query.json()["prompt"] == by_body.json()["prompt"]
    assert bare.json()["prompt"] == bare_body.json()["prompt"] == by_body.json()["prompt"]
    assert chat.json()["prompt"]["source"] == "engine"


@pytest.mark.parametrize(
    ("content", "status", "code"),
    [
        pytest.param(b"{", 400, None, id="no-json"),
        pytest.param(b"[]", 400, None, id="no-object"),
        pytest.param(b'{"model": 42}', 400, None, id="model-of-wrong-type"),
        pytest.param(
            b'{"path": "/v1/nope", "body": {}}', 400, None, id="path-that-is-not-explained"
        ),
        pytest.param(b'{"path": 3, "body": {}}', 400, None, id="path-of-wrong-type"),
        pytest.param(
            b'{"model": "nope", "messages": []}', 404, "model_not_found", id="unknown-model"
        ),
    ],
)
async def test_explain_refuses_in_openai_form(
    balancer: Any, content: bytes, status: int, code: str | None
) -> None:
    """As the data plane would."""
    answer = await balancer.http.post("/explain", content=content)

    assert answer.status_code == status
    assert answer.json()["error"]["code"] == code


async def test_explain_without_an_instance_is_503(engine: Any, balancer_factory: Any) -> None:
    """Like the request it asks about."""
    engine.health_status = 500
    async with balancer_factory({"instances": [{"url": engine.url}]}) as balancer:
        answer = await balancer.http.post("/explain", json=CHAT)

    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "no_instance"


async def test_recent_decisions_show_what_was_delivered(balancer: Any) -> None:
    """Newest first; a limit that is none is refused."""
    sent = await balancer.http.post("/v1/completions", json=IDS)
    await balancer.http.post("/v1/completions", json={"model": "nope", "prompt": [1]})

    recent = (await balancer.http.get("/explain/recent?limit=5")).json()["decisions"]
    refused = await balancer.http.get("/explain/recent?limit=none")

    assert sent.status_code == 200
    assert [each["status"] for each in recent] == [404, 200]
    assert recent[1]["cached_tokens"] == 1
    assert recent[1]["legs"][0]["instance"] == "m0"
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "limit"


async def test_unknown_paths_and_methods_are_refused_in_openai_form(balancer: Any) -> None:
    """As every other error."""
    missing = await balancer.http.get("/nope")
    method = await balancer.http.delete("/status")

    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "path_not_found")
    assert method.status_code == 405
    assert method.headers["allow"] == "GET"
    assert method.json()["error"]["type"] == "MethodNotAllowedError"


async def test_metrics_are_served(balancer: Any) -> None:
    """In Prometheus' text form."""
    await balancer.http.post("/v1/completions", json=IDS)

    answer = await balancer.http.get("/metrics")

    assert answer.headers["content-type"].startswith("text/plain")
    assert 'kvlb_requests_total{model="tiny",outcome="ok"' in answer.text
    assert 'kvlb_instance_healthy{instance="m0",role="mixed"} 1.0' in answer.text


async def test_documentation_describes_the_routes(balancer: Any) -> None:
    """OpenAPI and its page."""
    schema = (await balancer.http.get("/openapi.json")).json()

    assert {"/v1/models", "/health", "/ready", "/metrics", "/status", "/explain"} <= set(
        schema["paths"]
    )
    assert all(
        route.get("description")
        for methods in schema["paths"].values()
        for method, route in methods.items()
        if method != "parameters"
    )
    assert set(schema["paths"]["/v1/chat/completions"]["post"]["responses"]) >= {
        "200",
        "400",
        "503",
    }
    assert (await balancer.http.get("/docs")).status_code == 200


@pytest.mark.parametrize("path", ["/status", "/explain/recent"])
async def test_operators_elsewhere_need_the_key(
    path: str, engine: Any, balancer_factory: Any
) -> None:
    """A proxy on this machine makes its clients no locals."""
    config = {"instances": [{"url": engine.url}], "admin": {"api_key": "k"}}
    elsewhere = {"x-forwarded-for": "203.0.113.7"}
    async with balancer_factory(config) as balancer:
        get = balancer.http.get
        local = await get(path)
        none = await get(path, headers=elsewhere)
        wrong = await get(path, headers={**elsewhere, "x-api-key": "nope"})
        wrong_local = await get(path, headers={"x-api-key": "nope"})
        right = await get(path, headers={**elsewhere, "x-api-key": "k"})

    codes = [each.status_code for each in (local, none, wrong, wrong_local, right)]
    assert codes == [200, 401, 401, 401, 200]
    assert none.json()["error"]["code"] == "invalid_api_key"


async def test_without_a_key_nobody_elsewhere_may_look(balancer: Any) -> None:
    """Closed is the default; the public routes stay open."""
    elsewhere = {"x-forwarded-for": "203.0.113.7"}

    status = await balancer.http.get("/status", headers=elsewhere)
    explain = await balancer.http.post("/explain", json=CHAT, headers=elsewhere)
    models = await balancer.http.get("/v1/models", headers=elsewhere)

    assert [status.status_code, explain.status_code, models.status_code] == [403, 403, 200]
    assert "admin.api_key" in status.json()["error"]["message"]


@pytest.mark.parametrize(
    ("client", "expected"),
    [
        pytest.param(("127.0.0.1", 1), 200, id="ipv4-loopback"),
        pytest.param(("::1", 1), 200, id="ipv6-loopback"),
        pytest.param(("::ffff:127.0.0.1", 1), 200, id="mapped-loopback"),
        pytest.param(("10.0.0.1", 1), 403, id="elsewhere"),
        pytest.param(("socket", 1), 403, id="no-address"),
        pytest.param(None, 403, id="no-client"),
    ],
)
async def test_only_loopback_is_local(client: Any, expected: int, balancer: Any) -> None:
    """The address of the connection decides."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b""}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "GET",
        "path": "/status",
        "raw_path": b"/status",
        "query_string": b"",
        "headers": [],
        "client": client,
        "server": ("127.0.0.1", 80),
        "scheme": "http",
        "http_version": "1.1",
        "root_path": "",
    }
    await balancer.app(scope, receive, send)

    assert sent[0]["status"] == expected


@pytest.mark.parametrize("path", ["/status", "/explain/recent"])
async def test_page_of_another_name_may_not_look(path: str, balancer: Any) -> None:
    """Its name was made to mean 127.0.0.1, its browser runs on this machine (DNS rebinding)."""
    rebound = await balancer.http.get(path, headers={"host": "rebound.example:8080"})
    own = await balancer.http.get(path, headers={"host": "LOCALHOST:8080"})

    assert (rebound.status_code, own.status_code) == (403, 200)
    assert "admin.local_hosts" in rebound.json()["error"]["message"]


async def test_operator_can_name_this_machine(engine: Any, balancer_factory: Any) -> None:
    """For clients on it; another name still needs the key."""
    config = {
        "instances": [{"url": engine.url}],
        "admin": {"api_key": "k", "local_hosts": ["gpu-box"]},
    }
    async with balancer_factory(config) as balancer:
        get = balancer.http.get
        named = await get("/status", headers={"host": "gpu-box:8080"})
        other = await get("/status", headers={"host": "other-box:8080"})
        with_key = await get("/status", headers={"host": "other-box:8080", "x-api-key": "k"})

    assert [each.status_code for each in (named, other, with_key)] == [200, 401, 200]


async def test_docs_page_needs_no_network(balancer_factory: Any) -> None:
    """Fleets often have no way out: every script and style of the page is our own."""
    async with balancer_factory({}) as balancer:
        page = (await balancer.http.get("/docs")).text
        own = re.findall(r'(?:src|href)="(/[^"]+)"', page)
        answers = [await balancer.http.get(path) for path in own]

    assert "https://" not in page
    assert len(own) >= 2
    assert [answer.status_code for answer in answers] == [200] * len(own)


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models"])
async def test_head_is_answered_as_get_without_a_body(path: str, balancer: Any) -> None:
    """Some load balancers probe with it."""
    got = await balancer.http.get(path)
    head = await balancer.http.head(path)

    assert (got.status_code, head.status_code) == (200, 200)
    assert head.content == b""
    assert head.headers["content-length"] == got.headers["content-length"]


async def test_explain_refuses_what_the_data_plane_would(
    engine: Any, balancer_factory: Any
) -> None:
    """A body over the limit, announced or not."""

    async def pieces() -> AsyncIterator[bytes]:
        yield b" " * 80
        yield b" " * 80

    config = {"instances": [{"url": engine.url}], "dataplane": {"max_body_bytes": 100}}
    async with balancer_factory(config) as balancer:
        await balancer.available()
        whole = await balancer.http.post("/explain", content=b" " * 101)
        chunked = await balancer.http.post("/explain", content=pieces())

    assert (whole.status_code, chunked.status_code) == (413, 413)
    assert whole.json()["error"]["code"] == "body_too_large"


async def test_explain_tells_that_a_prompt_is_too_long(balancer: Any) -> None:
    """The stub's card says 2,048: its engine would refuse more."""
    long = {"model": "tiny", "prompt": list(range(2049))}

    answer = await balancer.http.post("/explain?path=/v1/completions", json=long)

    assert answer.json()["prompt"]["unscorable"] == "too_long"
