"""Metrics of the choice between prefill here and elsewhere: what was taken, and was it right.

Seconds are sums over choices in which both ways were open; dividing two of them gives a share.
"""

from prometheus_client import CollectorRegistry, Counter

from balancer.core.fleet.snapshot import Role
from balancer.core.record import RequestRecord
from balancer.core.routing.judgement import judge_record
from balancer.core.routing.plan import RoutePlan

_DECODE = Role.DECODE
REMOTE, LOCAL = "remote", "local"


class PdMetrics:
    """Counters of decisions on decode instances."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, help_: str, *labels: str) -> Counter:
            return Counter(name, help_, labels, registry=registry)

        self._decisions = counter(
            "kvlb_pd_decisions_total",
            "Requests to decode instances, by where they were to be prefilled, and why.",
            "way",
            "reason",
        )
        self._estimated = counter(
            "kvlb_pd_estimated_seconds_total",
            "Where both ways were open: what the way taken was expected to take and to cost others.",
            "way",
        )
        self._alternative = counter(
            "kvlb_pd_alternative_seconds_total",
            "The same of the way not taken; `way` is the one taken.",
            "way",
        )
        self._paid = counter(
            "kvlb_pd_paid_seconds_total",
            "Of streams: seconds to the first token, and what the way was expected to cost others.",
            "way",
        )
        self._regret = counter(
            "kvlb_pd_regret_seconds_total",
            "What of that was more than the other way had been expected to take.",
            "way",
        )

    def observe(self, record: RequestRecord, plan: RoutePlan) -> None:
        """Count one finished request, and the plan it had."""
        if plan.decode.candidate.instance.role is not _DECODE:
            return
        way = LOCAL if plan.prefill is None else REMOTE
        self._decisions.labels(way, plan.reason.value).inc()
        judged = judge_record(record)
        if judged is None:
            return
        self._estimated.labels(way).inc(judged.estimated_s)
        self._alternative.labels(way).inc(judged.alternative_s)
        if judged.paid_s is not None and judged.regret_s is not None:
            self._paid.labels(way).inc(judged.paid_s)
            self._regret.labels(way).inc(judged.regret_s)
