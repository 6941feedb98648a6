"""When a degraded rank is asked for its whole life again.

Rules:

1. The first time at once; then after `interval_s`, and twice as long each time it hasn't helped,
   up to `_LONGEST` intervals.
2. Orphans are a sign of their own: when some appear, the next time is now, once until `ease`.
3. `ease` is for a rank that is exact again, or another life: rule 1 from its beginning.

Cost: constant.
"""

_LONGEST = 64


class RebuildSchedule:
    """One per rank. Times are monotonic."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._due_s = float("-inf")
        self._is_hurried = False
        self._pause_s = interval_s

    def wait_s(self, now_s: float) -> float:
        """How long until it is due; 0 if it is."""
        return max(0.0, self._due_s - now_s)

    def asked(self, now_s: float) -> None:
        """It was asked for."""
        self._due_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST * self._interval_s)

    def hurry(self) -> None:
        """Orphans have appeared."""
        if not self._is_hurried:
            self._is_hurried = True
            self._due_s = float("-inf")

    def ease(self) -> None:
        """There is nothing to repair."""
        self._is_hurried = False
        self._pause_s = self._interval_s
