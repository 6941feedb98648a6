"""An index in Redis, and the wait for what it comes to say."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest

from indexer.core.index import IndexUnavailableError
from indexer.redis_index.connection import RedisConnection
from indexer.redis_index.redis_index import RedisIndex
from indexer.redis_index.settings import RedisSettings

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
