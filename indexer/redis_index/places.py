"""Lets a few updates go to Redis at a time.

A lookup that comes meanwhile waits behind a few, and what has to wait grows into fewer and longer
updates. Nobody waits long: while Redis hangs, all ranks shall find that out at about the same time.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_LONGEST_WAIT_S = 0.05


class Places:
    """As many as updates may be on the way at once."""

    def __init__(self, most: int) -> None:
        self._free = asyncio.Semaphore(most)

    @property
    def are_taken(self) -> bool:
        return self._free.locked()

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """A place, or after a while none."""
        is_mine = await self._take()
        try:
            yield
        finally:
            if is_mine:
                self._free.release()

    async def _take(self) -> bool:
        if not self._free.locked():
            return await self._free.acquire()
        try:
            async with asyncio.timeout(_LONGEST_WAIT_S):
                return await self._free.acquire()
        except TimeoutError:
            return False
