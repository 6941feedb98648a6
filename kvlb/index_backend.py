"""Opens the index that the settings name: in this process's memory, or in Redis."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import structlog

from indexer.core.index import BlockIndex, BlockIndexError, PrefixLookup
from indexer.core.journal import RankJournal
from indexer.memory_index import MemoryIndex
from indexer.redis_index.connection import RedisConnection
from indexer.redis_index.reader import RedisIndexReader
from indexer.redis_index.redis_index import RedisIndex
from indexer.redis_index.reports import RedisReports
from indexer.redis_index.server_check import check_server
from indexer.redis_index.settings import RedisSettings

_logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenIndex:
    """What a process that writes needs."""

    index: BlockIndex
    journal: RankJournal | None
    """The index too, if what it has outlives the process."""
    reports: RedisReports | None
    """What balancers of other processes report, if they can reach it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenReader:
    """What a process that only looks things up needs."""

    index: PrefixLookup
    reports: RedisReports


@asynccontextmanager
async def open_index(settings: RedisSettings | None) -> AsyncIterator[OpenIndex]:
    """All of it: for a process that writes. Without Redis it lives in this process's memory.

    When the block ends its ranks are released, so that another indexer goes on at once.
    """
    if settings is None:
        yield OpenIndex(index=MemoryIndex(), journal=None, reports=None)
        return
    async with _connected(settings) as connection:
        index = RedisIndex(connection)
        await check_server(connection)
        try:
            yield OpenIndex(index=index, journal=index, reports=RedisReports(connection))
        finally:
            try:
                await index.release()
            except BlockIndexError as error:
                _logger.warning("ranks_not_released", error=str(error))


@asynccontextmanager
async def open_reader(settings: RedisSettings) -> AsyncIterator[OpenReader]:
    """For a process that only looks things up."""
    async with _connected(settings) as connection:
        yield OpenReader(index=RedisIndexReader(connection), reports=RedisReports(connection))


@asynccontextmanager
async def _connected(settings: RedisSettings) -> AsyncIterator[RedisConnection]:
    """With connections that are opened ahead of need."""
    connection = RedisConnection(settings)
    try:
        async with asyncio.TaskGroup() as group:
            ahead = group.create_task(connection.run_ahead())
            yield connection
            ahead.cancel()
    except ExceptionGroup as group_error:
        # Callers know the block's own error by its type, not as one of a group.
        raise group_error.exceptions[0] from group_error
    finally:
        await connection.aclose()
