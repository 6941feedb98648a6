"""The fleet changes while kvlb runs: its balancer and its indexer follow, in one process or in two."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import yaml

from indexer.redis_index.settings import RedisSettings
from kvlb.running import ConfigFile, run_balancer, run_indexer, run_kvlb
from kvlb.settings import Overrides, load_fleet
from kvlb.simulated import parse_fleet, simulated_fleet
from simulator.core.settings import EngineSettings

PROMPT = {"model": "sim", "prompt": list(range(3, 131)), "max_tokens": 2}
KEY = {"x-api-key": "k"}


async def until(is_so: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(20):
        while True:
            if await is_so():
                return
            await asyncio.sleep(0.02)


@pytest.fixture
async def engines() -> AsyncIterator[list[str]]:
    """Addresses of two simulated engines."""
    async with simulated_fleet(parse_fleet("2"), EngineSettings(inter_token_ms=1.0)) as fleet:
        yield [engine.url for engine in fleet.engines]


def write(file: Path, urls: list[str], redis: RedisSettings | None = None, **more: Any) -> Path:
    settings = {
        "port": 0,
        "indexer": {"status_port": 0},
        "admin": {"api_key": "k"},
        "routing": {"lookup_timeout_s": 5.0},
        "probes": {"interval_s": 0.1},
        "instances": [{"url": url} for url in urls],
        **({"redis": msgspec.to_builtins(redis)} if redis else {}),
        **more,
    }
    beside = file.with_suffix(".new")
    beside.write_text(yaml.safe_dump(settings))
    beside.replace(file)
    return file


@asynccontextmanager
async def running(file: Path, *runs: Any) -> AsyncIterator[list[httpx.AsyncClient]]:
    """Each of `runs` on `file`, as if each were a process; clients of what they serve."""
    settings = load_fleet(file, Overrides(), {})
    source = ConfigFile.of(file, Overrides())
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    urls: list[asyncio.Future[Any]] = [loop.create_future() for _ in runs]
    clients: list[httpx.AsyncClient] = []
    async with asyncio.TaskGroup() as group:
        for run, url in zip(runs, urls, strict=True):
            group.create_task(run(settings, stop=stop, on_listening=url.set_result, file=source))
        try:
            for url in urls:
                found = await url
                base = getattr(found, "url", found)
                clients.append(httpx.AsyncClient(base_url=base, trust_env=False, timeout=10))
            yield clients
        finally:
            stop.set()
            for client in clients:
                await client.aclose()


async def exact_ranks(client: httpx.AsyncClient) -> set[str]:
    """Instances that a separate indexer follows, by their address."""
    ranks = (await client.get("/status")).json()["ranks"]
    return {each["rank"][0] for each in ranks if each["trust"] == "exact"}


async def shown(client: httpx.AsyncClient) -> dict[str, Any]:
    """Instances that a balancer has, by their address."""
    return {each["url"]: each for each in (await client.get("/status")).json()["instances"]}


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> httpx.Response:
    return await client.post(path, json=body, headers=KEY)


async def overlaps(client: httpx.AsyncClient) -> dict[str, int]:
    """What each instance is believed to hold of the prompt, by its alias."""
    asked = {"path": "/v1/completions", "body": PROMPT}
    plan = (await client.post("/explain", json=asked)).json()
    return {each["instance"]: each["overlap_tokens"] for each in plan["decode"]["considered"]}


async def test_added_instance_is_followed_and_survives_a_reload(
    engines: list[str], tmp_path: Path
) -> None:
    """Its cache is known as that of any other; removed, it is gone from balancer and indexer."""
    first, second = engines
    file = write(tmp_path / "kvlb.yaml", [first])
    async with running(file, run_kvlb) as (kvlb,):
        added = await post(kvlb, "/instances/add", url=second, alias="new")

        async def is_exact() -> bool:
            rank = (await shown(kvlb)).get(second, {"ranks": [{}]})["ranks"][0]
            return bool(rank.get("index")) and rank["index"]["trust"] == "exact"

        await until(is_exact)
        write(file, [first], routing={"policy": "round_robin", "lookup_timeout_s": 5.0})

        async def is_reloaded() -> bool:
            config = (await kvlb.get("/status")).json()["config"]
            return bool(config["routing"]["policy"] == "round_robin")

        await until(is_reloaded)
        for _ in range(2):
            await kvlb.post("/v1/completions", json=PROMPT)

        async def both_hold() -> bool:
            return await overlaps(kvlb) == {"m0": 112, "new": 112}

        await until(both_hold)
        removed = await post(kvlb, "/instances/remove", alias="new")
        left = await overlaps(kvlb)

    assert added.status_code == 200
    assert removed.status_code == 200
    assert left == {"m0": 112}


async def test_removed_instance_of_the_file_is_back_when_it_is_named_anew(
    engines: list[str], tmp_path: Path
) -> None:
    """A reload that says the same of it leaves it out."""
    first, second = engines
    file = write(tmp_path / "kvlb.yaml", engines)
    async with running(file, run_kvlb) as (kvlb,):
        await post(kvlb, "/instances/remove", url=second)
        write(file, engines, routing={"policy": "session"})

        async def is_reloaded() -> bool:
            config = (await kvlb.get("/status")).json()["config"]
            return bool(config["routing"]["policy"] == "session")

        await until(is_reloaded)
        still_out = await shown(kvlb)
        write(file, [first])
        await until(lambda: _has_instances(kvlb, 1))
        write(file, engines)
        await until(lambda: _has_instances(kvlb, 2))

    assert set(still_out) == {first}


async def test_instance_added_otherwise_is_so_for_every_balancer_and_after_their_restart(
    engines: list[str], redis_server: Any, tmp_path: Path
) -> None:
    """The file still has it as it was: that is not what it is."""
    first, second = engines
    file = write(tmp_path / "kvlb.yaml", engines, redis_server.settings())

    def is_other(instances: dict[str, Any]) -> bool:
        found = instances.get(second, {})
        return (found.get("alias"), found.get("role")) == ("other", "decode")

    async with running(file, run_indexer, run_balancer, run_balancer) as (indexer, one, two):
        await post(one, "/instances/remove", url=second)

        async def is_out() -> bool:
            return set(await shown(two)) == {first}

        await until(is_out)
        added = await post(two, "/instances/add", url=second, role="decode", alias="other")

        async def both_know() -> bool:
            return is_other(await shown(one)) and is_other(await shown(two))

        await until(both_know)

        async def is_followed() -> bool:
            return await exact_ranks(indexer) == set(engines)

        await until(is_followed)
    async with running(file, run_balancer) as (again,):

        async def is_known() -> bool:
            return is_other(await shown(again))

        await until(is_known)

    assert added.status_code == 200


async def _has_instances(client: httpx.AsyncClient, count: int) -> bool:
    status = (await client.get("/status")).json()
    configured = len(status["config"]["instances"])
    return configured == count == len(status["instances"])


@pytest.mark.parametrize("shared", [False, True], ids=["memory", "redis"])
async def test_reset_ends_credit_at_once(redis_server: Any, tmp_path: Path, shared: bool) -> None:
    """An idle engine's own word would come with its next batch only."""
    settings = EngineSettings(inter_token_ms=1.0)
    redis = redis_server.settings() if shared else None
    async with simulated_fleet(parse_fleet("1"), settings) as fleet:
        file = write(tmp_path / "kvlb.yaml", [fleet.engines[0].url], redis)
        async with running(file, run_kvlb) as (kvlb,):
            await until(lambda: _is_ready(kvlb))
            await kvlb.post("/v1/completions", json=PROMPT)

            async def is_held() -> bool:
                return await overlaps(kvlb) == {"m0": 112}

            await until(is_held)
            answer = await kvlb.post("/reset_prefix_cache", headers=KEY)

            async def is_gone() -> bool:
                return await overlaps(kvlb) == {"m0": 0}

            await until(is_gone)
            await kvlb.post("/v1/completions", json=PROMPT)
            await until(is_held)
            rank = (await shown(kvlb))[fleet.engines[0].url]["ranks"][0]

    assert answer.status_code == 200
    assert rank["index"]["trust"] == "exact"


