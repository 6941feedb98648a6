"""An index that is wrong about an engine loses its influence, and only where it is wrong (issue 4).

Real balancer, indexer, Redis, ZMQ and HTTP around simulated engines, in every composition.
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
from indexer.core.events import BlockStored
from indexer.core.types import EngineHash, InstanceId, RankId
from indexer.redis_index.keys import rank_digest
from indexer.redis_index.settings import RedisSettings
from indexer.service import IndexerService
from kvlb.running import run_balancer, run_indexer, running_kvlb
from kvlb.settings import KvlbSettings, Overrides, load_settings
from kvlb.simulated import instance_option, parse_fleet, simulated_fleet
from simulator.core import types as engine_events
from simulator.core.event_faults import EventFaults
from simulator.core.generation import seed_answer
from simulator.core.live_request import LiveRequest
from simulator.core.settings import EngineSettings
from simulator.service import RunningEngine

BLOCK = 16
GHOSTS = 1000
TRUE_PROMPTS = 10
TRUE_BLOCKS = 100
MOST_REQUESTS = 20


def tokens(number: int, blocks: int) -> list[int]:
    """Blocks that no other prompt has."""
    return [1000 + (number * 7919 + at) % 50_000 + at for at in range(blocks * BLOCK)]


def prompt(token_ids: Sequence[int]) -> dict[str, Any]:
    """One token more than whole blocks, so that all of them can be hit."""
    return {"model": "sim", "prompt": [*token_ids, 7], "max_tokens": 1}


def true_prompts() -> list[list[int]]:
    return [tokens(number, TRUE_BLOCKS) for number in range(TRUE_PROMPTS)]


def true_hashes(token_ids: Sequence[int]) -> list[bytes]:
    """As the simulated engine would name these blocks."""
    request = engine_events.EngineRequest(
        request_id="x", prompt_token_ids=token_ids, sampler=seed_answer(token_ids, 0), max_tokens=1
    )
    live = LiveRequest(request)
    live.extend_hashes(len(token_ids) // BLOCK, BLOCK, b"vllm-none-hash")
    return live.hashes


def announced(token_ids: Sequence[int]) -> engine_events.BlockStored:
    """An event by which an engine lies: it has no such blocks."""
    hashes = tuple(true_hashes(token_ids))
    return engine_events.BlockStored(
        hashes=hashes,
        parent=None,
        token_ids=list(token_ids),
        block_size=BLOCK,
        extra_keys=(None,) * len(hashes),
    )


@dataclass
class Running:
    """A balancer in front of engines that a test may lie for."""

    url: str
    indexer_url: str
    engines: Sequence[RunningEngine]
    http: httpx.AsyncClient
    indexer: IndexerService | None

    async def ask(self, body: dict[str, Any], url: str | None = None) -> httpx.Response:
        answer = await self.http.post(f"{url or self.url}/v1/completions", json=body)
        assert answer.status_code == 200
        return answer

    async def overlap(self, token_ids: Sequence[int], alias: str = "m0") -> int:
        """Blocks that the index alone credits an instance with."""
        asked = {"path": "/v1/completions", "body": prompt(token_ids)}
        plan = (await self.http.post(f"{self.url}/explain", json=asked)).json()
        found = {each["instance"]: each for each in plan["decode"]["considered"]}
        return int(found[alias]["overlap_tokens"]) // BLOCK

    async def metric(self, name: str, **labels: str) -> float:
        """Sum over the series that have these labels."""
        text = (await self.http.get(f"{self.url}/metrics")).text
        text += (await self.http.get(f"{self.indexer_url}/metrics")).text * (
            self.url != self.indexer_url
        )
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        lines = re.findall(rf"^{name}({{.*}})? (\S+)$", text, re.MULTILINE)
        return sum(float(value) for found, value in lines if all(w in found for w in wanted))

    async def trust(self, alias: str = "m0") -> str:
        text = (await self.http.get(f"{self.indexer_url}/metrics")).text
        found = re.search(
            rf'^kvlb_rank_trust{{instance="{alias}",rank="0",trust="(\w+)"}} 1', text, re.MULTILINE
        )
        return found[1] if found else "unknown"


async def until(is_so: Callable[[], Awaitable[bool]]) -> None:
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
            settings = configured(fleet.engines, beating, full_report_interval_s, indexer or {})
            running = running_halves if kind == "processes" else running_whole
            async with (
                httpx.AsyncClient(trust_env=False, timeout=20) as http,
                running(settings) as (
                    url,
                    indexer_url,
                    service,
                ),
            ):
                kvlb = Running(url, indexer_url, fleet.engines, http, service)
                await until(lambda: is_ready(kvlb))
                yield kvlb

    return compose


def configured(
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
async def running_whole(
    settings: KvlbSettings,
) -> AsyncIterator[tuple[str, str, IndexerService | None]]:
    async with running_kvlb(settings) as kvlb:
        yield kvlb.url, kvlb.url, kvlb.indexer


@asynccontextmanager
async def running_halves(
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


async def is_ready(kvlb: Running) -> bool:
    ready = await kvlb.http.get(f"{kvlb.url}/ready")
    trusts = {await kvlb.trust(engine.name) for engine in kvlb.engines}
    return ready.status_code == 200 and not ready.json()["reasons"] and trusts == {"exact"}


async def fill_truly(kvlb: Running) -> None:
    """The first engine computes 1,000 blocks, and the index hears of it."""
    for token_ids in true_prompts():
        await kvlb.ask(prompt(token_ids), url=kvlb.engines[0].url)

    async def is_known() -> bool:
        return await kvlb.overlap(true_prompts()[-1]) == TRUE_BLOCKS

    await until(is_known)


async def test_ghosts_under_one_root_go_with_the_first_that_is_found_out(
    composed: Composed,
) -> None:
    """The engine announced 1,000 blocks that it never had; 1,000 true ones keep their credit."""
    root = tokens(500, 40)
    branches = [[*root, *tokens(600 + number, 30)] for number in range(32)]
    async with composed() as kvlb:
        kvlb.engines[0].engine.ranks[0].publisher.publish([announced(each) for each in branches])
        await fill_truly(kvlb)
        assert await kvlb.overlap(branches[-1]) == 70

        asked = 0
        for number in range(MOST_REQUESTS):
            await kvlb.ask(prompt(branches[number]))
            asked += 1
            if await kvlb.overlap(branches[-1]) <= 40:
                break

        async def is_harmless() -> bool:
            return await kvlb.overlap(branches[-1]) <= 40

        await until(is_harmless)
        assert asked <= MOST_REQUESTS
        assert [await kvlb.overlap(each) for each in true_prompts()] == [TRUE_BLOCKS] * TRUE_PROMPTS
        assert await kvlb.metric("kvlb_mispredictions_total", instance="m0", cause="ghost") >= 1
        assert await kvlb.metric("kvlb_pruned_blocks_total", instance="m0") >= GHOSTS - 30 * asked
        assert await kvlb.metric("kvlb_predictions_total", outcome="over") >= 1


@pytest.mark.parametrize("composed", ["memory", "redis"], indirect=True)
async def test_scattered_ghosts_of_the_index_go_with_a_rebuild(composed: Composed) -> None:
    """What only our tables have, in chains of their own: a few are found out, and all is told anew."""
    chains = [tokens(700 + number, 10) for number in range(GHOSTS // 10)]
    async with composed() as kvlb:
        assert kvlb.indexer is not None
        await plant(kvlb.indexer, kvlb.engines[0].url, chains)
        await fill_truly(kvlb)
        assert await kvlb.overlap(chains[-1]) == 10
        await agree(kvlb)

        for number in range(MOST_REQUESTS):
            await kvlb.ask(prompt(chains[number]))
            if await kvlb.overlap(chains[-1]) == 0:
                break

        await until(lambda: lacks(kvlb, chains[-1], "m0"))
        assert await kvlb.metric("kvlb_epochs_total", instance="m0", reason="rebuilt") == 1
        assert await kvlb.metric("kvlb_mispredictions_total", cause="ghost") >= 5

        async def is_whole_again() -> bool:
            return await has_true_blocks(kvlb) and await kvlb.trust() == "exact"

        await until(is_whole_again)


@pytest.mark.parametrize("composed", ["redis", "processes"], indirect=True)
async def test_ghosts_of_redis_alone_go_when_it_is_written_anew(
    composed: Composed, redis_server: Any
) -> None:
    """Somebody added them to the rank's set: the indexer's tables, and its engine, never had them."""
    chains = [tokens(700 + number, 10) for number in range(GHOSTS // 10)]
    # Heartbeats count the keys, too, and the first comes at any part of the pause between two: here
    # reports have to find it out.
    async with composed(heartbeat_s=100_000.0) as kvlb:
        await fill_truly(kvlb)
        for each in chains:
            await kvlb.ask(prompt(each), url=kvlb.engines[1].url)
        await until(lambda: holds(kvlb, chains[-1], "m1"))
        copy_blocks(redis_server, kvlb.engines[1].url, kvlb.engines[0].url)
        await kvlb.http.post(f"{kvlb.engines[1].url}/reset_prefix_cache")
        await kvlb.ask(prompt(tokens(1, 1)), url=kvlb.engines[1].url)  # its next step tells of it
        await until(lambda: lacks(kvlb, chains[-1], "m1"))
        assert await kvlb.overlap(chains[-1]) == 10

        for number in range(MOST_REQUESTS):
            await kvlb.ask(prompt(chains[number]))
            if await kvlb.overlap(chains[-1]) == 0:
                break

        await until(lambda: lacks(kvlb, chains[-1], "m0"))
        await until(lambda: has_true_blocks(kvlb))  # none while it is being written
        assert [await kvlb.overlap(each) for each in chains[MOST_REQUESTS:]] == [0] * 80
        assert await kvlb.metric("kvlb_mispredictions_total", cause="index_differs") >= 3
        assert await kvlb.metric("kvlb_index_faults_total", instance="m0", reason="differs") >= 1
        assert await kvlb.trust() == "exact"


@pytest.mark.parametrize("composed", ["redis", "processes"], indirect=True)
async def test_true_blocks_that_redis_alone_lost_come_back_when_it_is_written_anew(
    composed: Composed, redis_server: Any
) -> None:
    """Somebody put other keys in their place, as many: no count shows it, and nothing is promised."""
    async with composed() as kvlb:
        await fill_truly(kvlb)
        await agree(kvlb)
        swap_blocks(redis_server, kvlb.engines[0].url)
        assert await kvlb.overlap(true_prompts()[0]) == 0

        asked = 0
        while asked < MOST_REQUESTS and not await kvlb.overlap(true_prompts()[-1]):
            await kvlb.ask(prompt(true_prompts()[asked % TRUE_PROMPTS]))
            asked += 1

        await until(lambda: has_true_blocks(kvlb))
        assert await kvlb.metric("kvlb_mispredictions_total", cause="index_differs") >= 3
        assert await kvlb.metric("kvlb_index_faults_total", instance="m0", reason="differs") == 1
        assert await kvlb.trust() == "exact"


async def has_true_blocks(kvlb: Running) -> bool:
    held = [await kvlb.overlap(each) for each in true_prompts()]
    return held == [TRUE_BLOCKS] * TRUE_PROMPTS


async def holds(kvlb: Running, chain: Sequence[int], alias: str) -> bool:
    return await kvlb.overlap(chain, alias) > 0


async def lacks(kvlb: Running, chain: Sequence[int], alias: str) -> bool:
    return not await kvlb.overlap(chain, alias)


def swap_blocks(server: Any, url: str) -> None:
    """Put as many made-up keys in the place of what Redis has of an engine's blocks."""
    found = server.command(
        "--scan", "--pattern", f"*:{rank_digest(RankId(InstanceId(url), 0))}:*:16:0"
    )
    others = (
        "local n = redis.call('SCARD', KEYS[1]) redis.call('DEL', KEYS[1]) "
        "for i = 1, n do redis.call('SADD', KEYS[1], struct.pack('>I8', i)) end"
    )
    server.command("EVAL", others, "1", found.strip())


