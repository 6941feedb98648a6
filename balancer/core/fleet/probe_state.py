"""Health of one instance: probes and legs in, healthy / draining / reason out.

Rules:

1. The first good probe makes an instance healthy at once; after a failure it takes
   `healthy_after` good ones in a row. Nothing bans an instance for good.
2. `unhealthy_after` bad probes in a row make it unhealthy; a refused connection, a refused key,
   a balancer in the engine's place or an engine that says it sleeps does at once: a sleeping engine
   has no cache and answers nobody.
3. Of legs only what a probe would see counts, and at once: a refused connection. An engine that
   passes every probe and fails every request is held back by its breaker (`core.reliability.standings`).
4. 503 on /health means draining (or dead): no new requests, until a probe says otherwise.
5. In-flight counts are somebody else's: a probe never touches them.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import assert_never

from balancer.core.http.own_mark import ANOTHER_BALANCER, OWN_ADDRESS
from indexer.core.model_cards import ServedModels

SLEEPING = "sleeping"
AT_ONCE = frozenset(
    {
        "engine_unreachable",
        "connect_timeout",
        "unauthorized",
        SLEEPING,
        OWN_ADDRESS,
        ANOTHER_BALANCER,
    }
)
"""Reasons that need no second opinion."""


class ProbeOutcome(StrEnum):
    """What one probe found."""

    OK = "ok"
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeAnswer:
    """One probe's outcome; `models` if the instance told them, `reason` if it didn't do well."""

    outcome: ProbeOutcome
    reason: str | None = None
    models: ServedModels | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeThresholds:
    """How many in a row it takes."""

    unhealthy_after: int = 2
    healthy_after: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeState:
    """What is believed of one instance."""

    healthy: bool = False
    draining: bool = False
    reason: str | None = "not_probed"
    """Why it isn't healthy; None while it is."""
    good_in_row: int = 0
    bad_in_row: int = 0
    ever_healthy: bool = False

    def after_probe(
        self, outcome: ProbeOutcome, reason: str | None, thresholds: ProbeThresholds
    ) -> "ProbeState":
        """State once a probe has answered or failed."""
        match outcome:
            case ProbeOutcome.OK:
                return self._after_good(thresholds)
            case ProbeOutcome.DRAINING:
                # It answers, so its streams may finish: healthy or not stays as it was.
                reason = None if self.healthy else "draining"
                return replace(self, draining=True, reason=reason, good_in_row=0, bad_in_row=0)
            case ProbeOutcome.FAILED:
                return self._after_bad(reason or "probe_failed", thresholds)
            case never:
                assert_never(never)

    def after_leg(self, ok: bool, reason: str | None) -> "ProbeState":
        """State once a leg has ended; `reason` is the code of the error that ended it."""
        if ok or reason not in AT_ONCE:
            return self
        return self._unhealthy(reason)

    def _after_good(self, thresholds: ProbeThresholds) -> "ProbeState":
        good = self.good_in_row + 1
        healthy = self.healthy or not self.ever_healthy or good >= thresholds.healthy_after
        return replace(
            self,
            healthy=healthy,
            draining=False,
            reason=None if healthy else self.reason,
            good_in_row=good,
            bad_in_row=0,
            ever_healthy=self.ever_healthy or healthy,
        )

    def _after_bad(self, reason: str, thresholds: ProbeThresholds) -> "ProbeState":
        bad = self.bad_in_row + 1
        if self.healthy and reason not in AT_ONCE and bad < thresholds.unhealthy_after:
            return replace(self, bad_in_row=bad, good_in_row=0)
        return replace(self._unhealthy(reason), bad_in_row=bad)

    def _unhealthy(self, reason: str) -> "ProbeState":
        return replace(self, healthy=False, reason=reason, good_in_row=0)
