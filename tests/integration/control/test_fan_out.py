"""Commands to engines, over a real server: who is told, what is said of it, what follows."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from balancer.fleet.control import FleetLinks
from indexer.core.types import InstanceId

IDS = {"model": "tiny", "prompt": [1, 2, 3]}
KEY = {"x-api-key": "k"}


def config(*engines: Any, **more: Any) -> dict[str, Any]:
    return {"instances": [{"url": each.url} for each in engines], "admin": {"api_key": "k"}, **more}


@asynccontextmanager
async def pair(engine_factory: Any, balancer_factory: Any) -> AsyncIterator[tuple[Any, Any, Any]]:
    """Two engines that know every command, and a balancer."""
    answers = {
        "/start_profile": (200, b""),
        "/sleep": (200, b""),
        "/wake_up": (200, b""),
        "/reset_prefix_cache": (200, b""),
        "/v1/load_lora_adapter": (200, b"Success: LoRA adapter 'sql' added successfully."),
    }
    async with (
        engine_factory(answers=dict(answers)) as first,
        engine_factory(answers=dict(answers)) as second,
        balancer_factory(config(first, second)) as balancer,
    ):
        await balancer.available(2)
        yield first, second, balancer


async def tell(balancer: Any, target: str, **more: Any) -> Any:
    return await balancer.http.post(target, headers=KEY, **more)


async def test_everybody_is_told(engine_factory: Any, balancer_factory: Any) -> None:
    """An engine's empty answer is an answer."""
    async with pair(engine_factory, balancer_factory) as (first, second, balancer):
        answer = await tell(balancer, "/start_profile")

    assert answer.status_code == 200
    assert answer.json()["results"] == [
        {"instance": "m0", "ok": True, "status": 200, "body": ""},
        {"instance": "m1", "ok": True, "status": 200, "body": ""},
    ]
    assert [each.calls("/start_profile") for each in (first, second)] == [1, 1]


async def test_named_instances_are_told(engine_factory: Any, balancer_factory: Any) -> None:
    """Once each; nobody else, and nobody at all if one name is unknown."""
    async with pair(engine_factory, balancer_factory) as (first, second, balancer):
        one = await tell(balancer, "/start_profile?instance=m1&instance=m1")
        unknown = await tell(balancer, "/start_profile?instance=m0&instance=m7")

    assert [each["instance"] for each in one.json()["results"]] == ["m1"]
    assert unknown.status_code == 404
    assert unknown.json()["error"]["param"] == "instance"
    assert [each.calls("/start_profile") for each in (first, second)] == [0, 1]


async def test_query_and_body_reach_the_engines(engine_factory: Any, balancer_factory: Any) -> None:
    """Without what was meant for us."""
    async with pair(engine_factory, balancer_factory) as (first, _, balancer):
        body = {"lora_name": "sql", "lora_path": "/a"}
        await tell(balancer, "/v1/load_lora_adapter?instance=m0&x=1&y=%20a", json=body)
        received = [each for path, each, _ in first.received if path == "/v1/load_lora_adapter"]

    assert received == [body]
    assert "/v1/load_lora_adapter?x=1&y=%20a" in first.targets


async def test_each_engines_failure_is_its_own(engine_factory: Any, balancer_factory: Any) -> None:
    """207 if some did it, 502 if none did; a profiler that isn't there is a 404."""
    async with pair(engine_factory, balancer_factory) as (first, second, balancer):
        second.answers["/start_profile"] = (404, b'{"detail":"Not Found"}')
        some = await tell(balancer, "/start_profile")
        first.answers["/start_profile"] = (500, b"x" * 2000)
        none = await tell(balancer, "/start_profile")

    assert some.status_code == 207
    assert [each["ok"] for each in some.json()["results"]] == [True, False]
    assert none.status_code == 502
    assert len(none.json()["results"][0]["body"]) == 501