def copy_blocks(server: Any, source: str, target: str) -> None:
    """Add what Redis has of one engine's blocks to another's."""
    names = [
        server.command("--scan", "--pattern", f"*:{rank_digest(RankId(InstanceId(url), 0))}:*:16:0")
        for url in (target, source)
    ]
    into, more = (name.strip() for name in names)
    assert server.command("SUNIONSTORE", into, into, more)


async def plant(indexer: IndexerService, url: str, chains: Sequence[Sequence[int]]) -> None:
    """Corrupt the running indexer's tables of one rank, and with them the index."""
    rank = RankId(InstanceId(url), 0)
    writer = indexer._instances[rank.instance].ranks[rank][0]._writer
    hashes = [
        [EngineHash(int.from_bytes(each[-8:], "big")) for each in true_hashes(chain)]
        for chain in chains
    ]
    events: list[Any] = [
        BlockStored(held, None, list(chain), BLOCK)
        for held, chain in zip(hashes, chains, strict=True)
    ]
    await writer.keeper.prune(writer.blocks, lambda: events)  # it takes in whatever it is given


async def agree(kvlb: Running) -> None:
    """A leg that found what was promised: so the engine drafts no tokens."""
    await kvlb.ask(prompt(true_prompts()[0]))


async def test_reset_without_an_event_costs_one_wrong_guess(composed: Composed) -> None:
    """F03(b): the answer is right, the guess is counted as explained, and nothing else is wrong."""
    async with composed() as kvlb:
        await fill_truly(kvlb)
        await agree(kvlb)
        engine = kvlb.engines[0]
        answer = await kvlb.http.post(f"{engine.url}/reset_prefix_cache")
        assert answer.status_code == 200

        first, *others = true_prompts()
        answer = await kvlb.ask(prompt(first))

        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        await until(lambda: is_counted(kvlb, "reset_seen_late"))
        assert [await kvlb.overlap(each) for each in others] == [0] * len(others)
        assert await kvlb.overlap(first) == TRUE_BLOCKS


