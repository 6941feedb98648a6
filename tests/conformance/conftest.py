"""The backends that every test in this folder runs against."""

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from indexer.core.index import BlockIndex
from indexer.memory_index import MemoryIndex
from indexer.redis_index.connection import RedisConnection
from indexer.redis_index.redis_index import RedisIndex

PATIENT = {
    "connect_timeout_s": 60.0,
    "read_timeout_s": 60.0,
    "write_timeout_s": 60.0,
    "lease_s": 3600.0,
}
"""What Redis answers is compared, not when. On a busy machine one answer in thousands takes more than a
second: hypothesis then found that the same steps had ended otherwise ("inconsistent data")."""


@pytest.fixture(
    scope="session", params=[pytest.param("memory", id="memory"), pytest.param("redis", id="redis")]
)
def make_index(request: pytest.FixtureRequest) -> Callable[[], BlockIndex]:
    """A new, empty index at each call. Add a backend by adding a parameter."""
    if request.param == "memory":
        return MemoryIndex
    server = request.getfixturevalue("redis_server")
    return lambda: RedisIndex(RedisConnection(server.settings(**PATIENT)))


@pytest.fixture(scope="session")
def close_index() -> Callable[[BlockIndex], Awaitable[None]]:
    """Give back what an index holds open."""

    async def close(index: BlockIndex) -> None:
        if isinstance(index, RedisIndex):
            await index.aclose()

    return close


@pytest.fixture
async def index(
    make_index: Callable[[], BlockIndex], close_index: Callable[[BlockIndex], Awaitable[None]]
) -> AsyncIterator[BlockIndex]:
    """An empty index."""
    index = make_index()
    yield index
    await close_index(index)
