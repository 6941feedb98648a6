"""`kvlb indexer` and `kvlb balancer` around a real Redis, each as it runs, in one test process."""

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import yaml

from indexer.redis_index.settings import RedisSettings
from kvlb.errors import SettingsError
from kvlb.explain import explain
from kvlb.running import ConfigFile, RunningKvlb, run_balancer, run_indexer, run_kvlb
from kvlb.settings import KvlbSettings, Overrides, load_fleet
from kvlb.simulated import parse_fleet, simulated_fleet
from simulator.core.settings import EngineSettings

PROMPT = {"model": "sim", "prompt": list(range(3, 131)), "max_tokens": 2}
ELSEWHERE = {"x-forwarded-for": "203.0.113.1"}


async def until(is_so: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(20):
        while True:
            if await is_so():
                return
            await asyncio.sleep(0.02)


@dataclass
class Running:
    """Two processes' worth of kvlb, and their file."""

    balancer: str
    indexer: str
    file: Path
    http: httpx.AsyncClient

    async def get(self, url: str, path: str, **headers: str) -> httpx.Response:
        return await self.http.get(url + path, headers=headers)

    async def index_knows(self, ranks: int) -> None:
        async def is_so() -> bool:
            status = (await self.get(self.indexer, "/status")).json()
            return len([x for x in status["ranks"] if x["trust"] == "exact"]) == ranks

        await until(is_so)

    async def is_available(self) -> bool:
        answer = await self.get(self.balancer, "/ready")
        return answer.status_code == 200 and not answer.json()["reasons"]


@pytest.fixture
async def engines() -> AsyncIterator[list[str]]:
    """Addresses of two simulated engines."""
    async with simulated_fleet(parse_fleet("2"), EngineSettings(inter_token_ms=1.0)) as fleet:
        yield [engine.url for engine in fleet.engines]


def write(file: Path, redis: RedisSettings, urls: list[str], **more: Any) -> None:
    settings = {
        "port": 0,
        "redis": msgspec.to_builtins(redis),
        "indexer": {"status_port": 0},
        "routing": {"lookup_timeout_s": 5.0},
        "instances": [{"url": url} for url in urls],
        **more,
    }
    beside = file.with_suffix(".new")
    beside.write_text(yaml.safe_dump(settings))
    beside.replace(file)


@asynccontextmanager
async def both(file: Path, environ: Mapping[str, str] | None = None) -> AsyncIterator[Running]:
    """Run an indexer and a balancer on `file`."""
    settings = load_fleet(file, Overrides(), environ or {})
    source = ConfigFile.of(file, Overrides())
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    indexer: asyncio.Future[str] = loop.create_future()
    balancer: asyncio.Future[str] = loop.create_future()
    async with (
        asyncio.TaskGroup() as group,
        httpx.AsyncClient(trust_env=False, timeout=10) as http,
    ):
        group.create_task(
            run_indexer(settings, stop=stop, on_listening=indexer.set_result, file=source)
        )
        group.create_task(
            run_balancer(settings, stop=stop, on_listening=balancer.set_result, file=source)
        )
        try:
            yield Running(await balancer, await indexer, file, http)
        finally:
            stop.set()


async def test_balancer_routes_by_what_the_indexer_wrote(
    redis_server: Any, engines: list[str], tmp_path: Path
) -> None:
    """The second request's overlap comes through Redis."""
    file = tmp_path / "kvlb.yaml"
    write(file, redis_server.settings(), engines)
    async with both(file) as kvlb:
        await kvlb.index_knows(2)
        await until(kvlb.is_available)
        first = await kvlb.http.post(f"{kvlb.balancer}/v1/completions", json=PROMPT)

        async def is_indexed() -> bool:
            asked = {"path": "/v1/completions", "body": PROMPT}
            plan = (await kvlb.http.post(f"{kvlb.balancer}/explain", json=asked)).json()
            overlaps = [each["overlap_tokens"] for each in plan["decode"]["considered"]]
            return sorted(overlaps) == [0, 112]

        await until(is_indexed)
        second = await kvlb.http.post(f"{kvlb.balancer}/v1/completions", json=PROMPT)

    assert first.headers["x-kvlb-instance"] == second.headers["x-kvlb-instance"]
    assert second.headers["x-kvlb-overlap-tokens"] == "112"


async def test_both_show_what_redis_refuses_and_what_is_known(
    own_redis: Any, engines: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It became a replica, then is gone: `/status` of each says so, until all is well again."""
    server = own_redis()
    server.start()
    file = tmp_path / "kvlb.yaml"
    write(file, server.settings(heartbeat_s=0.05), engines)
    async with both(file) as kvlb:
        await kvlb.index_knows(2)
        await until(kvlb.is_available)
        await kvlb.http.post(f"{kvlb.balancer}/v1/completions", json=PROMPT)
        shown = (await kvlb.get(kvlb.balancer, "/status")).json()

        async def problem() -> str:
            index = (await kvlb.get(kvlb.indexer, "/status")).json()["index"]
            return index["problem"] or ""

        async def is_read_only() -> bool:
            return "READONLY" in await problem()

        async def is_well() -> bool:
            return await problem() == ""

        server.command("REPLICAOF", "127.0.0.1", "1")
        await until(is_read_only)
        server.command("REPLICAOF", "NO", "ONE")
        await until(is_well)
        server.stop()
        without = await kvlb.http.post(f"{kvlb.balancer}/v1/completions", json=PROMPT)
        gone = (await kvlb.get(kvlb.balancer, "/status")).json()
        asked = json.dumps(PROMPT)
        await asyncio.to_thread(explain, asked, url=kvlb.balancer, path=None, as_json=False)

    assert re.search(r"because +lookup_(failed|timeout)", capsys.readouterr().out)
    facts = [rank["index"] for each in shown["instances"] for rank in each["ranks"]]
    assert [each["trust"] for each in facts] == ["exact", "exact"]
    assert all(each["epoch"] > 0 for each in facts)
    assert shown["index_problem"] is None
    assert "is it running" in gone["index_problem"]
    assert without.headers["x-kvlb-trust"] in {"load_only", "approximate"}
    reasons = {"lookup_failed", "lookup_timeout"}
    assert without.headers["x-kvlb-trust-reason"] in reasons
    ranks = [rank for each in gone["instances"] for rank in each["ranks"]]
    assert "exact" not in {each["trust"] for each in ranks}
    assert {each["trust_reason"] for each in ranks} <= reasons


async def test_balancer_shows_an_index_that_nobody_fills(
    own_redis: Any, engines: list[str], tmp_path: Path
) -> None:
    """Without a request: Redis was down at the start, came up empty, and no indexer runs."""
    server = own_redis()
    file = tmp_path / "kvlb.yaml"
    write(file, server.settings(), engines)
    stop = asyncio.Event()
    listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    async with (
        asyncio.TaskGroup() as group,
        httpx.AsyncClient(trust_env=False, timeout=10) as http,
    ):
        settings = load_fleet(file, Overrides(), {})
        group.create_task(run_balancer(settings, stop=stop, on_listening=listening.set_result))
        url = await listening

        async def problem() -> str:
            return (await http.get(f"{url}/status")).json()["index_problem"] or ""

        async def is_told() -> bool:
            return "is it running" in await problem()

        async def is_well() -> bool:
            return await problem() == ""

        await until(is_told)
        server.start()
        await until(is_well)
        shown = (await http.get(f"{url}/status")).json()
        stop.set()

    assert [rank["index"] for each in shown["instances"] for rank in each["ranks"]] == [None, None]


async def test_indexer_shows_itself(redis_server: Any, engines: list[str], tmp_path: Path) -> None:
    """Health, readiness and metrics to everybody, its status to operators."""
    file = tmp_path / "kvlb.yaml"
    write(file, redis_server.settings(), engines, admin={"api_key": "k"})
    async with both(file) as kvlb:
        await kvlb.index_knows(2)
        answers = {
            path: (await kvlb.get(kvlb.indexer, path, **ELSEWHERE)).status_code
            for path in ("/health", "/ready", "/metrics", "/status", "/nothing")
        }
        metrics = (await kvlb.get(kvlb.indexer, "/metrics")).text
        opened = await kvlb.get(kvlb.indexer, "/status", **ELSEWHERE, **{"x-api-key": "k"})

    assert answers == {
        "/health": 200,
        "/ready": 200,
        "/metrics": 200,
        "/status": 401,
        "/nothing": 404,
    }
    assert opened.status_code == 200
    assert 'kvlb_rank_trust{instance="m0",rank="0",trust="exact"} 1.0' in metrics
    assert "process_cpu_seconds_total" in metrics


async def test_both_take_over_a_changed_file(
    redis_server: Any, engines: list[str], tmp_path: Path
) -> None:
    """Fleet, admin key and routing; at SIGHUP at once."""
    file = tmp_path / "kvlb.yaml"
    redis = redis_server.settings()
    write(file, redis, engines[:1])
    async with both(file) as kvlb:
        await kvlb.index_knows(1)
        write(file, redis, engines, admin={"api_key": "new"})
        os.kill(os.getpid(), signal.SIGHUP)
        await kvlb.index_knows(2)

        async def is_whole() -> bool:
            status = (await kvlb.get(kvlb.balancer, "/status")).json()
            return [each["available"] for each in status["instances"]] == [True, True]

        await until(is_whole)
        key = {"x-api-key": "new"}
        indexer = await kvlb.get(kvlb.indexer, "/status", **ELSEWHERE, **key)
        balancer = await kvlb.get(kvlb.balancer, "/status", **ELSEWHERE, **key)

    assert (indexer.status_code, balancer.status_code) == (200, 200)


async def test_both_start_without_redis(own_redis: Any, engines: list[str], tmp_path: Path) -> None:
    """Requests are answered by load; once Redis is there, it is used."""
    file = tmp_path / "kvlb.yaml"
    server = own_redis()
    write(file, server.settings(heartbeat_s=0.05), engines)
    async with both(file) as kvlb:
        await until(kvlb.is_available)
        without = await kvlb.http.post(f"{kvlb.balancer}/v1/completions", json=PROMPT)
        server.start()

        async def is_indexed() -> bool:
            asked = {"path": "/v1/completions", "body": PROMPT}
            plan = (await kvlb.http.post(f"{kvlb.balancer}/explain", json=asked)).json()
            overlaps = [each["overlap_tokens"] for each in plan["decode"]["considered"]]
            return sorted(overlaps) == [0, 112]

        await until(is_indexed)

    assert without.status_code == 200


async def test_one_process_can_keep_its_index_in_redis(
    redis_server: Any, engines: list[str], tmp_path: Path
) -> None:
    """`kvlb up` with a section `redis`: a later process goes on with it."""
    file = tmp_path / "kvlb.yaml"
    write(file, redis_server.settings(), engines)
    settings = load_fleet(file, Overrides(), {})
    reasons = []
    for _ in range(2):
        stop = asyncio.Event()
        started: asyncio.Future[RunningKvlb] = asyncio.get_running_loop().create_future()
        async with asyncio.TaskGroup() as group, httpx.AsyncClient(trust_env=False) as http:
            group.create_task(run_kvlb(settings, stop=stop, on_listening=started.set_result))
            kvlb = await started
            await until(lambda kvlb=kvlb, http=http: answers(kvlb, http))  # type: ignore[misc]
            await until(lambda kvlb=kvlb: holds_blocks(kvlb))  # type: ignore[misc]
            reasons.append({x.epoch_reason for x in kvlb.indexer.status() if x.held_blocks})
            stop.set()

    assert reasons == [{"started"}, {"resumed"}]


async def answers(kvlb: RunningKvlb, http: httpx.AsyncClient) -> bool:
    return (await http.post(f"{kvlb.url}/v1/completions", json=PROMPT)).is_success


async def holds_blocks(kvlb: RunningKvlb) -> bool:
    """And has them written: a later process finds them."""
    ranks = kvlb.indexer.status()
    return any(each.held_blocks and each.last_seq is not None for each in ranks)


@pytest.mark.parametrize("run", [run_balancer, run_indexer], ids=["balancer", "indexer"])
async def test_without_a_redis_section_it_says_what_to_do(run: Any) -> None:
    """There is nothing to share."""
    settings = load_fleet(None, Overrides(instances=("http://a:1",)), {})

    with pytest.raises(SettingsError, match="kvlb up"):
        await run(settings, stop=asyncio.Event(), on_listening=lambda _: None)


async def test_indexer_without_a_port_takes_nothing_over(
    redis_server: Any, own_redis: Any, engines: list[str], tmp_path: Path
) -> None:
    """Two on one machine: the second ends with advice, and Redis never heard of it."""
    quiet = own_redis()  # nobody else asks it: connections are counted
    quiet.start()
    file = tmp_path / "kvlb.yaml"
    write(file, redis_server.settings(), engines)
    async with both(file) as kvlb:
        await kvlb.index_knows(2)
        port = int(kvlb.indexer.rsplit(":", 1)[1])
        settings = with_status_port(load_fleet(file, Overrides(), {}), port)
        settings = msgspec.structs.replace(settings, redis=quiet.settings())
        before = connections_made(quiet)
        with pytest.raises(SettingsError, match="--status-port"):
            await run_indexer(settings, stop=asyncio.Event(), on_listening=lambda _: None)

        assert connections_made(quiet) == before + 1  # our own question


async def test_kvlb_up_without_a_port_takes_nothing_over(
    redis_server: Any, own_redis: Any, engines: list[str], tmp_path: Path
) -> None:
    """The same for the whole in one process."""
    quiet = own_redis()  # nobody else asks it: connections are counted
    quiet.start()
    file = tmp_path / "kvlb.yaml"
    write(file, redis_server.settings(), engines)
    async with both(file) as kvlb:
        await kvlb.index_knows(2)
        port = int(kvlb.balancer.rsplit(":", 1)[1])
        settings = msgspec.structs.replace(load_fleet(file, Overrides(), {}), port=port)
        settings = msgspec.structs.replace(settings, redis=quiet.settings())
        before = connections_made(quiet)
        with pytest.raises(SettingsError, match="--port"):
            await run_kvlb(settings, stop=asyncio.Event(), on_listening=lambda _: None)

        assert connections_made(quiet) == before + 1  # our own question


def connections_made(server: Any) -> int:
    told = server.command("INFO", "stats")
    return int(told.partition("total_connections_received:")[2].split()[0])


def with_status_port(settings: KvlbSettings, port: int) -> KvlbSettings:
    indexer = msgspec.structs.replace(settings.indexer, status_port=port)
    return msgspec.structs.replace(settings, indexer=indexer)


async def test_password_opens_redis_and_shows_nowhere(
    own_redis: Any,
    engines: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It comes from the environment; logs and `/status` have its variable's name at most."""
    monkeypatch.setenv("HERE", "s3cret")
    server = own_redis("--requirepass", "s3cret")
    server.start()
    file = tmp_path / "kvlb.yaml"
    write(file, server.settings(password_env="HERE"), engines)  # noqa: S106 - a variable's name
    async with both(file, {"HERE": "s3cret"}) as kvlb:
        await kvlb.index_knows(2)
        await until(kvlb.is_available)
        await kvlb.http.post(f"{kvlb.balancer}/v1/completions", json=PROMPT)
        metrics = (await kvlb.get(kvlb.balancer, "/metrics")).text
        shown = (await kvlb.get(kvlb.balancer, "/status")).text

    assert 'kvlb_index_lookups_total{outcome="ok"} 1.0' in metrics
    assert "s3cret" not in shown + "".join(capsys.readouterr())
