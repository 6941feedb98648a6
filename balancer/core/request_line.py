"""The log line of a finished request: no prompt, no key, no address."""

import msgspec

from balancer.core.record import RequestRecord


class RequestLine(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What is told of one request, whoever writes it down. Field names are those of the line."""

    request_id: str
    path: str
    model: str | None
    """Base model; None: none of the fleet's."""
    status: int | None
    error: str | None
    stream: bool
    reason: str | None
    legs: list[str]
    """Kind and instance of each attempt."""
    prompt_tokens: int | None
    overlap_tokens: int | None
    cached_tokens: int | None
    seconds: float
    waited_s: float | msgspec.UnsetType = msgspec.UNSET
    """In line for room; only where it had to wait."""


def request_line(record: RequestRecord) -> RequestLine:
    """Put a finished record into words."""
    plan = record.plan
    ended_s = record.arrived_s if record.ended_s is None else record.ended_s
    return RequestLine(
        request_id=record.request_id,
        path=record.path,
        model=record.base_model,
        status=record.status,
        error=record.error,
        stream=record.stream,
        reason=None if plan is None else str(plan.reason),
        legs=[f"{leg.kind}:{leg.alias}" for leg in record.legs],
        prompt_tokens=record.prompt_tokens,
        overlap_tokens=record.chosen_tokens,
        cached_tokens=record.cached_tokens,
        seconds=round(ended_s - record.arrived_s, 4),
        waited_s=msgspec.UNSET if record.waited_s is None else round(record.waited_s, 4),
    )