async def is_counted(kvlb: Running, cause: str) -> bool:
    return await kvlb.metric("kvlb_mispredictions_total", instance="m0", cause=cause) >= 1


async def test_reset_that_is_never_told_is_found_out_by_the_root(composed: Composed) -> None:
    """The event is lost for good: the first contradicted block takes its whole tree along."""
    branches = [[*tokens(800, 20), *tokens(801 + number, 20)] for number in range(5)]
    async with composed() as kvlb:
        engine = kvlb.engines[0]
        for each in branches:
            await kvlb.ask(prompt(each), url=engine.url)
        await fill_truly(kvlb)
        assert await kvlb.overlap(branches[-1]) == 40
        await kvlb.ask(prompt(branches[0]))
        engine.set_event_faults(EventFaults(hides_clears=True))
        await kvlb.http.post(f"{engine.url}/reset_prefix_cache")

        await kvlb.ask(prompt(branches[0]))

        await until(lambda: is_counted(kvlb, "ghost"))

        async def are_known() -> bool:
            return [await kvlb.overlap(each) for each in branches] == [40, 20, 20, 20, 20]

        await until(are_known)  # Redis has it a little later than it is counted


async def test_evictions_that_are_told_late_are_no_ghosts(composed: Composed) -> None:
    """A small cache under concurrent traffic: events explain what was wrong, nothing is pruned."""

    async def converse(kvlb: Running, first: int) -> None:
        for number in range(12):
            await kvlb.ask(prompt(tokens((first + number * 3) % 7, 60)))

    async with composed("1", num_blocks=300) as kvlb:
        async with asyncio.TaskGroup() as group:
            for first in range(4):
                group.create_task(converse(kvlb, first))
        await until(lambda: is_counted(kvlb, "evicted_since"))

        causes = ("ghost", "unseen", "recompute_untold", "index_differs")
        counted = {
            cause: await kvlb.metric("kvlb_mispredictions_total", cause=cause) for cause in causes
        }
        assert counted == dict.fromkeys(causes, 0)
        assert await kvlb.metric("kvlb_pruned_blocks_total") == 0
        assert await kvlb.trust() == "exact"


