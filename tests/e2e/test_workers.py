"""Balancers of several workers around one Redis, as real processes: one load, one set of figures."""

import asyncio
import os
import signal
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import httpx
import msgspec
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

ENGINE_PORTS = 12
ENGINES = 4
WORKERS = 2
ADMIN_KEY = "of-the-test"

StartCommand = Callable[..., AbstractAsyncContextManager[Any]]
Figures = Mapping[str, float]
"""Sums over the series of each metric."""


@dataclass
class Balancer:
    """One balancer of several workers, and ways to ask it; every question is a connection of its own."""

    url: str
    command: Any

    async def get(self, path: str) -> httpx.Response:
        async with httpx.AsyncClient(trust_env=False, timeout=30) as http:
            return await http.get(f"{self.url}{path}")

    async def figures(self) -> Figures:
        found: defaultdict[str, float] = defaultdict(float)
        for family in text_string_to_metric_families((await self.get("/metrics")).text):
            for sample in family.samples:
                found[sample.name] += sample.value
        return found

    async def in_flight(self) -> int:
        """Of all instances, as whichever worker answers has it."""
        status = (await self.get("/status")).json()
        return sum(
            rank["load"]["requests"] for each in status["instances"] for rank in each["ranks"]
        )

    async def complete(self, prompt: Sequence[int], **fields: Any) -> httpx.Response:
        body = {"model": "sim", "prompt": list(prompt), "max_tokens": 1, **fields}
        async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
            return await http.post(f"{self.url}/v1/completions", json=body)

    @asynccontextmanager
    async def streaming(
        self, prompt: Sequence[int], tokens: int = 900
    ) -> AsyncIterator[httpx.Response]:
        """A stream that is open, and by default far from its end."""
        body = {"model": "sim", "prompt": list(prompt), "max_tokens": tokens, "stream": True}
        async with (
            httpx.AsyncClient(trust_env=False, timeout=60) as http,
            http.stream("POST", f"{self.url}/v1/completions", json=body) as answer,
        ):
            yield answer

    def workers(self) -> list[int]:
        """Process numbers of the workers, from the system."""
        parent = self.command.process.pid
        return [
            int(each) for each in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        ]


async def until(is_so: Callable[[], Any], deadline_s: float = 30) -> None:
    async with asyncio.timeout(deadline_s):
        while True:
            try:
                if await is_so():
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.05)


def any_runs(processes: Sequence[int]) -> bool:
    return any(Path(f"/proc/{each}").exists() for each in processes)


def prompt_of(seed: int, tokens: int) -> list[int]:
    random = Random(seed)  # noqa: S311 - no secret
    return [random.randrange(3, 900) for _ in range(tokens)]


@dataclass
class Around:
    """Everything around one Redis."""

    engines: list[str]
    redis: Any
    start: StartCommand
    exits: AsyncExitStack
    config: Path
    ports: list[int]

    async def balancer(self, *options: str) -> Balancer:
        port = self.ports.pop()
        command = await self.exits.enter_async_context(
            self.start(
                "balancer",
                *("--config", str(self.config), "--port", str(port), *options),
                env={"KVLB_ADMIN_API_KEY": ADMIN_KEY},
            )
        )
        await command.printed("listens on")
        made = Balancer(f"http://127.0.0.1:{port}", command)
        await until(lambda: is_ready(made))
        return made


async def is_ready(balancer: Balancer) -> bool:
    answer = await balancer.get("/ready")
    return answer.status_code == 200 and not answer.json()["reasons"]


