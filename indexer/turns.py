"""Shares the event loop out: of all ranks that have much to do, one goes on per turn of the loop.

So a request that is routed on the same loop waits for one turn, however many ranks catch up. A loop
looks for what has arrived after what was already due: the first round finds it, the next serves it.
"""

import asyncio
from typing import Final

TURN_S: Final = 0.0001
"""How long one rank may keep the loop, plus the batch begun in it: a request, routed on the same one, is to
take less than 1 ms, of which its own look-up may need 0.7. Passing on costs 0.01 ms, only where there is a
backlog. At 50,000 blocks/s one stretch in a hundred is 0.29 ms; it was 0.35 with turns of 0.15."""

WRITING_TURN_S: Final = 0.0003
"""The same where the index is written to: a lookup takes longer there, and each turn ends in updates,
which cost less the more they hold. Turns of 0.1 ms made them half as long, and a tenth dearer per block."""


class Turns:
    """Of one event loop."""

    def __init__(self, turn_s: float = TURN_S) -> None:
        self.turn_s = turn_s
        self._next = asyncio.Lock()

    async def pass_on(self) -> None:
        """Let everybody else go on, and one of those who wait here; return when it is one's turn."""
        async with self._next:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
