"""Redis has other blocks of a rank than the indexer that wrote it: legs tell, and it is written anew."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from indexer.core.types import InstanceId, RankId
from indexer.redis_index.keys import rank_digest

Composed = Callable[..., AbstractAsyncContextManager[Any]]
MakeTokens = Callable[[int, int], list[int]]
MOST_REQUESTS = 20


@pytest.mark.parametrize("composed", ["redis", "processes"], indirect=True)
async def test_ghosts_of_redis_alone_go_when_it_is_written_anew(
    composed: Composed, redis_server: Any, tokens: MakeTokens
) -> None:
    """Somebody added them to the rank's set: the indexer's tables, and its engine, never had them."""
    chains = [tokens(700 + number, 10) for number in range(100)]
    # Heartbeats count the keys, too, and the first comes at any part of the pause between two: here
    # reports have to find it out.
    async with composed(heartbeat_s=100_000.0) as kvlb:
        await kvlb.fill_truly()
        for each in chains:
            await kvlb.ask(each, url=kvlb.engines[1].url)
        await kvlb.until(lambda: kvlb.holds(chains[-1], "m1"))
        copy_blocks(redis_server, kvlb.engines[1].url, kvlb.engines[0].url)
        await kvlb.http.post(f"{kvlb.engines[1].url}/reset_prefix_cache")
        await kvlb.ask(tokens(1, 1), url=kvlb.engines[1].url)  # its next step tells of it
        await kvlb.until(lambda: kvlb.lacks(chains[-1], "m1"))
        assert await kvlb.overlap(chains[-1]) == 10

        for number in range(MOST_REQUESTS):
            await kvlb.ask(chains[number])
            if await kvlb.overlap(chains[-1]) == 0:
                break

        await kvlb.until(lambda: kvlb.lacks(chains[-1], "m0"))
        await kvlb.until(kvlb.has_true_blocks)  # none while it is being written
        assert [await kvlb.overlap(each) for each in chains[MOST_REQUESTS:]] == [0] * 80
        assert await kvlb.metric("kvlb_mispredictions_total", cause="index_differs") >= 3
        assert await kvlb.metric("kvlb_index_faults_total", instance="m0", reason="differs") >= 1
        assert await kvlb.trust() == "exact"


def copy_blocks(server: Any, source: str, target: str) -> None:
    """Add what Redis has of one engine's blocks to another's."""
    names = [
        server.command("--scan", "--pattern", f"*:{rank_digest(RankId(InstanceId(url), 0))}:*:16:0")
        for url in (target, source)
    ]
    into, more = (name.strip() for name in names)
    assert server.command("SUNIONSTORE", into, into, more)


@pytest.mark.parametrize("composed", ["redis", "processes"], indirect=True)
async def test_true_blocks_that_redis_alone_lost_come_back_when_it_is_written_anew(
    composed: Composed, redis_server: Any
) -> None:
    """Somebody put other keys in their place, as many: no count shows it, and nothing is promised."""
    async with composed() as kvlb:
        await kvlb.fill_truly()
        await kvlb.agree()
        swap_blocks(redis_server, kvlb.engines[0].url)
        assert await kvlb.overlap(kvlb.true_prompts[0]) == 0

        asked = 0
        while asked < MOST_REQUESTS and not await kvlb.overlap(kvlb.true_prompts[-1]):
            await kvlb.ask(kvlb.true_prompts[asked % len(kvlb.true_prompts)])
            asked += 1

        await kvlb.until(kvlb.has_true_blocks)
        assert await kvlb.metric("kvlb_mispredictions_total", cause="index_differs") >= 3
        assert await kvlb.metric("kvlb_index_faults_total", instance="m0", reason="differs") == 1
        assert await kvlb.trust() == "exact"


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