@pytest.fixture
async def around(
    start_command: StartCommand,
    free_ports: Callable[[int], list[int]],
    free_range: Callable[[int], int],
    own_redis: Callable[..., Any],
    tmp_path: Path,
) -> AsyncIterator[Around]:
    """Four engines, an indexer, Redis."""
    *ports, status_port = free_ports(3)
    base = free_range(ENGINE_PORTS)
    engines = [f"http://127.0.0.1:{base + number}" for number in range(ENGINES)]
    redis = own_redis()
    redis.start()
    settings = {
        "redis": msgspec.to_builtins(redis.settings()),
        "indexer": {"status_port": status_port},
        "routing": {"lookup_timeout_s": 5.0},
        "instances": [{"url": url} for url in engines],
        "drain_s": 20,
    }
    config = tmp_path / "kvlb.yaml"
    config.write_text(yaml.safe_dump(settings))
    async with AsyncExitStack() as exits:
        simulator = await exits.enter_async_context(
            start_command(
                "simulate", str(ENGINES), "--base-port", str(base), "--inter-token-ms", "100"
            )
        )
        await simulator.printed("Balance over them")
        indexer = await exits.enter_async_context(start_command("indexer", "--config", str(config)))
        await indexer.printed("listens on")
        yield Around(engines, redis, start_command, exits, config, ports)


async def burst(balancers: Sequence[Balancer], seed: int) -> int:
    """Eight siblings at once over all balancers; return how many landed together."""
    prefix = prompt_of(seed, 2000)
    async with asyncio.TaskGroup() as group:
        answers = [
            group.create_task(
                balancers[number % len(balancers)].complete([*prefix, *prompt_of(number, 20)])
            )
            for number in range(8)
        ]
    landed = Counter(each.result().headers["x-kvlb-instance"] for each in answers)
    assert all(each.result().status_code == 200 for each in answers)
    return max(landed.values())


async def test_siblings_land_together_and_a_killed_worker_leaves_no_load(around: Around) -> None:
    """Two balancers of two workers: bursts, sums of in-flight, kill -9, restart, figures."""
    first = await around.balancer("--workers", str(WORKERS))
    second = await around.balancer("--workers", str(WORKERS))
    balancers = [first, second]
    await until(lambda: all_know(balancers, 2 * WORKERS - 1))

    together = [await burst(balancers, seed) for seed in range(100, 106)]
    assert min(together) >= 7, together

    async with AsyncExitStack() as streams:
        for number in range(12):
            await streams.enter_async_context(
                balancers[number % 2].streaming(prompt_of(200 + number, 40))
            )
        await until(lambda: agree(balancers, around.engines, at_least=12))
        before = await first.figures()
        victim = first.workers()[0]
        os.kill(victim, signal.SIGKILL)
        await first.command.printed("worker_ended")
        await until(lambda: agree(balancers, around.engines, at_least=0), deadline_s=15)
        await until(lambda: has_workers(first))
        after = await first.figures()

    await until(lambda: agree(balancers, around.engines, at_least=0, at_most=0))
    assert victim not in first.workers()
    assert after["kvlb_worker_restarts_total"] == 1
    assert after["kvlb_requests_total"] >= before["kvlb_requests_total"] == 24
    assert (await second.figures())["kvlb_worker_restarts_total"] == 0
    for each in balancers:
        assert await each.command.stop() == 0


async def all_know(balancers: Sequence[Balancer], peers: int) -> bool:
    """Every worker that was asked, more often than there are workers."""
    for balancer in [*balancers] * 4:
        if (await balancer.figures())["kvlb_peers"] != peers:
            return False
    return True


async def has_workers(balancer: Balancer) -> bool:
    return (await balancer.figures())["kvlb_workers"] == WORKERS and len(
        balancer.workers()
    ) == WORKERS


async def agree(
    balancers: Sequence[Balancer],
    engines: Sequence[str],
    *,
    at_least: int,
    at_most: int | None = None,
) -> bool:
    """All workers count what the engines run, however often they are asked."""
    running = sum([await running_on(each) for each in engines])
    counted = {await each.in_flight() for each in [*balancers] * 4}
    is_within = at_least <= running and (at_most is None or running <= at_most)
    return is_within and counted == {running}


