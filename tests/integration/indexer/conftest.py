"""Events of one prompt's blocks, the engine that publishes them, and what an index makes of them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

from indexer.config import InstanceSource
from indexer.core.hashing import Namespace
from indexer.core.index import IndexUnavailableError, Prompt
from indexer.core.types import InstanceId, RankId
from indexer.redis_index.connection import RedisConnection
from indexer.redis_index.redis_index import RedisIndex
from indexer.redis_index.settings import RedisSettings

BLOCK_SIZE = 4
E0 = "http://e0:8000"
R0 = RankId(InstanceId(E0), 0)
PROMPT = Prompt(Namespace(model="tiny"), range(100 * BLOCK_SIZE))


@pytest.fixture
def stored() -> Callable[..., dict[str, Any]]:
    """Blocks number `first` and on of the one prompt that all tests use."""

    def event(*hashes: int, parent: int | None = None, first: int = 0) -> dict[str, Any]:
        return {
            "type": "BlockStored",
            "block_hashes": list(hashes),
            "parent_block_hash": parent,
            "token_ids": list(range(first * BLOCK_SIZE, (first + len(hashes)) * BLOCK_SIZE)),
            "block_size": BLOCK_SIZE,
        }

    return event


@pytest.fixture
def removed() -> Callable[..., dict[str, Any]]:
    """These blocks left the GPU."""

    def event(*hashes: int) -> dict[str, Any]:
        return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU"}

    return event


@pytest.fixture
def held() -> Callable[..., Awaitable[int | None]]:
    """Blocks of the prompt that `rank` is credited with; None: it isn't known."""

    async def blocks(index: Any, rank: RankId = R0) -> int | None:
        match = (await index.match(PROMPT)).get(rank)
        return None if match is None else match.tokens // BLOCK_SIZE

    return blocks


@pytest.fixture
def source() -> Callable[..., InstanceSource]:
    """Everything configured: no HTTP needed."""

    def describe(
        publisher: Any, url: str = E0, *, replay: bool = True, **more: Any
    ) -> InstanceSource:
        return InstanceSource(
            url=url,
            events=publisher.events,
            replay=publisher.replay if replay else None,
            **{"model": "tiny", "ranks": 1, **more},
        )

    return describe


Opening = Callable[[RedisSettings], AbstractAsyncContextManager[RedisIndex]]


@pytest.fixture
def opening() -> Opening:
    """Make an index that is closed when its block ends."""

    @asynccontextmanager
    async def run(settings: RedisSettings) -> AsyncIterator[RedisIndex]:
        index = RedisIndex(RedisConnection(settings))
        try:
            yield index
        finally:
            await index.aclose()

    return run


@pytest.fixture
def becomes(
    held: Callable[..., Awaitable[int | None]],
) -> Callable[[RedisIndex, int | None], Awaitable[None]]:
    """Wait, with a deadline, until the prompt's overlap is so many blocks."""

    async def wait(index: RedisIndex, blocks: int | None) -> None:
        async with asyncio.timeout(20):
            while True:
                try:
                    if await held(index) == blocks:
                        return
                except IndexUnavailableError:
                    pass
                await asyncio.sleep(0.01)

    return wait
