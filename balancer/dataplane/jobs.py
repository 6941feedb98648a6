"""A request ready to be carried out, and what each of its legs sends and tells.

Rules:

1. Everything here is a function of the job and its plan; nothing waits, nothing is sent.
2. A leg whose body is the client's own is sent as the client's bytes.
"""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from balancer.connectors.contract import (
    Connector,
    LegContext,
    LegRequest,
    NoTransferError,
    PullContext,
    settings_of,
)
from balancer.core.fleet.snapshot import Fleet
from balancer.core.http.headers import Headers
from balancer.core.http.rewrite import encode_body, with_usage
from balancer.core.http.usage import prefill_fault, read_usage
from balancer.core.http.usage_splice import render_details
from balancer.core.record import LegRecord, RequestRecord
from balancer.core.request import GenerateRequest, PromptView
from balancer.core.routing.conversations import (
    Conversations,
    LastTurn,
    read_answered,
    remember,
    usable_params,
)
from balancer.core.routing.full_reports import SESSION_HEADER, with_full_report
from balancer.core.routing.plan import Candidate, RoutePlan
from balancer.core.settings.transfer import NixlSettings
from indexer.core.types import Trust


class Job(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A request ready to be carried out."""

    fleet: Fleet
    request: GenerateRequest
    prompt: PromptView
    record: RequestRecord
    body: bytes
    """What a single leg sends."""
    asks_usage: bool
    """We ask for the usage of this stream; the client didn't."""
    query: str = ""
    """With its question mark, or empty."""


def note_plan(record: RequestRecord, plan: RoutePlan) -> None:
    """Write down what was decided and what could have been."""
    record.plan = plan
    if record.prompt_tokens is None:
        return
    most = overlap(plan.decode.candidate)
    record.chosen_tokens = most if plan.prefill is None else overlap(plan.prefill.candidate)
    for considered in (plan.considered, plan.considered_prefill):
        for each in considered:
            candidate = each.candidate
            most = max(most, candidate.overlap_tokens, candidate.predicted_tokens)
    record.available_tokens = most


def note_candidate(leg: LegRecord, candidate: Candidate) -> None:
    """Write down what the index said of the rank that gets the leg."""
    leg.rank = candidate.rank.rank
    leg.trust, leg.trust_reason = str(candidate.trust), candidate.trust_reason
    leg.block_size = candidate.block_size
    if leg.overlap_tokens is not None:
        leg.held_tokens = candidate.overlap_tokens


def overlap(candidate: Candidate) -> int:
    """What the engine is expected to report as cached."""
    return max(candidate.overlap_tokens, candidate.predicted_tokens)


def whole_leg(
    job: Job, plan: RoutePlan, connectors: Mapping[str, Connector], new_id: Callable[[], str]
) -> LegRequest:
    """A leg without a prefill leg: the client's body, or one that fetches a peer's blocks."""
    target = plan.decode.candidate
    connector = connectors.get(target.instance.connector)
    if connector is None or not connector.pulls or len(job.prompt.prompts) != 1:
        return LegRequest(body=job.request.body)
    source = fuller_peer(plan)
    if source is None:
        return LegRequest(body=job.request.body)
    context = PullContext(
        attempt_id=new_id(),
        body=job.request.body,
        target=target.instance,
        source=source.instance,
        source_rank=source.rank.rank,
        more_tokens=source.overlap_tokens - overlap(target),
    )
    return LegRequest(body=connector.pull(context) or job.request.body)


def asking_full_report(request: LegRequest) -> LegRequest:
    """The same leg, which has its engine announce again what it reuses."""
    body = with_full_report(request.body)
    return msgspec.structs.replace(request, body=body, headers=(*request.headers, SESSION_HEADER))


def fuller_peer(plan: RoutePlan) -> Candidate | None:
    """Whoever else holds most of the prompt by events, with the same connector."""
    target = plan.decode.candidate
    peers = [
        each.candidate
        for each in plan.considered
        if each.candidate.instance.id != target.instance.id
        and each.candidate.instance.connector == target.instance.connector
        and each.candidate.overlap_tokens > overlap(target)
    ]
    return max(peers, key=lambda each: each.overlap_tokens, default=None)


def leg_context(
    job: Job, plan: RoutePlan, attempt_id: str, earlier: Mapping[str, Any] | None = None
) -> LegContext:
    """What a connector is told of one attempt at a plan with two legs."""
    assert plan.prefill is not None  # noqa: S101  the callers look
    prefill, decode = plan.prefill.candidate, plan.decode.candidate
    return LegContext(
        request_id=job.request.request_id,
        attempt_id=attempt_id,
        earlier=earlier,
        path=job.request.endpoint.value,
        body=job.request.body,
        prefill=prefill.instance,
        prefill_rank=prefill.rank.rank,
        decode=decode.instance,
        decode_rank=decode.rank.rank,
    )


def kept_s(job: Job, plan: RoutePlan) -> float | None:
    """How long the decode engine keeps what it computes for the next turn; None: it doesn't."""
    if plan.prefill is None or len(job.prompt.prompts) != 1:
        return None
    sides = (plan.prefill.candidate.instance, plan.decode.candidate.instance)
    settings = [settings_of(each, NixlSettings) for each in sides]
    return settings[1].decode_ttl_s if all(each.bidirectional for each in settings) else None


def take_turn(
    job: Job, plan: RoutePlan, conversations: Conversations, now_s: float
) -> LastTurn | None:
    """The conversation's last turn, if its prefill engine can read what was kept of it."""
    if job.request.conversation is None or kept_s(job, plan) is None:
        return None
    return conversations.take(job.request.conversation, now_s)


def earlier_blocks(job: Job, plan: RoutePlan, turn: LastTurn | None) -> Mapping[str, Any] | None:
    """Blocks of the last turn that the prefill engine may read for this prompt."""
    if turn is None:
        return None
    held = (
        each.candidate.overlap_tokens
        for each in plan.considered
        if each.candidate.rank == turn.rank and each.candidate.trust is Trust.EXACT
    )
    return usable_params(turn, job.prompt.prompts[0], job.request.body, next(held, 0))


def ended_turn(job: Job, plan: RoutePlan, raw: bytes) -> LastTurn | None:
    """What the decode engine keeps of the turn that `raw` answers; None if it keeps nothing."""
    target = plan.decode.candidate
    answered = read_answered(raw)
    if answered is None or target.block_size is None:
        return None
    prompt = job.prompt.prompts[0]
    return remember(answered, target.rank, prompt, job.request.body, target.block_size)


def leg_body(job: Job, leg: LegRequest) -> bytes:
    """What the answering leg sends."""
    if leg.body is job.request.body:
        return job.body
    return encode_body(with_usage(leg.body) if job.asks_usage else leg.body)


def leg_headers(job: Job, leg: LegRequest) -> Headers:
    """What a leg sends beside the client's headers: its id and what the connector adds."""
    request_id = leg.request_id or job.request.request_id
    return ((b"x-request-id", request_id.encode()), *leg.headers)


def read_prefill(raw: bytes, leg: LegRecord) -> Mapping[str, Any]:
    """A prefill leg's answer; its usage goes into the record. Raises NoTransferError."""
    try:
        answer = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise NoTransferError("the prefill answer is not JSON, or nested too deep") from error
    fault = prefill_fault(answer)
    if fault is not None:
        raise NoTransferError(fault)
    leg.prompt_details = render_details(answer.get("usage"))
    usage = read_usage(answer.get("usage"))
    if usage is not None:
        leg.prompt_tokens = usage.prompt_tokens
        leg.cached_tokens = usage.cached_tokens
        leg.completion_tokens = usage.completion_tokens
    read: Mapping[str, Any] = answer
    return read