async def running_on(engine: str) -> int:
    async with httpx.AsyncClient(trust_env=False) as http:
        text = (await http.get(f"{engine}/metrics")).text
    return sum(
        int(sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name in {"vllm:num_requests_running", "vllm:num_requests_waiting"}
    )


async def test_workers_are_one_balancer(around: Around) -> None:
    """Whichever worker is asked: its name, its decisions, its fleet, a changed file; and a drain of all."""
    balancer = await around.balancer("--workers", str(WORKERS))
    names = {(await balancer.get("/health")).headers["x-kvlb-balancer"] for _ in range(16)}
    assert len(names) == 1
    for number in range(8):
        answer = await balancer.complete(prompt_of(number, 40))
        assert answer.status_code == 200
    async with httpx.AsyncClient(trust_env=False, headers={"x-api-key": ADMIN_KEY}) as http:
        drained = await http.post(
            f"{balancer.url}/instances/drain", json={"url": around.engines[0]}
        )

    async def all_drain_it() -> bool:
        seen = [(await balancer.get("/status")).json()["instances"][0]["reason"] for _ in range(6)]
        return set(seen) == {"drained"}

    await until(all_drain_it)
    recent = [len((await balancer.get("/explain/recent")).json()["decisions"]) for _ in range(6)]
    settings = yaml.safe_load(around.config.read_text())
    settings["instances"] = settings["instances"][:3]
    around.config.write_text(yaml.safe_dump(settings))
    balancer.command.process.send_signal(signal.SIGHUP)

    async def all_have_three() -> bool:
        seen = {len((await balancer.get("/status")).json()["instances"]) for _ in range(6)}
        return seen == {3}

    await until(all_have_three)
    async with balancer.streaming(prompt_of(99, 40), tokens=50) as stream:
        await until(lambda: agree([balancer], around.engines, at_least=1))
        balancer.command.process.send_signal(signal.SIGTERM)
        await balancer.command.printed("draining_started")
        received = await stream.aread()

    assert drained.status_code == 200
    assert set(recent) == {8}
    assert received.rstrip().endswith(b"data: [DONE]")
    async with asyncio.timeout(20):
        assert await balancer.command.process.wait() == 0


async def test_workers_end_with_their_parent(around: Around) -> None:
    """Killed without a word: nobody would restart or stop them any more."""
    balancer = await around.balancer("--workers", str(WORKERS))
    workers = balancer.workers()
    await balancer.command.stop(signal.SIGKILL)

    async def all_gone() -> bool:
        return not any_runs(workers)

    await until(all_gone)
    assert len(workers) == WORKERS


async def test_siblings_agree_while_redis_is_gone(around: Around) -> None:
    """They speak through their parent."""
    balancer = await around.balancer("--workers", str(WORKERS))
    around.redis.stop()
    async with AsyncExitStack() as streams:
        for number in range(6):
            await streams.enter_async_context(balancer.streaming(prompt_of(number, 40)))

        await until(lambda: agree([balancer], around.engines, at_least=6))


async def test_what_one_worker_finds_of_an_engine_all_know(
    around: Around, start_command: StartCommand, free_range: Callable[[int], int]
) -> None:
    """Probes are far apart here: only a leg can tell, and only its own worker sees it."""
    base = free_range(3)
    async with start_command("simulate", "1", "--base-port", str(base)) as lone:
        await lone.printed("Balance over them")
        settings = yaml.safe_load(around.config.read_text())
        settings["instances"].append({"url": f"http://127.0.0.1:{base}"})
        settings["probes"] = {"interval_s": 300}
        around.config.write_text(yaml.safe_dump(settings))
        balancer = await around.balancer("--workers", str(WORKERS))
        await lone.stop(signal.SIGKILL)

    async def reasons() -> set[str | None]:
        """As eight looks, each at whichever worker it is, have it."""
        seen = [(await balancer.get("/status")).json()["instances"][-1] for _ in range(8)]
        return {each["reason"] for each in seen}

    async def all_know() -> bool:
        return await reasons() == {"engine_unreachable"}

    statuses: list[int] = []
    while await reasons() == {None}:  # no more legs than it takes one worker to find out
        statuses.append((await balancer.complete(prompt_of(len(statuses), 40))).status_code)
    await until(all_know)

    assert set(statuses) == {200}
