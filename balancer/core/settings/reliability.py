"""What an operator can set of breakers, outliers and retries."""

import msgspec

from balancer.core.reliability.breaker import BreakerRules
from indexer.core.limits import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Share


class ReliabilitySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Instances that pass their probes and fail their requests.

    Such an instance is held back: new requests go elsewhere, but for one trial per cool-down, and
    one that goes well brings it back. If everybody who could serve a request is held back, nobody
    is: an error of an engine says more than one of ours. How often one request may be tried again is
    `dataplane.retries`; how often all of them together, is said here.
    """

    breaker_failures: PositiveInt = 3
    """Legs in a row that broke off or timed out, after which an instance is held back. A refused
    connection is a matter of its health, an error status of the comparison below."""
    cool_down_s: PositiveFloat = 5.0
    """From then to the first trial. Each trial that fails doubles it."""
    max_cool_down_s: PositiveFloat = 60.0
    """At most so much."""
    outlier_legs: PositiveInt = 10
    """Legs of late from which on an instance is compared with the others of its role and model."""
    outlier_failures: Share = 0.5
    """Held back as `failing`: this share of its legs failed (5xx and all), while of the others not
    half as many did. 0: no such comparison."""
    outlier_slowness: NonNegativeFloat = 10.0
    """Held back as `slow`: its first tokens take so many times as long as the others' (their
    median, by 1,000 tokens to be computed), and a second more. Legs that still wait count. 0: no
    such comparison."""
    outlier_after_s: NonNegativeFloat = 10.0
    """For so long it has to be so."""
    max_outliers: Share = 0.5
    """Share of the instances of a role and model that comparison may hold back; one instance among
    two or more in any case."""
    retry_share: Share = 0.5
    """Retries of late, as a share of requests of late: half of a fleet may die, and every request is
    tried elsewhere; a fleet that dies as a whole isn't asked twice."""
    least_retries: NonNegativeInt = 30
    """So many retries of late are allowed whatever the share."""
    window_s: PositiveFloat = 30.0
    """What "of late" means: things count less and less, a third after this time."""

    @property
    def breaker(self) -> BreakerRules:
        return BreakerRules(
            failures=self.breaker_failures,
            cool_down_s=self.cool_down_s,
            max_cool_down_s=self.max_cool_down_s,
        )
