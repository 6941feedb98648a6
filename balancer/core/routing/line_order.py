"""In which order a line is served, as far as nobody is refused. Pure.

Rules:

1. A smaller priority number goes first: that of the client's class, then that of the request, as in
   vLLM. Within one priority clients get shares of tokens by their weights (`core.routing.client_shares`),
   whoever asks more often.
2. Within one client and priority, whose prompt is cached for the larger part goes first, in tenths; of
   equals, first come, first served. Where not all can be served, what was computed for the last turn of
   a conversation is worth more than what is yet to be computed for a new one.

Cost: O(log n) per ticket, O(n) for `last`. What is kept is of those that wait, and as much again of those
that left.
"""

from heapq import heapify, heappop, heappush, heapreplace
from typing import Final

from balancer.core.routing.client_classes import Client
from balancer.core.routing.client_shares import ClientShares

TENTHS: Final = 10
_FEW: Final = 64
"""So many places that were left may lie in a heap beside as many as wait."""


class Group:
    """Those that wait of one client in one priority."""

    __slots__ = ("_heap", "client", "number", "priority", "waiting")

    def __init__(self, client: Client, priority: int, number: int) -> None:
        """`number`: of its first place."""
        self.client = client
        self.priority = priority
        self.number = number
        self.waiting: dict[int, Place] = {}
        self._heap: list[tuple[int, int]] = []

    @property
    def level(self) -> tuple[int, int]:
        """Smaller goes first, whoever it is."""
        return self.client.priority, self.priority

    def add(self, place: "Place") -> None:
        self.waiting[place.number] = place
        heappush(self._heap, place.rank)

    def remove(self, place: "Place") -> None:
        del self.waiting[place.number]
        if len(self._heap) > 2 * len(self.waiting) + _FEW:
            self._heap = [each.rank for each in self.waiting.values()]
            heapify(self._heap)

    def first(self) -> int:
        """The number of who goes first. There is somebody."""
        while self._heap[0][-1] not in self.waiting:
            heappop(self._heap)
        return self._heap[0][-1]


class Place:
    """One that waits."""

    __slots__ = ("cost", "group", "number", "rank")

    def __init__(self, group: Group, number: int, cached_share: float, cost: float) -> None:
        self.group = group
        self.number = number
        self.rank = (-int(cached_share * TENTHS), number)
        """In its group: smaller goes first."""
        self.cost = cost
        """Of its client's share, in tokens by its weight."""


class LineOrder:
    """Who of those that wait goes first, and who last."""

    def __init__(self, max_served: int) -> None:
        self._shares = ClientShares(max_served)
        self._groups: dict[tuple[int, int, str], Group] = {}
        self._order: list[tuple[int, int, float, int, Group]] = []
        """A heap with one entry per group, where its client began when it was last looked at. A client's
        begin only grows, and groups that everybody left are passed over."""

    def add(
        self, number: int, client: Client, priority: int, *, cached_share: float, tokens: int
    ) -> Place:
        """One more waits; numbers grow."""
        key = (client.priority, priority, client.key)
        self._shares.enter(client.key)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = Group(client, priority, number)
            heappush(self._order, self._entry(group))
        place = Place(group, number, cached_share, max(1, tokens) / client.weight)
        group.add(place)
        return place

    def remove(self, place: Place, *, is_served: bool) -> None:
        """It waits no more."""
        group, client = place.group, place.group.client
        if is_served:
            self._shares.serve(client.key, place.cost)
        self._shares.leave(client.key)
        group.remove(place)
        if group.waiting:
            return
        del self._groups[*group.level, client.key]
        if not self._groups:
            self._shares.clear()
        if len(self._order) > 2 * len(self._groups) + _FEW:
            self._order = [self._entry(each) for each in self._groups.values()]
            heapify(self._order)

    def first(self) -> int | None:
        """The number of who is next; None: nobody waits."""
        order = self._order
        while order:
            entry = order[0]
            group = entry[-1]
            if not group.waiting:
                heappop(order)
            elif self._shares.begin(group.client.key) > entry[2]:
                heapreplace(order, self._entry(group))
            else:
                return group.first()
        return None

    def last(self) -> int:
        """The number of who is served last, if nobody comes. Somebody waits."""
        return max(map(self._last_of, self._groups.values()))[-1]

    def _entry(self, group: Group) -> tuple[int, int, float, int, Group]:
        return (*group.level, self._shares.begin(group.client.key), group.number, group)

    def _last_of(self, group: Group) -> tuple[int, int, float, int]:
        """Its last one's level, where its client begins by then, and its number."""
        last = max(group.waiting.values(), key=lambda place: place.rank)
        before = sum(place.cost for place in group.waiting.values()) - last.cost
        return (*group.level, self._shares.begin(group.client.key) + before, last.number)
