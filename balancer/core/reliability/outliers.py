"""Who fails, or is far slower, while the others of its kind are well.

Rules:

1. Instances are compared with the median of the others, never with a figure that somebody set:
   what fails everywhere is no instance's fault.
2. Only those with enough legs of late are compared, and only with such.
3. Pace is seconds to the first token by started thousand of tokens to be computed. The tokens
   after it aren't looked at: a client that reads slowly slows its engine.
4. A leg that waits longer than its instance's mean counts with the time it has waited so far:
   an engine that never answers is the slowest of all.

Cost: a few exponentials per leg; judging is linear in instances and waiting legs.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from balancer.core.load.fading import FadingSum
from balancer.core.settings.reliability import ReliabilitySettings
from indexer.core.types import InstanceId

FAILING = "failing"
SLOW = "slow"
LEAST_SLOWER_S = 1.0
"""Per thousand tokens: among quick engines a factor means nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One instance, of late."""

    legs: float = 0.0
    failed_share: float = 0.0
    paced: float = 0.0
    """Legs whose pace is known."""
    pace_s: float = 0.0
    """Their mean."""


class Tally:
    """Counts the legs of one instance."""

    __slots__ = ("_failed", "_legs", "_pace_s", "_paced")

    def __init__(self, window_s: float, now_s: float) -> None:
        self._legs = FadingSum(window_s, now_s)
        self._failed = FadingSum(window_s, now_s)
        self._paced = FadingSum(window_s, now_s)
        self._pace_s = FadingSum(window_s, now_s)

    def ended(self, now_s: float, *, failed: bool) -> None:
        self._legs.add(now_s, 1.0)
        if failed:
            self._failed.add(now_s, 1.0)

    def first_token(self, now_s: float, pace_s: float) -> None:
        self._paced.add(now_s, 1.0)
        self._pace_s.add(now_s, pace_s)

    def gave_up(self, now_s: float, pace_s: float) -> None:
        """Somebody stopped waiting: it would have been at least so slow."""
        # Not quite the mean: sums of floats differ in their last digits.
        if pace_s * self._paced.at(now_s) >= 0.99 * self._pace_s.at(now_s):
            self.first_token(now_s, pace_s)

    def figures(self, now_s: float, waiting: Iterable[float]) -> Figures:
        """`waiting` is the pace so far of each leg without a first token."""
        legs = self._legs.at(now_s)
        paced = self._paced.at(now_s)
        total_s = self._pace_s.at(now_s)
        mean_s = total_s / paced if paced else 0.0
        late = [each for each in waiting if each > mean_s]
        paced += len(late)
        return Figures(
            legs=legs,
            failed_share=self._failed.at(now_s) / legs if legs else 0.0,
            paced=paced,
            pace_s=(total_s + sum(late)) / paced if paced else 0.0,
        )


def find_outliers(
    figures: Mapping[InstanceId, Figures], settings: ReliabilitySettings
) -> dict[InstanceId, str]:
    """Who stands out among these, the worst first, and how."""
    found = _failing(figures, settings) if settings.outlier_failures else {}
    if settings.outlier_slowness:
        for instance, reason in _slow(figures, settings).items():
            found.setdefault(instance, reason)
    return found


def _failing(
    figures: Mapping[InstanceId, Figures], settings: ReliabilitySettings
) -> dict[InstanceId, str]:
    shares = {
        instance: each.failed_share
        for instance, each in figures.items()
        if each.legs >= settings.outlier_legs
    }
    return {
        instance: FAILING
        for instance in _worst_first(shares)
        if shares[instance] >= settings.outlier_failures
        and shares[instance] > 2 * _of_others(shares, instance)
    }


def _slow(
    figures: Mapping[InstanceId, Figures], settings: ReliabilitySettings
) -> dict[InstanceId, str]:
    paces = {
        instance: each.pace_s
        for instance, each in figures.items()
        if each.paced >= settings.outlier_legs
    }
    return {
        instance: SLOW
        for instance in _worst_first(paces)
        if paces[instance] >= settings.outlier_slowness * _of_others(paces, instance)
        and paces[instance] >= LEAST_SLOWER_S + _of_others(paces, instance)
    }


def _worst_first(figures: Mapping[InstanceId, float]) -> list[InstanceId]:
    return sorted(figures, key=lambda instance: (-figures[instance], instance))


def _of_others(figures: Mapping[InstanceId, float], instance: InstanceId) -> float:
    """Infinite if there are none: who stands alone doesn't stand out."""
    others = [figure for each, figure in figures.items() if each != instance]
    return median(others) if others else float("inf")
