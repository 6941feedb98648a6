"""Run-time changes of the fleet in Redis: what one balancer is told, all of them and the indexer know.

One hash, one field per change (`balancer.core.fleet.changes`), read whole once a second: it holds no more
than operators and registering engines put there.
"""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

from balancer.core.fleet.changes import ChangesUnavailableError, Values
from balancer.fleet.members import ChangeStore
from indexer.core.index import BlockIndexError, IndexSpoiltError
from indexer.redis_index.connection import RedisConnection
from indexer.redis_index.keys import fleet_key
from indexer.redis_index.settings import RedisSettings


class SharedChanges:
    """A `ChangeStore` for every process around one Redis."""

    def __init__(self, connection: RedisConnection) -> None:
        self._connection = connection
        self._key = fleet_key(connection.settings.prefix)

    async def load(self) -> Values:
        answer = await self._ask("HGETALL")
        pairs = zip(answer[::2], answer[1::2], strict=True)
        return {name.decode(errors="replace"): value for name, value in pairs}

    async def put(self, name: str, value: bytes) -> None:
        await self._ask("HSET", name, value)

    async def drop(self, names: Iterable[str]) -> None:
        if fields := list(names):
            await self._ask("HDEL", *fields)

    async def _ask(self, command: str, *parts: str | bytes) -> Any:
        try:
            try:
                return await self._connection.ask(command, self._key, *parts)
            except IndexSpoiltError:
                await self._connection.remove_unless(b"hash", self._key)
                raise
        except BlockIndexError as error:
            raise ChangesUnavailableError(str(error)) from error


@asynccontextmanager
async def open_changes(settings: RedisSettings | None) -> AsyncIterator[ChangeStore | None]:
    """None without Redis: then changes are the process's own."""
    if settings is None:
        yield None
        return
    connection = RedisConnection(settings)
    try:
        yield SharedChanges(connection)
    finally:
        await connection.aclose()
