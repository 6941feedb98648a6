"""Instances that are drained or removed over a real server, and what becomes of requests."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

Post = Callable[..., Awaitable[Any]]
UntilGone = Callable[[Any, str], Awaitable[None]]
Busy = Callable[[], AbstractAsyncContextManager[tuple[Any, "asyncio.Task[Any]"]]]

IDS = {"model": "tiny", "prompt": [1, 2, 3]}
KEY = {"x-api-key": "k"}
ADMIN = {"admin": {"api_key": "k"}}


@pytest.fixture
def busy(engine: Any, balancer_factory: Any) -> Busy:
    """Run a balancer before the engine, which has a request and holds its answer back."""

    @asynccontextmanager
    async def run() -> AsyncIterator[tuple[Any, "asyncio.Task[Any]"]]:
        engine.hold = asyncio.Event()
        config = {"instances": [{"url": engine.url}], **ADMIN}
        async with balancer_factory(config) as balancer, asyncio.TaskGroup() as group:
            await balancer.available()
            running = group.create_task(balancer.http.post("/v1/completions", json=IDS))
            await engine.wait_for_calls("/v1/completions", 1)
            yield balancer, running

    return run


async def test_drained_instance_gets_nothing_new(engine: Any, busy: Busy, post: Post) -> None:
    """What runs ends well; undrained it is back, and a reload doesn't change any of that."""
    async with busy() as (balancer, running):
        drained = await post(balancer, "/instances/drain", {"alias": "m0"})
        refused = await balancer.http.post("/v1/completions", json=IDS)
        ready = await balancer.http.get("/ready")
        engine.hold.set()
        await running
        await post(balancer, "/instances/undrain", {"url": engine.url})
        served = await balancer.http.post("/v1/completions", json=IDS)

    assert running.result().status_code == 200
    assert (drained.status_code, drained.json()["instance"]["in_flight"]) == (200, 1)
    assert drained.json()["instance"]["hold"] == "drained"
    assert refused.status_code == 503
    assert ready.json()["reasons"] == ["m0: drained"]
    assert served.status_code == 200


async def test_removed_instance_finishes_first(
    engine: Any, busy: Busy, post: Post, until_gone: UntilGone
) -> None:
    """202 while something runs on it; then it is out of every list."""
    async with busy() as (balancer, running):
        removed = await post(balancer, "/instances/remove", {"url": engine.url})
        refused = await balancer.http.post("/v1/completions", json=IDS)
        during = (await balancer.http.get("/instances")).json()
        engine.hold.set()
        await running
        await until_gone(balancer, engine.url)
        after = (await balancer.http.get("/instances")).json()

    assert running.result().status_code == 200
    assert (removed.status_code, removed.json()["instance"]["in_flight"]) == (202, 1)
    assert refused.status_code == 503
    assert during == {"instances": [], "leaving": [{"alias": "m0", "url": engine.url}]}
    assert after == {"instances": [], "leaving": []}


async def test_forced_removal_waits_for_nobody(engine: Any, busy: Busy, post: Post) -> None:
    """It is out at once; an answer that runs isn't cut by us."""
    async with busy() as (balancer, running):
        removed = await post(balancer, "/instances/remove", {"url": engine.url, "force": True})
        left = balancer.app.keeper.snapshot().instances
        engine.hold.set()
        await running

    assert (removed.status_code, removed.json()["instance"]["in_flight"]) == (200, 1)
    assert left == ()
    assert running.result().status_code == 200


async def test_instance_comes_and_goes(
    engine_factory: Any, balancer_factory: Any, post: Post
) -> None:
    """EPD's proxy has the same under POST and DELETE."""
    async with engine_factory() as engine, balancer_factory(ADMIN) as balancer:
        body = {"url": engine.url, "role": "prefill_decode"}
        added = await post(balancer, "/instances", body)
        await balancer.available()
        removed = await balancer.http.request(
            "DELETE", "/instances", json={"url": engine.url}, headers=KEY
        )
        again = await post(balancer, "/instances", body)
        await balancer.available()

    assert [each.status_code for each in (added, removed, again)] == [200, 200, 200]
    assert added.json()["instance"]["role"] == "mixed"


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        pytest.param({}, ("p0", "prefill", "file"), id="as-it-was"),
        pytest.param({"type": "prefill"}, ("p0", "prefill", "file"), id="the-same-said"),
        pytest.param(
            {"type": "decode", "alias": "other"}, ("other", "decode", "added"), id="otherwise"
        ),
    ],
)
async def test_removed_instance_of_the_file_comes_back_as_asked(
    engine: Any,
    balancer_factory: Any,
    asked: dict[str, str],
    shown: tuple[str, ...],
    post: Post,
    until_gone: UntilGone,
) -> None:
    """Under any name of this machine; what isn't asked for is as the file has it."""
    config = {
        "instances": [{"url": engine.url, "role": "prefill", "connector": "example"}],
        **ADMIN,
    }
    async with balancer_factory(config) as balancer:
        await balancer.available()
        address = engine.url.replace("127.0.0.1", "localhost")
        await post(balancer, "/instances/remove", {"alias": "p0"})
        await until_gone(balancer, engine.url)
        added = await post(balancer, "/instances/add", {"url": address, **asked})
        twice = await post(balancer, "/instances/add", {"url": engine.url, **asked})
        await balancer.available()
        (listed,) = (await balancer.http.get("/instances")).json()["instances"]

    assert (added.status_code, twice.status_code) == (200, 409)
    assert added.json()["instance"]["alias"] == listed["alias"]
    assert (listed["alias"], listed["role"], listed["origin"]) == shown
    assert (listed["url"], listed["connector"]) == (engine.url, "example")


async def test_instance_that_came_back_otherwise_can_be_removed_again(
    engine: Any, balancer_factory: Any, post: Post, until_gone: UntilGone
) -> None:
    """And is then out: neither the file's entry nor the added one is left."""
    config = {"instances": [{"url": engine.url}], **ADMIN}
    async with balancer_factory(config) as balancer:
        await balancer.available()
        await post(balancer, "/instances/remove", {"url": engine.url})
        await post(balancer, "/instances/add", {"url": engine.url, "type": "decode"})
        removed = await post(balancer, "/instances/remove", {"url": engine.url})
        await until_gone(balancer, engine.url)
        left = (await balancer.http.get("/instances")).json()["instances"]

    assert removed.status_code == 200
    assert left == []
