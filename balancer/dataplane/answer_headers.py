"""What answers tell their client of the decision: the `x-kvlb-*` headers that say who and why.

All the terms of every candidate are told to those who ask only (`core.routing.explain`).
"""

from functools import lru_cache

from balancer.core.fleet.snapshot import Role
from balancer.core.http.headers import Headers
from balancer.core.record import EncodeRecord
from balancer.core.routing.plan import RoutePlan


def plan_headers(plan: RoutePlan) -> Headers:
    """What a client may know of the decision."""
    decode = plan.decode.candidate.instance
    if plan.prefill is not None:
        prefill = plan.prefill.candidate.instance.alias
    else:
        prefill = "none" if decode.role is Role.MIXED else "skipped"
    headers = _told(decode.alias, prefill, plan.reason)
    if plan.prompt_tokens is None:
        return headers
    source = (plan.prefill or plan.decode).candidate
    overlap = max(source.overlap_tokens, source.predicted_tokens)
    headers = (
        *headers,
        (b"x-kvlb-trust", source.trust.encode()),
        (b"x-kvlb-overlap-tokens", b"%d" % overlap),
    )
    if source.trust_reason is None:
        return headers
    return (*headers, (b"x-kvlb-trust-reason", source.trust_reason.encode()))


@lru_cache(4096)
def _told(instance: str, prefill: str, reason: str) -> Headers:
    """Of every answer. As many as there are pairs of instances, and reasons."""
    return (
        (b"x-kvlb-instance", instance.encode()),
        (b"x-kvlb-prefill", prefill.encode()),
        (b"x-kvlb-reason", reason.encode()),
    )


def encode_headers(encode: EncodeRecord) -> Headers:
    """Who encoded images, audio and video, and why."""
    names = ",".join(encode.instances) or "none"
    return (
        (b"x-kvlb-encode", names.encode()),
        (b"x-kvlb-encode-reason", encode.reason.encode()),
    )
