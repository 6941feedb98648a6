"""Virtual time: a queue of moments, each run at once when it is the next one."""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

Action = Callable[[], None]


class VirtualClock:
    """Runs actions at their moment, in order."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._moments: list[tuple[float, int, Action]] = []
        self._numbers = count()
        self._is_stopped = False

    def at(self, when_s: float, action: Action) -> None:
        """Run `action` at `when_s`, after what was asked for before at the same moment."""
        heappush(self._moments, (when_s, next(self._numbers), action))

    def run(self) -> None:
        """Until nothing is left to do, or it is stopped."""
        moments = self._moments
        while moments and not self._is_stopped:
            self.now_s, _, action = heappop(moments)
            action()

    def stop(self) -> None:
        """Leave the rest, for good."""
        self._is_stopped = True
