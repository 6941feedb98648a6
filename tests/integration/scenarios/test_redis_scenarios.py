"""X1: Redis fails in every way while clients ask; none of them notices."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

PROMPTS = [list(range(start, start + 256)) for start in range(1_000, 6_000, 500)]


@pytest.fixture
async def outage(
    kvlb_up: Any, engines_up: Any, describe: Callable[..., dict[str, Any]], own_redis: Any
) -> AsyncIterator[tuple[Any, Any]]:
    """A warm fleet of two with its index in Redis; the Redis may be hurt."""
    server = own_redis()
    server.start()
    redis = server.settings(heartbeat_s=0.1, write_timeout_s=0.5, read_timeout_s=0.5)
    routing = {"lookup_timeout_s": 0.3}
    async with engines_up("2") as fleet:
        instances = [describe(each) for each in fleet.engines]
        async with kvlb_up(instances, redis=redis, routing=routing) as kvlb:
            await kvlb.all_known(["m0", "m1"])
            await ask_all(kvlb)
            await kvlb.until(lambda: is_warm(kvlb))
            yield kvlb, server


async def ask_all(kvlb: Any) -> list[int]:
    """Every prompt at once."""
    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(kvlb.complete(prompt)) for prompt in PROMPTS]
    return [each.result().status_code for each in asked]


async def is_warm(kvlb: Any) -> bool:
    """Somebody is credited with each prompt, by events and not by guesses."""
    overlaps = [await kvlb.overlaps(prompt) for prompt in PROMPTS]
    return all(max(each.values()) >= 240 for each in overlaps)


async def lookups(kvlb: Any, outcome: str) -> float:
    series = await kvlb.series("kvlb_index_lookups_total")
    return float(series.get(f'kvlb_index_lookups_total{{outcome="{outcome}"}}', 0))


async def test_x1_redis_stopped_and_back_empty(outage: tuple[Any, Any]) -> None:
    """By load alone while it is gone; what was published then is there once it is back."""
    kvlb, server = outage
    server.stop()
    during = await ask_all(kvlb)
    failed = await lookups(kvlb, "failed")
    server.start()
    await kvlb.until(lambda: is_warm(kvlb))
    after = await ask_all(kvlb)

    assert {*during, *after} == {200}
    assert failed >= 1


async def test_x1_redis_that_hangs_costs_the_lookup_not_the_answer(
    outage: tuple[Any, Any],
) -> None:
    """Every answer is there before Redis has said a word."""
    kvlb, server = outage
    server.pause()
    during = await ask_all(kvlb)
    unanswered = await lookups(kvlb, "timeout") + await lookups(kvlb, "failed")
    server.resume()
    await kvlb.until(lambda: is_warm(kvlb))

    assert set(during) == {200}
    assert unanswered >= 1


async def test_x1_read_only_redis_is_read(outage: tuple[Any, Any]) -> None:
    """It became a replica: what it holds is used, what can't be written comes later."""
    kvlb, server = outage
    server.command("REPLICAOF", "127.0.0.1", "1")
    newer = list(range(9_000, 9_256))
    during = [*await ask_all(kvlb), (await kvlb.complete(newer)).status_code]
    server.command("REPLICAOF", "NO", "ONE")

    async def is_written() -> bool:
        return bool(max((await kvlb.overlaps(newer)).values()) >= 240)

    await kvlb.until(is_written)
    assert set(during) == {200}
