"""How far each client's share of one line is used up, in tokens. Pure.

Rules:

1. Start-time fair queueing: a ticket begins where the line's own progress is, or where its client's last
   ticket ended, whichever is later. So a client that was idle saves nothing up.
2. Who leaves without being served has used nothing, if nothing of its client came after it.
3. A client is known while its requests wait. Beyond that only those are that were served and are ahead of
   the line's progress: else who asks again at once would go before all others. Of these at most
   `max_served`, those that were served last.

Cost: O(1) per ticket.
"""

from collections import OrderedDict


class Share:
    """A ticket's part of its client's share."""

    __slots__ = ("begin", "client", "end")

    def __init__(self, client: str, begin: float, end: float) -> None:
        self.client = client
        self.begin = begin
        self.end = end


class ClientShares:
    """Of one line."""

    def __init__(self, max_served: int) -> None:
        self._max_served = max_served
        self._progress = 0.0
        self._ends: dict[str, float] = {}
        """Of clients whose requests wait."""
        self._waiting: dict[str, int] = {}
        """How many of each."""
        self._served: OrderedDict[str, float] = OrderedDict()
        """Where the others' shares end."""

    def __len__(self) -> int:
        return len(self._ends) + len(self._served)

    def begin(self, client: str) -> float:
        """Where a ticket of this client would begin."""
        end = self._ends.get(client)
        if end is None:
            end = self._served.get(client, 0.0)
        return max(self._progress, end)

    def enter(self, client: str, cost: float) -> Share:
        """A ticket of this client waits."""
        begin = self.begin(client)
        self._served.pop(client, None)
        self._ends[client] = begin + cost
        self._waiting[client] = self._waiting.get(client, 0) + 1
        return Share(client, begin, begin + cost)

    def leave(self, share: Share, *, is_served: bool) -> None:
        """It waits no more; once per ticket."""
        client = share.client
        if is_served:
            self._progress = max(self._progress, share.begin)
        elif self._ends[client] == share.end:
            self._ends[client] = share.begin
        self._waiting[client] -= 1
        if self._waiting[client]:
            return
        del self._waiting[client]
        end = self._ends.pop(client)
        if end > self._progress:
            self._served[client] = end
            if len(self._served) > self._max_served:
                self._served.popitem(last=False)

    def clear(self) -> None:
        """The line is empty: all begin anew."""
        self._ends.clear()
        self._waiting.clear()
        self._served.clear()
