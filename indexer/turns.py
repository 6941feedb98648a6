"""Shares the event loop out: of all ranks that have much to do, one goes on per turn of the loop.

So a request that is routed on the same loop waits for one turn, however many ranks catch up. A loop
looks for what has arrived after what was already due: the first round finds it, the next serves it.
"""

import asyncio


class Turns:
    """Of one event loop."""

    def __init__(self) -> None:
        self._next = asyncio.Lock()

    async def pass_on(self) -> None:
        """Let everybody else go on, and one of those who wait here; return when it is one's turn."""
        async with self._next:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