async def test_blocks_that_were_never_told_of_show_as_a_gap(composed: Composed) -> None:
    """The rank is told anew, in vain, and is not asked again; legs that agree take it back."""
    async with composed("1") as kvlb:
        engine = kvlb.engines[0]
        await fill_truly(kvlb)
        engine.set_event_faults(EventFaults(hides_stores=True))
        untold = [tokens(number, 20) for number in range(200, 206)]
        for each in untold:
            await kvlb.ask(prompt(each), url=engine.url)
        engine.set_event_faults(EventFaults())

        for each in untold[:3]:
            await kvlb.ask(prompt(each))
        await until(lambda: was_rebuilt(kvlb))
        await until(lambda: has_trust(kvlb, "exact"))
        for each in untold[3:]:
            await kvlb.ask(prompt(each))
        await until(lambda: has_trust(kvlb, "degraded"))

        for _ in range(20):
            await agree(kvlb)

        await until(lambda: has_trust(kvlb, "exact"))
        assert await kvlb.metric("kvlb_epochs_total", instance="m0", reason="rebuilt") == 1
        assert await kvlb.metric("kvlb_mispredictions_total", cause="unseen") == 6


async def test_reused_blocks_that_were_never_told_of_are_announced_on_request(
    composed: Composed,
) -> None:
    """Where a replay doesn't help a sampled request asks for a full report; counts stay right."""
    async with composed("1", full_report_interval_s=0.2) as kvlb:
        engine = kvlb.engines[0]
        await fill_truly(kvlb)
        engine.set_event_faults(EventFaults(hides_stores=True))
        untold = [tokens(number, 20) for number in range(200, 208)]
        for each in untold:
            await kvlb.ask(prompt(each), url=engine.url)
        engine.set_event_faults(EventFaults())
        for each in untold[:3]:
            await kvlb.ask(prompt(each))
        await until(lambda: was_rebuilt(kvlb))

        async def is_known() -> bool:
            for each in untold:
                await kvlb.ask(prompt(each))
            return any([await kvlb.overlap(each) == 20 for each in untold])

        await until(is_known)

        async def is_believed_again() -> bool:
            await agree(kvlb)
            return await kvlb.trust() == "exact"

        await until(is_believed_again)
        assert await kvlb.metric("kvlb_full_reports_total") >= 1


