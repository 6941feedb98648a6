"""Collects the objects of streams that have just begun, a few streams at a time.

A stream leaves some 65 objects that garbage collection walks, and that live as long as it does. Python
counts what was made less what was freed, so where streams begin as fast as others end it waits until
thousands are young, and walks them at once: 4 to 6 ms in which every other stream stands still. A few
streams' objects take 0.1 to 0.3 ms, and all of it together takes the same.

Each part sets Python's own count back. So what outlived its part is looked through here as well,
now and then: a stream that failed may have left a cycle.

Not for what isn't streamed: it is gone before it would be walked.
"""

import asyncio
import gc
from collections.abc import Callable
from functools import partial
from typing import Final

STREAMS: Final = 4
APART_S: Final = 0.025
"""Short streams, a thousand a second, are gone by themselves: at most 40 collections a second."""
MIDDLE_EVERY, ALL_EVERY = 2_000, 50_000
"""Parts, so not more often than every 50 s and every 20 minutes: 10 ms where 256 streams run."""


class YoungObjects:
    """One per process."""

    def __init__(
        self, *, clock: Callable[[], float], collect: Callable[[int], object] = gc.collect
    ) -> None:
        """`collect` takes a generation."""
        self._clock = clock
        self._collect = collect
        self._streams = 0
        self._parts = 0
        self._collected_s = float("-inf")

    def stream_began(self) -> None:
        """A stream's first token is on its way, and there is more to come."""
        self._streams += 1
        if self._streams < STREAMS:
            return
        now_s = self._clock()
        if now_s - self._collected_s >= APART_S:
            self._streams, self._collected_s = 0, now_s
            self._parts += 1
            # What was written goes out at the end of this turn of the loop: first that.
            asyncio.get_running_loop().call_soon(partial(self._collect, self._generation()))

    def _generation(self) -> int:
        if self._parts % MIDDLE_EVERY:
            return 0
        return 1 if self._parts % ALL_EVERY else 2
