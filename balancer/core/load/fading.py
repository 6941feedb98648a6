"""`FadingSum`: what happened lately, and less of what happened before.

Cost: one exponential per call.
"""

from math import exp


class FadingSum:
    """A sum whose parts fade with time constant `tau_s`."""

    __slots__ = ("_at_s", "_tau_s", "_value")

    def __init__(self, tau_s: float, now_s: float) -> None:
        self._tau_s = tau_s
        self._at_s = now_s
        self._value = 0.0

    def add(self, now_s: float, amount: float) -> None:
        if self._value:
            amount += self._value * exp((self._at_s - now_s) / self._tau_s)
        self._value = amount
        self._at_s = now_s

    def at(self, now_s: float) -> float:
        if not self._value:
            return 0.0
        return self._value * exp((self._at_s - now_s) / self._tau_s)
