"""When a degraded rank is asked for its whole life again.

Rules:

1. The first time at once; then after `interval_s`, and twice as long each time it hasn't helped,
   up to `_LONGEST` intervals.
2. Orphans are a sign of their own: when some appear, the next time is now, once until `ease`.
3. `ease` is for a rank that is exact again, or another life: rule 1 from its beginning.
4. While the replay socket doesn't answer, or not to the end, a rebuild would hold live batches up for
   nothing. Instead a look at the socket is due every `probe_s`, and as soon as it answers, whoever
   has asked, the rebuild is: rule 1 from its beginning.

Cost: constant.
"""

_LONGEST = 8


class RebuildSchedule:
    """One per rank. Times are monotonic."""

    def __init__(self, interval_s: float, probe_s: float = 0.0) -> None:
        self.is_unanswered = False
        """What is due is a look at the socket."""
        self._interval_s = interval_s
        self._probe_s = probe_s
        self._due_s = float("-inf")
        self._probe_due_s = float("-inf")
        self._is_hurried = False
        self._pause_s = interval_s

    def wait_s(self, now_s: float) -> float:
        """How long until it is due; 0 if it is."""
        due_s = self._probe_due_s if self.is_unanswered else self._due_s
        return max(0.0, due_s - now_s)

    def asked(self, now_s: float) -> None:
        """What was due was asked for."""
        if self.is_unanswered:
            self._probe_due_s = now_s + self._probe_s
            return
        self._due_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST * self._interval_s)

    def heard(self, *, is_answered: bool) -> None:
        """Somebody's question to the replay socket was answered to the end, or not."""
        if is_answered and self.is_unanswered:
            self._due_s, self._pause_s = float("-inf"), self._interval_s
        self.is_unanswered = not is_answered

    def hurry(self) -> None:
        """Orphans have appeared."""
        if not self._is_hurried:
            self._is_hurried = True
            self._due_s = float("-inf")

    def ease(self) -> None:
        """There is nothing to repair."""
        self._is_hurried = False
        self._pause_s = self._interval_s
