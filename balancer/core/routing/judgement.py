"""What a choice between two ways brought: estimate, alternative, and regret once it is over.

Rules:

1. Only choices in which both ways were open are judged; the rest had no alternative.
2. The alternative is the other way on the same decode rank, as estimated when it was decided.
   Nobody knows what it would really have taken.
3. What was paid = seconds from the decision to the first token + what the way was expected to cost
   others. It is known of streams whose first attempt succeeded.
4. Regret = paid - alternative, if positive. It counts bad luck and bad estimates alike, and an
   alternative that would have disappointed, too: so it is more than a perfect choice could save.

Cost: a few additions per request.
"""

from dataclasses import dataclass

from balancer.core.record import RequestRecord
from balancer.core.routing.plan import RoutePlan
from balancer.core.routing.ways import own_s, way_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """One choice between two ways, in seconds."""

    remote: bool
    """The way taken."""
    estimated_s: float
    """What it was expected to take, and to cost others."""
    alternative_s: float
    """The same of the way not taken."""
    took_s: float | None = None
    """From the decision to the first token."""
    paid_s: float | None = None
    regret_s: float | None = None


def judge(plan: RoutePlan, took_s: float | None) -> Judgement | None:
    """Judge `plan`, whose first token came after `took_s`; None if there was nothing to choose."""
    choice = plan.decode
    if choice.other is None:
        return None
    estimated_s, alternative_s = way_s(choice), choice.other.cost_s
    paid_s = regret_s = None
    if took_s is not None:
        paid_s = took_s + estimated_s - own_s(choice)
        regret_s = max(0.0, paid_s - alternative_s)
    return Judgement(
        remote=choice.prefill is not None,
        estimated_s=estimated_s,
        alternative_s=alternative_s,
        took_s=took_s,
        paid_s=paid_s,
        regret_s=regret_s,
    )


def judge_record(record: RequestRecord) -> Judgement | None:
    """Judge a finished request."""
    return None if record.plan is None else judge(record.plan, _took_s(record, record.plan))


def _took_s(record: RequestRecord, plan: RoutePlan) -> float | None:
    """Seconds to the first token, if it could be seen and went as planned."""
    planned = 1 if plan.prefill is None else 2
    legs = [leg for leg in record.legs if leg.kind != "encode"]
    if not record.stream or len(legs) != planned or any(leg.error for leg in legs):
        return None
    first_s = legs[-1].computed_s
    return None if first_s is None else first_s - min(leg.started_s for leg in legs)
