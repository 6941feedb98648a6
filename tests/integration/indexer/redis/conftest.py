"""An engine, an indexer that follows it, and the index in Redis that it writes."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

from indexer.config import InstanceSource
from indexer.core.index import IndexUnavailableError
from indexer.core.types import InstanceId, RankId
from indexer.redis_index.connection import RedisConnection
from indexer.redis_index.redis_index import RedisIndex
from indexer.redis_index.settings import RedisSettings
from indexer.service import IndexerService

R0 = RankId(InstanceId("http://e0:8000"), 0)

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


Following = Callable[..., AbstractAsyncContextManager[tuple[RedisIndex, IndexerService]]]


@pytest.fixture
def following(opening: Opening, indexing: Any, source: Callable[..., InstanceSource]) -> Following:
    """Run an indexer of an engine, over an index of its own."""

    @asynccontextmanager
    async def run(
        engine: Any, settings: RedisSettings, **more: Any
    ) -> AsyncIterator[tuple[RedisIndex, IndexerService]]:
        async with (
            opening(settings) as index,
            indexing(source(engine, **more), index=index) as (service, _),
        ):
            yield index, service

    return run


@pytest.fixture
def writing(
    publishing: Any, following: Following, stored: Callable[..., dict[str, Any]]
) -> Callable[[RedisSettings], AbstractAsyncContextManager[tuple[Any, RedisIndex, IndexerService]]]:
    """Run an engine that has published two blocks, and an indexer that has taken them in."""

    @asynccontextmanager
    async def run(
        settings: RedisSettings,
    ) -> AsyncIterator[tuple[Any, RedisIndex, IndexerService]]:
        async with publishing() as engine, following(engine, settings) as (index, service):
            await engine.subscribed()
            engine.publish(stored(1, 2))
            await service.caught_up(R0, 0)
            yield engine, index, service

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
