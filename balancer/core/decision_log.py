"""The last decisions, bounded, for people who ask what just happened.

Rules:

1. Only finished requests enter, oldest out first.
2. No prompt text, token, key or salt is kept; a model name that isn't the fleet's is not either.
3. Who asks for at most `DETAILED` decisions is told every candidate's terms. Who asks for more reads the
   log as a whole, again and again, and has no use for them.

Cost: O(1) per request, and a few kB each while kept: a record is put into words when it is asked for,
and of its plan only the cheapest candidates are kept.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from heapq import nsmallest
from typing import Any

import msgspec

from balancer.core.record import EncodeRecord, LegRecord, RequestRecord
from balancer.core.routing.explain import explain_choice, explain_ways, render_legs
from balancer.core.routing.judgement import judge_record
from balancer.core.routing.plan import RoutePlan


class TimedDecision(msgspec.Struct, frozen=True, array_like=True):
    """A rendered record, and when it ended by the machine's monotonic clock."""

    ended_s: float
    decision: Mapping[str, Any]


KEPT_CANDIDATES = 8
DETAILED = 100


class DecisionLog:
    """A ring of finished records."""

    def __init__(self, *, limit: int) -> None:
        self._records: deque[RequestRecord] = deque(maxlen=limit)

    def add(self, record: RequestRecord) -> None:
        """Keep `record`, which nobody changes any more."""
        if record.plan is not None and len(record.plan.considered) > KEPT_CANDIDATES:
            record = msgspec.structs.replace(record, plan=_shortened(record.plan))
        self._records.append(record)

    def timed(self, count: int) -> Sequence[TimedDecision]:
        """Up to `count` records, newest first, to be joined with those of other processes."""
        newest = zip(reversed(self._records), range(count), strict=False)
        return [_timed(record, detailed=count <= DETAILED) for record, _ in newest]

    def latest(self, count: int) -> Sequence[Mapping[str, Any]]:
        """Up to `count` records, newest first."""
        return [each.decision for each in self.timed(count)]


def _timed(record: RequestRecord, *, detailed: bool) -> TimedDecision:
    ended_s = record.arrived_s if record.ended_s is None else record.ended_s
    shown = render_record(record)
    if detailed:
        shown = {**shown, "plan": render_legs(record.plan) if record.plan else None}
    return TimedDecision(ended_s, shown)


def _shortened(plan: RoutePlan) -> RoutePlan:
    """Without the candidates that explain nothing."""
    cheapest = nsmallest(KEPT_CANDIDATES, plan.considered, key=lambda each: each.cost_s)
    return msgspec.structs.replace(plan, considered=tuple(cheapest))


def render_record(record: RequestRecord) -> Mapping[str, Any]:
    """One finished request: predicted, chosen, delivered."""
    plan = record.plan
    return {
        "request_id": record.request_id,
        "path": record.path,
        "model": record.model if record.base_model else None,
        "stream": record.stream,
        "status": record.status,
        "error": record.error,
        "reason": plan.reason.value if plan else None,
        "why": explain_choice(plan.decode, plan.considered) if plan else None,
        "ways": explain_ways(plan) if plan else None,
        "pd": _render_judgement(record),
        "encode": _render_encode(record.encode),
        "prompt_tokens": record.prompt_tokens,
        "prompt_source": record.prompt_source,
        "unscorable": record.unscorable,
        "overlap_available_tokens": record.available_tokens,
        "overlap_chosen_tokens": record.chosen_tokens,
        "cached_tokens": record.cached_tokens,
        "duration_s": _elapsed_s(record.arrived_s, record.ended_s),
        "first_byte_s": _elapsed_s(record.arrived_s, record.first_byte_s),
        "held_back": plan.held_back if plan else {},
        "retries": record.retries,
        "retries_refused": record.retries_refused,
        "legs": [_render_leg(leg) for leg in record.legs],
    }


def _render_judgement(record: RequestRecord) -> Mapping[str, Any] | None:
    """Where both ways were open: which was taken, what was expected of each, what came of it."""
    judged = judge_record(record)
    if judged is None:
        return None
    return {
        "way": "remote" if judged.remote else "local",
        "estimated_s": round(judged.estimated_s, 6),
        "alternative_s": round(judged.alternative_s, 6),
        "first_token_s": _rounded(judged.took_s),
        "paid_s": _rounded(judged.paid_s),
        "regret_s": _rounded(judged.regret_s),
    }


def _render_encode(encode: EncodeRecord | None) -> Mapping[str, Any] | None:
    """What became of images, audio and video; None: nothing to encode, or nobody for it."""
    if encode is None:
        return None
    return {
        "reason": encode.reason,
        "items": encode.items,
        "encoded": encode.encoded,
        "reused": encode.reused,
        "local": encode.local,
        "instances": encode.instances,
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def _render_leg(leg: LegRecord) -> Mapping[str, Any]:
    return {
        "leg": leg.kind,
        "instance": leg.alias,
        "reason": leg.reason,
        "rank": leg.rank,
        "status": leg.status,
        "error": leg.error,
        "overlap_tokens": leg.overlap_tokens,
        "held_tokens": leg.held_tokens,
        "block_size": leg.block_size,
        "trust": leg.trust,
        "trust_reason": leg.trust_reason,
        "outcome": leg.outcome,
        "prompt_tokens": leg.prompt_tokens,
        "cached_tokens": leg.cached_tokens,
        "completion_tokens": leg.completion_tokens,
        "first_byte_s": _elapsed_s(leg.started_s, leg.first_byte_s),
        "duration_s": _elapsed_s(leg.started_s, leg.ended_s),
    }


def _elapsed_s(start_s: float, end_s: float | None) -> float | None:
    return None if end_s is None else round(end_s - start_s, 6)
