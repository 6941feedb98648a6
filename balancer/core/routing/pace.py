"""How many requests per second are let in: a bucket of `BURST_S` that fills evenly. Pure.

Never more than `per_s` + a tenth of it in any one second, also around the turn of one.
"""

BURST_S = 0.1


class Pace:
    """A limit on requests per second."""

    def __init__(self, per_s: float) -> None:
        """0: no limit."""
        self._per_s = per_s
        self._room = max(1.0, per_s * BURST_S)
        self._left = self._room
        self._filled_s = 0.0

    def has_room(self, now_s: float) -> bool:
        """Whether one more may be let in."""
        if not self._per_s:
            return True
        self._fill(now_s)
        return self._left >= 1

    def take(self) -> None:
        """One was let in; `has_room` said that it may."""
        self._left -= 1

    def seconds_for(self, requests: int) -> float:
        """How long so many take."""
        return requests / self._per_s if self._per_s else 0.0

    def _fill(self, now_s: float) -> None:
        more = max(0.0, now_s - self._filled_s) * self._per_s
        self._left = min(self._room, self._left + more)
        self._filled_s = now_s
