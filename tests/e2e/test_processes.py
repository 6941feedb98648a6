"""Indexer, balancer, engines and Redis as processes of their own, and what each one's loss costs."""

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx
import msgspec
import pytest
import yaml

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

ENGINE_PORTS = 12
PROMPTS = 100
OUTAGE_S = 10.0
RATE_PER_S = 50.0

StartCommand = Callable[..., AbstractAsyncContextManager[Any]]
Overlaps = list[dict[str, int]]
"""Tokens that the index credits each instance with, by prompt."""


@dataclass
class Stack:
    """Addresses of one fleet, and ways to ask it."""

    config: Path
    balancer: str
    indexer: str
    engines: list[str]
    http: httpx.AsyncClient
    start: StartCommand
    redis: Any
    statuses: Counter[int] = field(default_factory=Counter)

    def running(self, command: str, *options: str) -> AbstractAsyncContextManager[Any]:
        return self.start(command, "--config", str(self.config), *options)

    @asynccontextmanager
    async def indexing(self, *options: str) -> AsyncIterator[Any]:
        """`kvlb indexer` while the block runs, with its events arriving."""
        async with self.running("indexer", *options) as command:
            await command.printed("listens on")
            yield command

    async def complete(self, prompt: Sequence[int], **fields: Any) -> httpx.Response:
        body = {"model": "sim", "prompt": list(prompt), "max_tokens": 1, **fields}
        answer = await self.http.post(f"{self.balancer}/v1/completions", json=body)
        self.statuses[answer.status_code] += 1
        return answer

    async def overlap(self, prompt: Sequence[int]) -> dict[str, int]:
        """What the index says, without what the balancer itself predicts."""
        body = {"path": "/v1/completions", "body": {"model": "sim", "prompt": list(prompt)}}
        plan = (await self.http.post(f"{self.balancer}/explain", json=body)).json()
        legs = [leg for leg in (plan["decode"], plan["prefill"]) if leg]
        return {
            each["instance"]: each["overlap_tokens"] for leg in legs for each in leg["considered"]
        }

    async def overlaps(self, prompts: Sequence[Sequence[int]]) -> Overlaps:
        return [await self.overlap(prompt) for prompt in prompts]

    async def ranks(self, indexer: str | None = None) -> list[dict[str, Any]]:
        status = await self.http.get(f"{indexer or self.indexer}/status")
        ranks: list[dict[str, Any]] = status.json()["ranks"]
        return ranks

    async def all_exact(self, indexer: str | None = None) -> None:
        async def is_so() -> bool:
            ranks = await self.ranks(indexer)
            return len(ranks) == len(self.engines) and all(x["trust"] == "exact" for x in ranks)

        await until(is_so)

    async def settled(self, prompts: Sequence[Sequence[int]]) -> Overlaps:
        """The overlaps once two looks in a row agree: events are on their way until then."""
        before = await self.overlaps(prompts)
        async with asyncio.timeout(30):
            while True:
                await asyncio.sleep(0.3)
                now = await self.overlaps(prompts)
                if now == before:
                    return now
                before = now


async def until(is_so: Callable[[], Any], deadline_s: float = 30) -> None:
    async with asyncio.timeout(deadline_s):
        while True:
            try:
                if await is_so():
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.05)