async def _is_ready(client: httpx.AsyncClient) -> bool:
    return (await client.get("/ready")).status_code == 200


async def test_change_told_to_one_balancer_reaches_all(
    redis_server: Any, engines: list[str], tmp_path: Path
) -> None:
    """Through Redis: the indexer follows it, another balancer routes to it, a later one knows it."""
    first, second = engines
    file = write(tmp_path / "kvlb.yaml", [first], redis_server.settings())
    async with running(file, run_indexer, run_balancer, run_balancer) as clients:
        indexer, one, other = clients
        await until(lambda: _is_ready(one))
        added = await post(one, "/instances/add", url=second, alias="new")
        with_key = await post(one, "/instances/add", url="http://h:1", api_key="x")

        async def is_everywhere() -> bool:
            return await exact_ranks(indexer) == {first, second} and second in await shown(other)

        await until(is_everywhere)
        await post(other, "/instances/drain", alias="new")

        async def is_drained() -> bool:
            return bool((await shown(one))[second]["reason"] == "drained")

        await until(is_drained)
    async with running(file, run_balancer, run_indexer) as (later, indexer):

        async def is_known() -> bool:
            return bool((await shown(later)).get(second, {}).get("reason") == "drained")

        await until(is_known)
        await post(later, "/instances/remove", alias="new")

        async def is_out() -> bool:
            return await exact_ranks(indexer) == {first}

        await until(is_out)

    assert added.status_code == 200
    assert with_key.status_code == 400
    assert with_key.json()["error"]["param"] == "api_key"


