"""What most requests count, found by one look.

A request that one leg answered and whose prompt nobody has read counts ten times, and thirteen if it is
streamed, always under the same labels. Looking each series up by its own takes longer than counting.

Rules:

1. The series are those of `BalancerMetrics`, made when they are first counted, as ever.
2. Who keeps these forgets them with the snapshot of the fleet that names were checked against.
"""

from typing import Any

import msgspec

from balancer.core.fleet.snapshot import Role
from balancer.core.record import RequestRecord
from balancer.series import CounterSeries, HistogramSeries

_MIXED = Role.MIXED
Kind = tuple[str, str, int, str, str, str, Any, bool]
"""Everything that the labels of such a request are made of."""


class PaceSeries(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What only streams show."""

    first_byte: HistogramSeries
    leg_first_byte: HistogramSeries
    inter_token: HistogramSeries


class UsualSeries(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Of requests of one kind."""

    requests: CounterSeries
    duration: HistogramSeries
    tokenize: CounterSeries
    skipped: CounterSeries
    legs: CounterSeries
    cached: CounterSeries
    cached_of: CounterSeries
    completion: CounterSeries
    delivered: CounterSeries
    delivered_of: CounterSeries
    pace: PaceSeries | None
    """Of streams."""

    def observe(self, record: RequestRecord) -> None:
        """Count one that `usual_kind` knows."""
        leg = record.legs[0]
        self.requests.value += 1
        self.duration.observe((record.ended_s or 0.0) - record.arrived_s)
        self.tokenize.value += 1
        self.skipped.value += 1
        self.legs.value += 1
        cached, prompt = leg.cached_tokens or 0, leg.prompt_tokens or 0
        self.cached.value += cached
        self.cached_of.value += prompt
        self.completion.value += leg.completion_tokens or 0
        self.delivered.value += cached
        self.delivered_of.value += prompt
        if self.pace is not None:
            self.pace.first_byte.observe((record.first_byte_s or 0.0) - record.arrived_s)
            self.pace.leg_first_byte.observe((leg.first_token_s or 0.0) - leg.started_s)
            self.pace.inter_token.observe(leg.inter_token_s or 0.0)


def usual_kind(record: RequestRecord) -> Kind | None:
    """What is looked up; None: it counts in other ways, too."""
    legs, plan, unscorable = record.legs, record.plan, record.unscorable
    if (
        len(legs) != 1
        or plan is None
        or unscorable is None
        or record.status is None
        or record.error is not None
        or record.encode is not None
        or record.ended_s is None
    ):
        return None
    leg = legs[0]
    if leg.cached_tokens is None or leg.prompt_tokens is None or leg.completion_tokens is None:
        return None  # it told no usage
    if record.stream and (
        record.first_byte_s is None
        or leg.first_token_s is None
        or leg.ended_s is None
        or leg.completion_tokens < 2
    ):
        return None  # it had no pace
    if leg.error is not None or leg.kind != "decode" or leg.overlap_tokens is not None:
        return None
    if plan.decode.candidate.instance.role is not _MIXED:
        return None
    source = record.prompt_source
    return (
        *(record.model, record.path, record.status, leg.alias),
        *(source, unscorable, plan.reason, record.stream),
    )
