"""What an operator can set of admission: when requests wait in the balancer, and for how long."""

import msgspec

from indexer.core.limits import NonNegativeFloat, NonNegativeInt, PositiveFloat


class AdmissionSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Requests that no rank has room for wait in one line per model, and are decided when it has.

    A rank has room while its prefill queue is short (`rank_queue_s`) and it is below
    `routing.max_requests_per_rank`. The same line holds what comes faster than `requests_per_s`. What waits too long, or finds the line full, gets 503 with
    `Retry-After` (docs/admission.md).
    """

    rank_queue_s: NonNegativeFloat = 5.0
    """Estimated seconds of prefill before a new prompt's turn, from which on a rank gets no more.
    Counts once prefill rates are learned. 0: engines queue without a bound."""
    requests_per_s: NonNegativeFloat = 0.0
    """Most requests that each process lets in per second, over all models; the others wait in line.
    0: no limit."""
    max_waiting: NonNegativeInt = 1000
    """Requests that wait for one model. Beyond it the least urgent is refused. 0: none may wait."""
    max_wait_s: PositiveFloat = 30.0
    """Longest wait."""
    standing_s: PositiveFloat = 10.0
    """A line that hasn't been empty for so long is no burst: more comes than the fleet can serve,
    and waiting longer would help nobody."""
    standing_wait_s: PositiveFloat = 10.0
    """Longest wait in such a line."""