async def test_change_without_redis_is_refused(
    own_redis: Any, engines: list[str], tmp_path: Path
) -> None:
    """503, and nothing has changed; requests go on."""
    server = own_redis()
    server.start()
    file = write(tmp_path / "kvlb.yaml", engines[:1], server.settings())
    async with running(file, run_balancer) as (kvlb,):
        await until(lambda: _is_ready(kvlb))
        server.stop()
        answer = await post(kvlb, "/instances/add", url=engines[1])
        listed = await shown(kvlb)
        served = await kvlb.post("/v1/completions", json=PROMPT)

    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "changes_unavailable"
    assert set(listed) == {engines[0]}
    assert served.status_code == 200


@pytest.mark.parametrize(
    ("environ", "section", "key"),
    [
        pytest.param({"ADMIN_API_KEY": "a"}, {}, "a", id="the-example's"),
        pytest.param({"ADMIN_API_KEY": "a", "KVLB_ADMIN_API_KEY": "b"}, {}, "b", id="ours-first"),
        pytest.param({"ADMIN_API_KEY": "a"}, {"api_key": "c"}, "c", id="the-file-first"),
    ],
)
def test_admin_key_of_the_example_is_accepted(
    tmp_path: Path, environ: dict[str, str], section: dict[str, str], key: str
) -> None:
    """Where nothing else names one."""
    file = write(tmp_path / "kvlb.yaml", ["http://a:1"], admin=section)

    admin = load_fleet(file, Overrides(), environ).admin

    assert admin.api_key is not None
    assert admin.api_key.reveal() == key


def test_registration_alone_is_a_fleet(tmp_path: Path) -> None:
    """Instances come by themselves."""
    file = write(tmp_path / "kvlb.yaml", [], registration={"port": 0})

    assert load_fleet(file, Overrides(), {}).instances == ()
