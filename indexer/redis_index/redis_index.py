"""A `BlockIndex` and a `RankJournal` in Redis. Build it with `RedisIndex(RedisConnection(settings))`.

The indexer's process uses all of it. A process that only routes needs `reader.RedisIndexReader`.
"""

import time
from collections.abc import Callable

from indexer.core.index import PrefixMatch, Prompt
from indexer.core.types import RankId
from indexer.redis_index.connection import RedisConnection
from indexer.redis_index.reader import RedisIndexReader
from indexer.redis_index.writer import RedisIndexWriter


class RedisIndex(RedisIndexWriter):
    """Writer and reader over one pool of connections."""

    def __init__(
        self, connection: RedisConnection, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(connection, clock)
        self._reader = RedisIndexReader(connection, clock)

    async def aclose(self) -> None:
        """Close the connections. What was written stays until its lease ends."""
        await self._connection.aclose()

    async def match(self, prompt: Prompt) -> dict[RankId, PrefixMatch]:
        return await self._reader.match(prompt)

    async def look(self, model: str) -> None:
        await self._reader.look(model)