async def was_rebuilt(kvlb: Running) -> bool:
    return await kvlb.metric("kvlb_epochs_total", instance="m0", reason="rebuilt") >= 1


async def has_trust(kvlb: Running, trust: str, alias: str = "m0") -> bool:
    return await kvlb.trust(alias) == trust


async def test_engine_that_computes_and_publishes_nothing_is_silent(composed: Composed) -> None:
    """Entries stay, but they are believed less; the next batch takes it back."""
    async with composed(indexer={"silent_after_s": 0.3}) as kvlb:
        await fill_truly(kvlb)
        for engine in kvlb.engines:
            engine.set_event_faults(EventFaults(is_silent=True))
        numbers = iter(range(100, 200))

        async def is_silent() -> bool:
            await kvlb.ask(prompt(tokens(next(numbers), 4)))
            return "degraded" in {await kvlb.trust("m0"), await kvlb.trust("m1")}

        await until(is_silent)
        alias = "m0" if await kvlb.trust("m0") == "degraded" else "m1"
        assert await kvlb.overlap(true_prompts()[0]) == TRUE_BLOCKS
        for engine in kvlb.engines:
            engine.set_event_faults(EventFaults())
            await kvlb.ask(prompt(tokens(300, 4)), url=engine.url)

        await until(lambda: has_trust(kvlb, "exact", alias))
