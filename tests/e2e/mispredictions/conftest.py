"""kvlb in front of simulated engines in every composition: its index may be made wrong about them.

Real balancer, indexer, Redis, ZMQ and HTTP. The first engine can be filled with ten prompts of 100
blocks each, which the index must go on crediting it with while it unlearns what is wrong.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec
import pytest

from balancer.core.settings.control import ProbeSettings, TokensSettings
from balancer.core.settings.routing import RoutingSettings
from indexer.redis_index.settings import RedisSettings
from indexer.service import IndexerService
from kvlb.running import run_balancer, run_indexer, running_kvlb
from kvlb.settings import KvlbSettings, Overrides, load_settings
from kvlb.simulated import instance_option, parse_fleet, simulated_fleet
from simulator.core.settings import EngineSettings
from simulator.service import RunningEngine

BLOCK = 16
TRUE_BLOCKS = 100


def _tokens(number: int, blocks: int) -> list[int]:
    return [1000 + (number * 7919 + at) % 50_000 + at for at in range(blocks * BLOCK)]


@pytest.fixture
def tokens() -> Callable[[int, int], list[int]]:
    """Makes blocks that no prompt of another number has."""
    return _tokens


TRUE_PROMPTS = [_tokens(number, TRUE_BLOCKS) for number in range(10)]


def _body(token_ids: Sequence[int]) -> dict[str, Any]:
    # One token more than whole blocks, so that all of them can be hit.
    return {"model": "sim", "prompt": [*token_ids, 7], "max_tokens": 1}


@dataclass
class Running:
    """A balancer in front of engines that a test may lie for."""

    url: str
    indexer_url: str
    engines: Sequence[RunningEngine]
    http: httpx.AsyncClient
    indexer: IndexerService | None

    @property
    def true_prompts(self) -> list[list[int]]:
        """What the first engine computes if it is filled."""
        return TRUE_PROMPTS

    async def ask(self, token_ids: Sequence[int], url: str | None = None) -> httpx.Response:
        body = _body(token_ids)
        answer = await self.http.post(f"{url or self.url}/v1/completions", json=body)
        assert answer.status_code == 200
        return answer

    async def fill_truly(self) -> None:
        """The first engine computes 1,000 blocks, and the index hears of it."""
        for token_ids in TRUE_PROMPTS:
            await self.ask(token_ids, url=self.engines[0].url)

        async def is_known() -> bool:
            return await self.overlap(TRUE_PROMPTS[-1]) == TRUE_BLOCKS

        await self.until(is_known)

    async def agree(self) -> None:
        """A leg that found what was promised: so the engine drafts no tokens."""
        await self.ask(TRUE_PROMPTS[0])

    async def overlap(self, token_ids: Sequence[int], alias: str = "m0") -> int:
        """Blocks that the index alone credits an instance with."""
        asked = {"path": "/v1/completions", "body": _body(token_ids)}
        plan = (await self.http.post(f"{self.url}/explain", json=asked)).json()
        found = {each["instance"]: each for each in plan["decode"]["considered"]}
        return int(found[alias]["overlap_tokens"]) // BLOCK

    async def has_true_blocks(self) -> bool:
        """All 1,000, of the first engine."""
        held = [await self.overlap(each) for each in TRUE_PROMPTS]
        return held == [TRUE_BLOCKS] * len(TRUE_PROMPTS)

    async def holds(self, chain: Sequence[int], alias: str) -> bool:
        return await self.overlap(chain, alias) > 0

    async def lacks(self, chain: Sequence[int], alias: str) -> bool:
        return not await self.overlap(chain, alias)

    async def metric(self, name: str, **labels: str) -> float:
        """Sum over the series that have these labels."""
        text = (await self.http.get(f"{self.url}/metrics")).text
        text += (await self.http.get(f"{self.indexer_url}/metrics")).text * (
            self.url != self.indexer_url
        )
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        lines = re.findall(rf"^{name}({{.*}})? (\S+)$", text, re.MULTILINE)
        return sum(float(value) for found, value in lines if all(w in found for w in wanted))

    async def is_counted(self, cause: str) -> bool:
        """The first engine was found out at least once for this cause."""
        return await self.metric("kvlb_mispredictions_total", instance="m0", cause=cause) >= 1

    async def was_rebuilt(self) -> bool:
        return await self.metric("kvlb_epochs_total", instance="m0", reason="rebuilt") >= 1

    async def trust(self, alias: str = "m0") -> str:
        text = (await self.http.get(f"{self.indexer_url}/metrics")).text
        found = re.search(
            rf'^kvlb_rank_trust{{instance="{alias}",rank="0",trust="(\w+)"}} 1', text, re.MULTILINE
        )
        return found[1] if found else "unknown"

    async def has_trust(self, trust: str, alias: str = "m0") -> bool:
        return await self.trust(alias) == trust

    async def is_ready(self) -> bool:
        ready = await self.http.get(f"{self.url}/ready")
        trusts = {await self.trust(engine.name) for engine in self.engines}
        return ready.status_code == 200 and not ready.json()["reasons"] and trusts == {"exact"}

    @staticmethod
    async def until(is_so: Callable[[], Awaitable[object]]) -> None:
        """Wait, with a deadline, for what nobody announces."""
        async with asyncio.timeout(20):
            while True:
                if await is_so():
                    return
                await asyncio.sleep(0.02)


Composed = Callable[..., AbstractAsyncContextManager[Running]]


@pytest.fixture(params=["memory", "redis", "processes"])
def composed(request: pytest.FixtureRequest, redis_server: Any) -> Composed:
    """Make a fleet and kvlb in front of it: in one process, over Redis, as two halves."""
    kind = request.param
    redis = None if kind == "memory" else redis_server.settings()

    @asynccontextmanager
    async def compose(
        spec: str = "2",
        *,
        indexer: dict[str, Any] | None = None,
        full_report_interval_s: float = 0.0,
        heartbeat_s: float | None = None,
        **engine: Any,
    ) -> AsyncIterator[Running]:
        beating = redis
        if redis is not None and heartbeat_s is not None:
            beating = msgspec.structs.replace(
                redis, heartbeat_s=heartbeat_s, lease_s=3 * heartbeat_s
            )
        simulated = EngineSettings(inter_token_ms=1.0, **engine)
        async with simulated_fleet(parse_fleet(spec), simulated) as fleet:
            settings = _configured(fleet.engines, beating, full_report_interval_s, indexer or {})
            running = _running_halves if kind == "processes" else _running_whole
            async with (
                httpx.AsyncClient(trust_env=False, timeout=20) as http,
                running(settings) as (
                    url,
                    indexer_url,
                    service,
                ),
            ):
                kvlb = Running(url, indexer_url, fleet.engines, http, service)
                await kvlb.until(kvlb.is_ready)
                yield kvlb

    return compose


def _configured(
    engines: Sequence[RunningEngine],
    redis: RedisSettings | None,
    full_report_interval_s: float,
    indexer: dict[str, Any],
) -> KvlbSettings:
    options = tuple(instance_option(engine) for engine in engines)
    loaded = load_settings(None, Overrides(instances=options, port=0, status_port=0), {})
    return msgspec.structs.replace(
        loaded,
        redis=redis,
        indexer=msgspec.structs.replace(loaded.indexer, **indexer),
        # A busy machine must not make a prompt unscorable, nor a lookup late.
        tokens=TokensSettings(deadline_s=10.0),
        routing=RoutingSettings(
            lookup_timeout_s=5.0, full_report_interval_s=full_report_interval_s
        ),
        probes=ProbeSettings(interval_s=0.2),
    )


@asynccontextmanager
async def _running_whole(
    settings: KvlbSettings,
) -> AsyncIterator[tuple[str, str, IndexerService | None]]:
    async with running_kvlb(settings) as kvlb:
        yield kvlb.url, kvlb.url, kvlb.indexer


@asynccontextmanager
async def _running_halves(
    settings: KvlbSettings,
) -> AsyncIterator[tuple[str, str, IndexerService | None]]:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    indexer: asyncio.Future[str] = loop.create_future()
    balancer: asyncio.Future[str] = loop.create_future()
    async with asyncio.TaskGroup() as group:
        group.create_task(run_indexer(settings, stop=stop, on_listening=indexer.set_result))
        group.create_task(run_balancer(settings, stop=stop, on_listening=balancer.set_result))
        try:
            yield await balancer, await indexer, None
        finally:
            stop.set()
