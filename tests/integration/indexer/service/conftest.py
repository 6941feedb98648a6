"""What an engine lists and publishes, and what the indexer makes of it."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import httpx
import pytest

from indexer.config import IndexerConfig, InstanceSource
from indexer.core.hashing import Namespace
from indexer.core.index import BlockIndex, Prompt
from indexer.core.types import InstanceId, RankId
from indexer.sources import find_sources

TOKENS = range(64)


@pytest.fixture
def stored() -> Callable[..., dict[str, Any]]:
    """The first blocks of the one prompt."""

    def event(*hashes: int) -> dict[str, Any]:
        return {
            "type": "BlockStored",
            "block_hashes": list(hashes),
            "parent_block_hash": None,
            "token_ids": list(TOKENS[: 16 * len(hashes)]),
            "block_size": 16,
        }

    return event


@pytest.fixture
def published() -> Callable[..., dict[str, Any]]:
    """One rank's entry in `/kv_event_sources`."""

    def entry(publisher: Any, **more: Any) -> dict[str, Any]:
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{publisher.port}",
            "replay_endpoint": f"tcp://0.0.0.0:{publisher.replay_port}",
            "topic": "kv-events",
            **more,
        }

    return entry


@pytest.fixture
def followed(
    engine_http: Any,
    publishing: Any,
    indexing: Any,
    published: Callable[..., dict[str, Any]],
) -> Callable[..., AbstractAsyncContextManager[tuple[Any, Any, Any, BlockIndex]]]:
    """Run an engine, its one rank's publisher, the indexer that finds both, and its index.

    `events` were published before; `described` is what the indexer is told beside the address.
    """

    @asynccontextmanager
    async def run(
        *events: Any, index: BlockIndex | None = None, **described: Any
    ) -> AsyncIterator[tuple[Any, Any, Any, BlockIndex]]:
        async with engine_http() as engine, publishing() as publisher:
            engine.sources = {"0": published(publisher)}
            if events:
                publisher.publish(*events)
            source = InstanceSource(url=engine.url, **described)
            async with indexing(source, index=index) as (service, used):
                yield engine, publisher, service, used

    return run


@pytest.fixture
def rank_of() -> Callable[..., RankId]:
    """A rank of an engine."""

    def name(engine: Any, rank: int = 0) -> RankId:
        return RankId(InstanceId(engine.url), rank)

    return name


@pytest.fixture
def held() -> Callable[..., Awaitable[int | None]]:
    """Blocks of the prompt that a rank is credited with; None: it isn't known."""

    async def blocks(index: BlockIndex, rank: RankId, model: str = "tiny") -> int | None:
        match = (await index.match(Prompt(Namespace(model=model), TOKENS))).get(rank)
        return None if match is None else match.tokens // 16

    return blocks


@pytest.fixture
def find() -> Callable[..., Awaitable[Any]]:
    """Ask an engine for its sources."""

    async def ask(engine: InstanceSource, **settings: Any) -> Any:
        async with httpx.AsyncClient() as http:
            return await find_sources(engine, config=IndexerConfig(**settings), http=http)

    return ask
