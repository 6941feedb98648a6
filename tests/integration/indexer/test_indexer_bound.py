"""A rank with more blocks than its tables may hold, and a batch longer than one slice."""

import asyncio
from typing import Any

import pytest

from indexer.config import InstanceSource
from indexer.core.hashing import Namespace
from indexer.core.index import BlockIndex, Prompt
from indexer.core.types import InstanceId, RankId, Trust
from indexer.redis_index.connection import RedisConnection
from indexer.redis_index.redis_index import RedisIndex

SIZE = 4
URL = "http://e0:8000"
RANK = RankId(InstanceId(URL), 0)


def stored(name: int, blocks: int = 1) -> dict[str, Any]:
    """A prompt of its own."""
    return {
        "type": "BlockStored",
        "block_hashes": [name * 10_000 + at for at in range(blocks)],
        "parent_block_hash": None,
        "token_ids": tokens(name, blocks),
        "block_size": SIZE,
        "medium": "GPU",
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


def tokens(name: int, blocks: int) -> list[int]:
    return [name * 100_000 + at for at in range(blocks * SIZE)]


def source(engine: Any) -> InstanceSource:
    return InstanceSource(
        url=URL, events=engine.events, replay=engine.replay, model="tiny", ranks=1
    )


async def overlap(index: BlockIndex, name: int, blocks: int = 1) -> int:
    prompt = Prompt(Namespace(model="tiny"), [*tokens(name, blocks), 0])
    return (await index.match(prompt))[RANK].tokens // SIZE


async def is_written(index: BlockIndex, name: int, blocks: int = 1) -> None:
    """Wait, with a deadline: Redis has it a little later than the tables."""
    async with asyncio.timeout(20):
        while True:
            if await overlap(index, name, blocks) == blocks:
                return
            await asyncio.sleep(0.01)


@pytest.fixture(params=["memory", "redis"])
async def index(request: pytest.FixtureRequest) -> Any:
    """None: the one in memory."""
    if request.param == "memory":
        yield None
        return
    server = request.getfixturevalue("redis_server")
    index = RedisIndex(RedisConnection(server.settings()))
    yield index
    await index.aclose()


async def test_f15_full_tables_forget_the_oldest_and_say_so(
    publishing: Any, indexing: Any, index: Any
) -> None:
    """F15: the cap holds on both backends, the rank is degraded, and a clear is the way back."""
    async with (
        publishing() as engine,
        indexing(source(engine), index=index, max_blocks_per_rank=20) as (service, used),
    ):
        await engine.subscribed()
        for name in range(50):
            engine.publish(stored(name))
        await service.caught_up(RANK, 49)
        status = await service.until(RANK, lambda now: now.trust is Trust.DEGRADED)

        assert (status.trust_reason, status.held_blocks) == ("bound_hit", 20)
        assert status.counts.set_aside == {"bound_evicted": 30}
        await is_written(used, 49)
        assert (await used.size()).entries == 20
        assert [await overlap(used, name) for name in (0, 29, 30, 49)] == [0, 0, 1, 1]

        engine.publish({"type": "AllBlocksCleared"})
        await service.until(RANK, lambda now: now.trust is Trust.EXACT)
        assert (await used.size()).entries == 0  # nobody is told exact before it is written


async def test_batch_longer_than_a_slice_is_applied_whole(
    publishing: Any, indexing: Any, index: Any
) -> None:
    """Cut in pieces in memory, as one in Redis: in the end the same."""
    async with publishing() as engine, indexing(source(engine), index=index) as (service, used):
        await engine.subscribed()
        engine.publish(stored(1, blocks=1000), stored(2))
        await service.caught_up(RANK, 0)
        await is_written(used, 1, blocks=1000)
        status = await service.until(RANK, lambda now: now.trust is Trust.EXACT)

        assert status.held_blocks == 1001
        assert status.counts.set_aside == {}
