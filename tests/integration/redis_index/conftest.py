"""Processes that share one Redis, and what they write of the ranks of one model."""

from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

import pytest

from indexer.core.hashing import Namespace
from indexer.core.index import BlocksHeld, Change, Prompt, RankUpdate
from indexer.core.types import BlockKey, RankId, Tier
from indexer.redis_index.connection import RedisConnection
from indexer.redis_index.reader import RedisIndexReader
from indexer.redis_index.redis_index import RedisIndex
from indexer.redis_index.settings import RedisSettings

MODEL = "secret-model-name"
PROMPT = Prompt(Namespace(model=MODEL, lora="sql", cache_salt="tenant"), range(41))


@pytest.fixture
def update() -> Callable[..., RankUpdate]:
    """Changes of one rank of the model."""

    def make(rank: RankId, *changes: Change, epoch: int = 1, seq: int = 0) -> RankUpdate:
        return RankUpdate(rank=rank, model=MODEL, epoch=epoch, seq=seq, changes=changes)

    return make


@pytest.fixture
def held() -> Callable[[Sequence[BlockKey]], BlocksHeld]:
    """These blocks are on the GPU."""
    return lambda blocks: BlocksHeld(0, Tier.GPU, blocks)


@pytest.fixture
def settings(redis_server: Any) -> RedisSettings:
    """Those of all who share the index."""
    chosen: RedisSettings = redis_server.settings()
    return chosen


@pytest.fixture
async def index(settings: RedisSettings) -> AsyncIterator[RedisIndex]:
    """An indexer's."""
    index = RedisIndex(RedisConnection(settings))
    yield index
    await index.aclose()


@pytest.fixture
async def other(settings: RedisSettings) -> AsyncIterator[RedisIndex]:
    """Another process on the same Redis."""
    index = RedisIndex(RedisConnection(settings))
    yield index
    await index.aclose()


@pytest.fixture
async def reader(settings: RedisSettings) -> AsyncIterator[RedisIndexReader]:
    """A balancer's."""
    connection = RedisConnection(settings)
    yield RedisIndexReader(connection)
    await connection.aclose()


@pytest.fixture
def overlap() -> Callable[..., Coroutine[Any, Any, dict[RankId, int]]]:
    """Tokens of the prompt per rank."""

    async def ask(reader: RedisIndexReader | RedisIndex) -> dict[RankId, int]:
        return {rank: match.tokens for rank, match in (await reader.match(PROMPT)).items()}

    return ask


@pytest.fixture
def keys_under() -> Callable[[Any, RedisSettings], list[str]]:
    """All that is kept under the prefix of these settings."""

    def find(redis_server: Any, settings: RedisSettings) -> list[str]:
        found: str = redis_server.command("--scan", "--pattern", f"{settings.prefix}:*")
        return found.split()

    return find
