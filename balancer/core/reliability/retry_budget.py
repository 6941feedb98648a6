"""Retries that a dying fleet can bear: a share of the requests of late, and a few in any case.

Rules:

1. Every request counts once, every further attempt made for it is a retry.
2. A retry is allowed while those of late stay at or below `least + share * requests of late`.
   "Of late" fades with time constant `window_s`, so nothing is handed out in steps.
3. Refusing costs nothing but the retry: the error that asked for it is the answer.

Cost: one exponential per request.
"""

from balancer.core.load.fading import FadingSum


class RetryBudget:
    """One per process."""

    def __init__(self, *, share: float, least: int, window_s: float, now_s: float) -> None:
        self._share = share
        self._least = least
        self._requests = FadingSum(window_s, now_s)
        self._retries = FadingSum(window_s, now_s)
        self.made = 0
        """Retries ever allowed."""
        self.refused = 0
        """Retries ever refused."""

    def requested(self, now_s: float) -> None:
        """A client's request begins."""
        self._requests.add(now_s, 1.0)

    def take(self, now_s: float) -> bool:
        """May something be tried again now? Yes counts as having done so."""
        allowed = self._least + self._share * self._requests.at(now_s)
        if self._retries.at(now_s) + 1 > allowed:
            self.refused += 1
            return False
        self._retries.add(now_s, 1.0)
        self.made += 1
        return True
