"""How far each client's share of one line is used up, in tokens. Pure.

Rules:

1. Start-time fair queueing: a client that begins to wait begins where the line's own progress is, or where
   what it was served before ended, whichever is later. So a client that was idle saves nothing up.
2. What is served moves its client on by its cost, and the line's progress to where the client was. Who
   leaves without being served has used nothing.
3. A client is known while its requests wait. Beyond that only those are that were served and are ahead of
   the line's progress: else who asks again at once would go before all others. Of these at most
   `max_served`, those that were served last.

Cost: O(1) per ticket.
"""

from collections import OrderedDict


class ClientShares:
    """Of one line."""

    def __init__(self, max_served: int) -> None:
        self._max_served = max_served
        self._progress = 0.0
        self._begins: dict[str, float] = {}
        """Of clients whose requests wait."""
        self._waiting: dict[str, int] = {}
        """How many of each."""
        self._served: OrderedDict[str, float] = OrderedDict()
        """Where the others begin, if they come back."""

    def __len__(self) -> int:
        return len(self._begins) + len(self._served)

    def begin(self, client: str) -> float:
        """Where the next that is served of this client begins; smaller goes first.

        It never falls while any of its requests waits.
        """
        begin = self._begins.get(client)
        return max(self._progress, self._served.get(client, 0.0)) if begin is None else begin

    def enter(self, client: str) -> None:
        """One more of this client waits."""
        self._begins[client] = self.begin(client)
        self._served.pop(client, None)
        self._waiting[client] = self._waiting.get(client, 0) + 1

    def serve(self, client: str, cost: float) -> None:
        """One of those that wait is served; it has to `leave`, too."""
        begin = self._begins[client]
        self._progress = max(self._progress, begin)
        self._begins[client] = begin + cost

    def leave(self, client: str) -> None:
        """One of this client waits no more."""
        self._waiting[client] -= 1
        if self._waiting[client]:
            return
        del self._waiting[client]
        begin = self._begins.pop(client)
        if begin > self._progress:
            self._served[client] = begin
            if len(self._served) > self._max_served:
                self._served.popitem(last=False)

    def clear(self) -> None:
        """The line is empty: all begin anew."""
        self._begins.clear()
        self._waiting.clear()
        self._served.clear()
