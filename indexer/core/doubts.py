"""Which blocks of a rank to doubt, by a few that were found missing and a few that were found there.

An engine whose cache was emptied untold, or that announced what it never had, lacks many blocks with
nothing in common but the time at which they were stored. So they are put in the order in which they
were stored, and those that legs have proved missing or present mark places in it.

Rules:

1. `ENOUGH` missing ones raise a doubt. Fewer may have been evicted each for itself.
2. What lies between two neighbouring marks is doubted if both say missing. Beside them it is doubted
   a quarter as far as the missing ones lie apart: found in any order, few lie beyond. (Of 200 prompts of
   ten blocks, half of them gone, 20 of those asked for at random: 3 in 80 ghosts are left, and 5 in 100
   true ones doubted, in the mean; as far as they lie apart, 1 and 19; nothing beside, 8 and 1.)
3. Where each new one lies right beyond what was doubted, as in traffic that comes back in the order in
   which it was stored, they don't say how far it goes on: from the third on it is doubted as far as they
   lie apart, and four times as far with each further one.
4. Towards a mark that says present it is doubted halfway at most.
5. If `ENOUGH` present ones lie between missing ones, a third as many as those or more, then the missing
   ones were not lost together, and nothing is doubted.
6. Only the newest `MOST_MARKS` of each kind count.

Cost: a step per mark; finding a mark's place reads the order, in C.
"""

from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf

from indexer.core.types import EngineHash

ENOUGH = 3
BESIDE, GROWTH = 0.25, 4.0
MOST_MARKS = 64


class Doubts:
    """Marks in the order in which one rank's blocks were stored."""

    def __init__(self, order: Sequence[EngineHash], since_s: float) -> None:
        self.order = order
        """Oldest first, as of then."""
        self.since_s = since_s
        self._missing: list[EngineHash] = []
        self._present: list[EngineHash] = []
        self._places: list[tuple[int, bool]] = []
        """In order, and whether the block there is missing."""
        self._rising = self._falling = 0
        """How many missing ones in a row were found right above, or below, all that was doubted."""

    def found(self, engine_hash: EngineHash, *, missing: bool) -> None:
        """A leg has shown that the engine lacks a block, or has it. One that is new marks nothing."""
        marks, others = self._missing, self._present
        if not missing:
            marks, others = others, marks
        if engine_hash in marks:
            return
        if engine_hash in others:
            others.remove(engine_hash)  # the newest word counts
        marks.append(engine_hash)
        self._place(engine_hash, missing=missing)
        if len(marks) > MOST_MARKS:
            gone = marks.pop(0)
            self._places = [each for each in self._places if self.order[each[0]] != gone]

    def told_anew(
        self,
        order: Sequence[EngineHash],
        since_s: float,
        has_copies: Callable[[EngineHash], bool],
    ) -> "Doubts":
        """The same marks, where those blocks were told again, in another order.

        A missing one counts if it `has_copies`, more than one: it was told of before it was computed
        anew, and with it all that was lost with it. Else the tables alone had been wrong.
        """
        anew = Doubts(order, since_s)
        for engine_hash in filter(has_copies, self._missing):
            anew.found(engine_hash, missing=True)
        for engine_hash in self._present:
            anew.found(engine_hash, missing=False)
        return anew

    def ranges(self) -> list[range]:
        """Places of what is to be doubted, in order and apart; marks among them."""
        missing = self._places_missing()
        if len(missing) < ENOUGH or self._are_scattered(missing):
            return []
        apart = _apart(missing)
        below, above = self._reach(apart, self._falling), self._reach(apart, self._rising)
        found: list[range] = []
        for number, (place, is_missing) in enumerate(self._places):
            if not is_missing:
                continue
            first = max(0, place - self._room(number, -1, below))
            end = min(len(self.order), place + self._room(number, 1, above) + 1)
            if found and first <= found[-1].stop:
                first = found.pop().start
            found.append(range(first, end))
        return found

    def _are_scattered(self, missing: Sequence[int]) -> bool:
        places = (place for place, is_missing in self._places if not is_missing)
        between = sum(missing[0] < place < missing[-1] for place in places)
        return between >= max(ENOUGH, len(missing) / 3)

    def _reach(self, apart: float, in_row: int) -> int:
        further = GROWTH ** (in_row - ENOUGH) if in_row >= ENOUGH else BESIDE
        return int(min(len(self.order), apart * further))

    def _room(self, number: int, step: int, reach: int) -> int:
        """How far a doubt goes from one mark towards the next one."""
        at = number + step
        if not 0 <= at < len(self._places):
            return reach
        place, is_missing = self._places[at]
        distance = abs(place - self._places[number][0])
        return distance if is_missing else min(reach, distance // 2)

    def _place(self, engine_hash: EngineHash, *, missing: bool) -> None:
        try:
            place = self.order.index(engine_hash)
        except ValueError:
            return  # stored since: no doubt reaches it
        if missing:
            self._count_in_row(place)
        self._places = [each for each in self._places if each[0] != place]
        insort(self._places, (place, missing))

    def _count_in_row(self, place: int) -> None:
        missing, ranges = self._places_missing(), self.ranges()
        if ranges:
            first, end, near = ranges[0].start, ranges[-1].stop, _apart(missing)
        else:
            first, end, near = min(missing, default=place + 1), max(missing, default=-1), inf
        if first <= place < end:
            return  # that was doubted already, or lies between
        self._rising = self._rising + 1 if 0 <= place - end <= near else 0
        self._falling = self._falling + 1 if 0 < first - place <= near else 0

    def _places_missing(self) -> list[int]:
        """In order."""
        return [place for place, is_missing in self._places if is_missing]


def _apart(places: Sequence[int]) -> float:
    return (places[-1] - places[0]) / (len(places) - 1)


def without(ranges: Iterable[range], others: Sequence[range]) -> Iterator[range]:
    """What `ranges` have and `others` have not. Each in order and apart."""
    for each in ranges:
        start = each.start
        for other in others:
            if other.stop > start and other.start < each.stop:
                if start < other.start:
                    yield range(start, other.start)
                start = other.stop
        if start < each.stop:
            yield range(start, each.stop)
