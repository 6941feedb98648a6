"""Looks after client connections on which nothing happens: one timer for all of them.

A server hears of what comes. Of what doesn't come it only learns by looking.

Cost: nothing per request; one `look` per connection every `LOOK_S`, and no timer without connections.
"""

import asyncio
from typing import Final, Protocol

LOOK_S: Final = 0.5


class Connection(Protocol):
    """Who is looked after."""

    def look(self, now_s: float) -> None:
        """See whether its time is over."""
        ...


class Lookout:
    """One per server."""

    def __init__(self, look_s: float = LOOK_S) -> None:
        self._look_s = look_s
        self._watched: set[Connection] = set()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, connection: Connection) -> None:
        self._watched.add(connection)
        if self._timer is None:
            self._look_later()

    def remove(self, connection: Connection) -> None:
        self._watched.discard(connection)

    def _look_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._look_s, self._look)

    def _look(self) -> None:
        self._timer = None
        now_s = asyncio.get_running_loop().time()
        for connection in tuple(self._watched):
            connection.look(now_s)
        if self._watched:
            self._look_later()
