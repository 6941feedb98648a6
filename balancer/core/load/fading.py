"""`FadingSum`: what happened lately, and less of what happened before.

Cost: one exponential per call.
"""

from math import exp


def faded(value: float, *, at_s: float, now_s: float, tau_s: float) -> float:
    """What `value` has become."""
    return value * exp((at_s - now_s) / tau_s) if value else 0.0


class FadingSum:
    """A sum whose parts fade with time constant `tau_s`."""

    __slots__ = ("_tau_s", "at_s", "value")

    def __init__(self, tau_s: float, now_s: float) -> None:
        self._tau_s = tau_s
        self.at_s = now_s
        self.value = 0.0
        """As it stood at `at_s`."""

    def add(self, now_s: float, amount: float) -> None:
        # In one step: a stream adds to five of these.
        self.value = amount + self.value * exp((self.at_s - now_s) / self._tau_s)
        self.at_s = now_s

    def at(self, now_s: float) -> float:
        return faded(self.value, at_s=self.at_s, now_s=now_s, tau_s=self._tau_s)
