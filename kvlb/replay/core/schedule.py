"""When each request of a trace is sent.

Rules:

1. Open loop: times are fixed before the first request is sent, whatever the answers do.
2. The first request is sent at once; a speed of 2 halves all pauses. Lengths never change.
3. Requests with equal times keep the order of the trace.
4. A trace without times (chats) gets drawn ones: conversations begin, and a conversation's next
   request follows, after exponential pauses of a mean of their own. Same seed, same times.
5. The limit counts requests in order of time.

Cost: O(n log n), once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import log

from kvlb.replay.core.trace_rows import TraceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How a trace's clock becomes ours."""

    speed: float = 1.0
    limit: int | None = None
    session_gap_s: float = 2.0
    """Mean pause between the beginnings of two conversations, where the trace has no times."""
    turn_gap_s: float = 5.0
    """Mean pause between two requests of a conversation, likewise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """A request and when it is sent, in seconds after the first one."""

    at_s: float
    request: TraceRequest


def plan_schedule(
    requests: Sequence[TraceRequest], pace: Pace, draw: Callable[[], float]
) -> list[Timed]:
    """All requests that are to be sent, in order. `draw`: uniform, from 0 to below 1."""
    timed = _with_times(requests, pace, draw)
    ordered = sorted(timed, key=lambda each: each.at_s)[: pace.limit]
    return [replace(each, at_s=(each.at_s - ordered[0].at_s) / pace.speed) for each in ordered]


def _with_times(
    requests: Sequence[TraceRequest], pace: Pace, draw: Callable[[], float]
) -> list[Timed]:
    begun_s = 0.0
    last_s: dict[str | None, float] = {}
    timed = []
    for request in requests:
        at_s = request.at_s
        if at_s is None:
            if request.session in last_s:
                at_s = last_s[request.session] + _pause_s(pace.turn_gap_s, draw())
            else:
                at_s = begun_s = begun_s + _pause_s(pace.session_gap_s, draw())
            last_s[request.session] = at_s
        timed.append(Timed(at_s=at_s, request=request))
    return timed


def _pause_s(mean_s: float, drawn: float) -> float:
    return -mean_s * log(1 - drawn)