async def test_sleeping_instance_gets_no_requests(
    engine_factory: Any, balancer_factory: Any
) -> None:
    """Until it was woken up; one that refuses to sleep goes on."""
    async with pair(engine_factory, balancer_factory) as (first, second, balancer):
        second.answers["/sleep"] = (500, b"")
        slept = await tell(balancer, "/sleep?level=1")
        listed = (await balancer.http.get("/instances")).json()["instances"]
        for _ in range(4):
            await balancer.http.post("/v1/completions", json=IDS)
        asleep_got, awake_got = (each.calls("/v1/completions") for each in (first, second))
        woken = await tell(balancer, "/wake_up?instance=m0")
        after = (await balancer.http.get("/instances")).json()["instances"]

    assert slept.status_code == 207
    assert [each["hold"] for each in listed] == ["asleep", None]
    assert (asleep_got, awake_got) == (0, 4)
    assert woken.status_code == 200
    assert [each["hold"] for each in after] == [None, None]


async def test_sleeper_that_was_restarted_is_awake(engine: Any, balancer_factory: Any) -> None:
    """Nobody has to wake up what doesn't sleep any more."""
    engine.answers["/sleep"] = (200, b"")
    async with balancer_factory(config(engine)) as balancer:
        await balancer.available()
        await tell(balancer, "/sleep")
        refused = await balancer.http.post("/v1/completions", json=IDS)
        engine.health_status = 500
        async with asyncio.timeout(20):
            await balancer.app.keeper.wait_for(lambda fleet: not fleet.instances[0].healthy)
        engine.health_status = 200
        await balancer.available()
        served = await balancer.http.post("/v1/completions", json=IDS)

    assert (refused.status_code, served.status_code) == (503, 200)


async def test_loaded_adapter_can_be_asked_for_soon(
    engine_factory: Any, balancer_factory: Any
) -> None:
    """Models are read again at once, however rarely they are otherwise."""
    async with engine_factory(answers={"/v1/load_lora_adapter": (200, b"")}) as engine:
        slow = config(engine, probes={"interval_s": 3600})
        async with balancer_factory(slow) as balancer:
            await balancer.available()
            engine.adapters = ("sql",)
            await tell(balancer, "/v1/load_lora_adapter", json={"lora_name": "sql"})
            async with asyncio.timeout(20):
                await balancer.app.keeper.wait_for(
                    lambda fleet: "sql" in (fleet.instances[0].models or _NO_MODELS).adapters
                )
            served = await balancer.http.post("/v1/completions", json={**IDS, "model": "sql"})

    assert served.status_code == 200


class _NoModels:
    adapters: frozenset[str] = frozenset()


_NO_MODELS: Any = _NoModels()


@pytest.mark.parametrize("path", ["/sleep", "/reset_prefix_cache"])
async def test_dropped_cache_is_told(engine_factory: Any, balancer_factory: Any, path: str) -> None:
    """Of those engines that did it, so that their credit ends at once."""
    told: list[InstanceId] = []

    async def note(instances: Sequence[InstanceId]) -> None:
        told.extend(instances)

    ok, bad = {path: (200, b"")}, {path: (500, b"")}
    async with engine_factory(answers=ok) as first, engine_factory(answers=bad) as second:
        links = FleetLinks(on_cache_dropped=note)
        async with balancer_factory(config(first, second), links=links) as balancer:
            answer = await tell(balancer, path)

    assert answer.status_code == 207
    assert told == [first.id]


@pytest.mark.parametrize(
    ("target", "content", "status"),
    [
        pytest.param("/sleep?instance=", b"", 404, id="empty-name"),
        pytest.param("/sleep", b"x" * 70_000, 413, id="body-too-large"),
        pytest.param("/sleep?instance=%ff", b"", 404, id="name-no-utf-8"),
    ],
)
async def test_bad_command_is_refused(
    engine: Any, balancer_factory: Any, target: str, content: bytes, status: int
) -> None:
    """Before an engine hears of it."""
    async with balancer_factory(config(engine)) as balancer:
        answer = await tell(balancer, target, content=content)

    assert answer.status_code == status
    assert engine.calls("/sleep") == 0
