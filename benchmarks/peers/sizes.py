"""How much of each workload is sent, and how slowly, so that two cores keep up.

A cell then takes about a minute.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvlb.bench.calls import Call


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Of one workload."""

    calls: int
    quick_calls: int
    slowdown: float


SIZES = {
    "chat": Size(calls=960, quick_calls=400, slowdown=1.5),
    "weka": Size(calls=250, quick_calls=80, slowdown=1.0),
    "arxiv": Size(calls=300, quick_calls=100, slowdown=1.0),
}


def first_calls(calls: Sequence[Call], limit: int) -> Sequence[Call]:
    """The first `limit` calls in time; where calls wait for others, whole sessions of about as many."""
    if all(call.after is None for call in calls):
        return sorted(calls, key=lambda call: call.at_s)[:limit]
    begins_s = {call.session: call.at_s for call in calls if call.after is None}
    chosen: list[int] = []
    for session in sorted(begins_s, key=lambda each: begins_s[each]):
        own = [number for number, call in enumerate(calls) if call.session == session]
        if chosen and len(chosen) + len(own) > limit:
            break
        chosen += own
    chosen.sort()
    place = {number: index for index, number in enumerate(chosen)}
    picked = [calls[number] for number in chosen]
    return [
        call if call.after is None else replace(call, after=place[call.after]) for call in picked
    ]
