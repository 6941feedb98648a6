"""Stops asking somebody who doesn't answer, and tries again later.

Rules:

1. `failures` in a row open it for `cool_down_s`; then one trial is let through per cool-down.
2. One success closes it. A trial that never reports counts as failed: nothing can get stuck.
"""


class Breaker:
    """One per thing asked. Not a lock: it only advises."""

    def __init__(self, *, failures: int, cool_down_s: float) -> None:
        self._failures = failures
        self._cool_down_s = cool_down_s
        self._bad_in_row = 0
        self._closed_again_s: float | None = None

    def allows(self, now_s: float) -> bool:
        """May it be asked now? While open, answering yes starts the one trial of this cool-down."""
        if self._closed_again_s is None:
            return True
        if now_s < self._closed_again_s:
            return False
        self._closed_again_s = now_s + self._cool_down_s
        return True

    def succeeded(self) -> None:
        self._bad_in_row = 0
        self._closed_again_s = None

    def failed(self, now_s: float) -> None:
        self._bad_in_row += 1
        if self._bad_in_row >= self._failures:
            self._closed_again_s = now_s + self._cool_down_s