def recorded_prompts(count: int = PROMPTS) -> list[list[int]]:
    """Prompts of 2 to 10 blocks; every fourth goes on where an earlier one ended."""
    random = Random(7)  # noqa: S311 - no secret
    prompts: list[list[int]] = []
    for number in range(count):
        base = prompts[number // 2] if number % 4 == 3 else []
        grown = [random.randrange(3, 900) for _ in range(16 * random.randrange(2, 11))]
        prompts.append([*base, *grown])
    return prompts


@pytest.fixture
async def stack(
    start_command: StartCommand,
    free_ports: Callable[[int], list[int]],
    free_range: Callable[[int], int],
    own_redis: Callable[..., Any],
    tmp_path: Path,
) -> AsyncIterator[Stack]:
    """Engines, Redis and a balancer; the indexer is each test's own."""
    port, status_port = free_ports(2)
    base = free_range(ENGINE_PORTS)
    engines = [f"http://127.0.0.1:{base + number}" for number in range(4)]
    redis = own_redis()
    redis.start()
    roles = ["prefill", "prefill", "decode", "decode"]
    settings = {
        "port": port,
        "redis": msgspec.to_builtins(redis.settings()),
        "indexer": {"status_port": status_port},
        # A busy machine must not make a lookup fail: overlaps are compared one by one.
        "routing": {"lookup_timeout_s": 5.0},
        "instances": [{"url": url, "role": role} for url, role in zip(engines, roles, strict=True)],
    }
    config = tmp_path / "kvlb.yaml"
    config.write_text(yaml.safe_dump(settings))
    async with AsyncExitStack() as exits:
        simulator = await exits.enter_async_context(
            start_command("simulate", "2p2d", "--base-port", str(base), "--inter-token-ms", "1")
        )
        await simulator.printed("Balance over them")
        http = await exits.enter_async_context(httpx.AsyncClient(trust_env=False, timeout=30))
        made = Stack(
            config=config,
            balancer=f"http://127.0.0.1:{port}",
            indexer=f"http://127.0.0.1:{status_port}",
            engines=engines,
            http=http,
            start=start_command,
            redis=redis,
        )
        command = await exits.enter_async_context(made.running("balancer"))
        await command.printed("listens on")
        await until(lambda: is_available(made))
        yield made
        assert await command.stop() == 0


async def is_available(stack: Stack) -> bool:
    answer = await stack.http.get(f"{stack.balancer}/ready")
    return answer.status_code == 200 and not answer.json()["reasons"]


def cached(answer: httpx.Response) -> int:
    tokens: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


async def test_second_turn_hits(stack: Stack) -> None:
    """The first request works; the next turn goes where its cache is, as predicted."""
    prompt = recorded_prompts(1)[0]
    async with stack.indexing():
        await stack.all_exact()
        first = await stack.complete(prompt)
        await until(lambda: holds(stack, prompt))
        second = await stack.complete([*prompt, *range(3, 20)])

    assert first.status_code == second.status_code == 200
    assert second.headers["x-kvlb-instance"] == first.headers["x-kvlb-instance"]
    assert cached(second) == len(prompt)
    assert int(second.headers["x-kvlb-overlap-tokens"]) == len(prompt)


async def holds(stack: Stack, prompt: Sequence[int]) -> bool:
    return max((await stack.overlap(prompt)).values()) >= len(prompt) - 16


async def test_killed_indexer_resumes_without_traffic(stack: Stack) -> None:
    """What 100 prompts overlap with is the same before, while it is gone, and after."""
    prompts = recorded_prompts()
    async with stack.indexing() as indexer:
        await stack.all_exact()
        for prompt in prompts:
            assert (await stack.complete(prompt)).status_code == 200
        before = await stack.settled(prompts)
        written = {each["alias"] for each in await stack.ranks() if each["last_seq"] is not None}
        await indexer.stop(signal.SIGKILL)
        meanwhile = await stack.overlaps(prompts)
        await until(lambda: is_told(stack, "indexer_silent"))
        alone = await stack.complete(prompts[0])
        problem = await index_problem(stack)
    async with stack.indexing():
        await stack.all_exact()
        await until(lambda: is_told(stack, None))
        after = await stack.overlaps(prompts)
        reasons = {each["alias"]: each["epoch_reason"] for each in await stack.ranks()}
        newer = recorded_prompts(PROMPTS + 1)[-1][::-1]
        await stack.complete(newer)
        await until(lambda: holds(stack, newer))

    assert sum(max(each.values()) > 0 for each in before) >= PROMPTS * 0.95
    assert meanwhile == before
    assert alone.headers["x-kvlb-trust"] == "degraded"
    assert alone.headers["x-kvlb-trust-reason"] == "indexer_silent"
    assert "no indexer keeps" in (problem or "")
    assert await index_problem(stack) is None
    assert after == before
    # Where decode instances computed every prompt, those for prefill have nothing to go on with.
    assert written >= {"d0", "d1"}
    assert {alias for alias, reason in reasons.items() if reason == "resumed"} == written


async def is_told(stack: Stack, reason: str | None) -> bool:
    """Whether the balancer says so of each rank, and believes it accordingly."""
    shown = (await stack.http.get(f"{stack.balancer}/status")).json()["instances"]
    trust = "exact" if reason is None else "degraded"
    told = {(rank["trust"], rank["trust_reason"]) for each in shown for rank in each["ranks"]}
    return told == {(trust, reason)}


async def index_problem(stack: Stack) -> str | None:
    problem: str | None = (await stack.http.get(f"{stack.balancer}/status")).json()["index_problem"]
    return problem


async def test_redis_gone_and_back_empty_costs_no_answer(stack: Stack) -> None:
    """Ten seconds without Redis at 50 requests a second; then predictions are exact by themselves."""
    prompts = recorded_prompts()
    random = Random(1)  # noqa: S311 - no secret
    async with stack.indexing():
        await stack.all_exact()
        for prompt in prompts[:50]:
            await stack.complete(prompt)
        async with asyncio.TaskGroup() as group:
            sending = group.create_task(send_steadily(stack, prompts, random))
            await asyncio.sleep(2)
            stack.redis.stop()
            await asyncio.sleep(OUTAGE_S)
            ready = await stack.http.get(f"{stack.balancer}/ready")
            health = await stack.http.get(f"{stack.balancer}/health")
            stack.redis.start()
            await asyncio.sleep(3)
            sending.cancel()
        await stack.all_exact()
        await stack.settled(prompts)
        exact = 0
        for prompt in prompts:
            known = await stack.overlap(prompt)  # the index's own word
            answer = await stack.complete(prompt)
            predicted = int(answer.headers["x-kvlb-overlap-tokens"])
            indexed = known[answer.headers["x-kvlb-instance"]]
            exact += indexed == predicted == cached(answer)
            await until(lambda prompt=prompt: holds(stack, prompt))  # type: ignore[misc]
        metrics = (await stack.http.get(f"{stack.balancer}/metrics")).text

    assert {status // 100 for status in stack.statuses} == {2}, stack.statuses
    assert stack.statuses.total() > RATE_PER_S * OUTAGE_S
    assert ready.status_code == health.status_code == 200
    assert 'kvlb_index_lookups_total{outcome="failed"}' in metrics
    assert exact == PROMPTS


async def send_steadily(stack: Stack, prompts: Sequence[Sequence[int]], random: Random) -> None:
    """`RATE_PER_S` requests a second, whatever becomes of the ones before."""
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    sent = 0
    async with asyncio.TaskGroup() as group:
        while True:
            sent += 1
            group.create_task(stack.complete(random.choice(prompts)))
            await asyncio.sleep(max(0.0, started_s + sent / RATE_PER_S - loop.time()))


async def test_two_indexers_count_once(
    stack: Stack, free_ports: Callable[[int], list[int]]
) -> None:
    """The later one takes over, the earlier one says so; a cleared cache is clear for both."""
    prompts = recorded_prompts(20)
    (second_port,) = free_ports(1)
    second = f"http://127.0.0.1:{second_port}"
    async with stack.indexing():
        await stack.all_exact()
        for prompt in prompts:
            await stack.complete(prompt)
        before = await stack.settled(prompts)
        async with stack.indexing("--status-port", str(second_port)) as later:
            await stack.all_exact(second)
            with_two = await stack.settled(prompts)
            newer = recorded_prompts(PROMPTS)[-1]
            await stack.complete(newer)
            await until(lambda: holds(stack, newer))
            await stack.http.get(f"{second}/metrics")  # it is measured when somebody looks
            entries = (await stack.http.get(f"{second}/status")).json()["index"]["entries"]
            await until(lambda: stands_by(stack))
            held = sum(each["held_blocks"] for each in await stack.ranks(second))
            for engine in stack.engines:
                await stack.http.post(f"{engine}/reset_prefix_cache")
                # vLLM tells of it with its next step, and so needs one.
                body = {"model": "sim", "prompt": [1, 2, 3], "max_tokens": 1}
                await stack.http.post(f"{engine}/v1/completions", json=body)
            await until(lambda: is_clear(stack, prompts))
            spare = (await stack.http.get(f"{stack.indexer}/ready")).json()
            assert await later.stop() == 0
        await until(lambda: writes_again(stack), deadline_s=20)  # the lease is 120 s
        await stack.complete(newer)
        await until(lambda: holds(stack, newer))

    assert spare == {"status": "standing_by"}
    assert with_two == before
    assert entries == held


async def writes_again(stack: Stack) -> bool:
    """The first indexer has taken every rank back."""
    return not any(each["is_standing_by"] for each in await stack.ranks())


async def stands_by(stack: Stack) -> bool:
    """The first indexer says of each rank that another one writes it."""
    return all("another indexer" in (each["problem"] or "") for each in await stack.ranks())


async def is_clear(stack: Stack, prompts: Sequence[Sequence[int]]) -> bool:
    return all(not any(each.values()) for each in await stack.overlaps(prompts))


async def test_changed_file_under_traffic_drops_nothing(stack: Stack) -> None:
    """An instance leaves both processes and comes back; a broken file in between changes nothing."""
    whole = yaml.safe_load(stack.config.read_text())
    prompts = recorded_prompts(40)

    async def aliases() -> list[str]:
        shown = (await stack.http.get(f"{stack.balancer}/status")).json()["instances"]
        return [each["alias"] for each in shown]

    async def followed() -> int:
        return len(await stack.ranks())

    async def is_fleet(count: int) -> bool:
        return len(await aliases()) == count == await followed()

    async with stack.indexing() as indexer:
        await stack.all_exact()
        async with asyncio.TaskGroup() as group:
            sending = group.create_task(send_steadily(stack, prompts, Random(2)))  # noqa: S311
            replace(stack.config, {**whole, "instances": whole["instances"][:3]})
            await until(lambda: is_fleet(3))
            replace(stack.config, {**whole, "routing": {"polcy": "kvlb"}})
            refused = await indexer.printed("reload_refused")
            assert await is_fleet(3)
            replace(stack.config, whole)
            indexer.process.send_signal(signal.SIGHUP)
            await until(lambda: is_fleet(4))
            await stack.all_exact()
            sending.cancel()
        last = await stack.complete(prompts[0])

    assert "routing.polcy" in refused
    assert set(stack.statuses) == {200}
    assert last.status_code == 200


def replace(config: Path, settings: dict[str, Any]) -> None:
    """As an editor does: another file in its place."""
    beside = config.with_suffix(".new")
    beside.write_text(yaml.safe_dump(settings))
    beside.replace(config)
