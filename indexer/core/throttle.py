"""Lets one of many equal log lines through per interval. What is held back is counted elsewhere.

Invariant: per key at most one `admits` is true within `interval_s`. Cost: constant; one entry
per key, so keys must be few.
"""

from collections.abc import Hashable


class Throttle:
    """One per stream."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._admitted_s: dict[Hashable, float] = {}

    def admits(self, key: Hashable, now_s: float) -> bool:
        """`now_s` is monotonic."""
        last_s = self._admitted_s.get(key)
        if last_s is not None and now_s - last_s < self._interval_s:
            return False
        self._admitted_s[key] = now_s
        return True
