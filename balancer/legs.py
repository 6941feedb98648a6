"""Carries out a plan: one leg, two in a row, or two at once; tries elsewhere while it is safe.

Rules:

1. Nothing goes to the client before the answering engine's first bytes are here, so a failure up
   to then still has its right status, or another instance.
2. Another instance is tried for errors that say so (`retryable`), at most `retries` times.
3. A failed prefill leg is repeated on another prefill instance as long as the router offers one,
   then the decode instance does it all, or the request fails with 503, as the operator chose.
   What the client got wrong (4xx of the prefill engine) is its answer: decode never starts.
4. If one leg of a pair dies, or the client leaves, the other is cancelled and its connection
   closed before anything else happens.
5. Every attempt leaves a `LegRecord`; a leg that ends with an exception withdraws what was
   predicted for it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from balancer.connection import UpstreamAnswer
from balancer.connectors.contract import Connector, LegContext, LegRequest, NoTransferError
from balancer.core.dataplane_settings import DataPlaneSettings
from balancer.core.errors import (
    BalancerError,
    EngineClosedError,
    EngineError,
    EngineRefusedError,
    FleetError,
    StreamCutError,
)
from balancer.core.fleet import Fleet, Instance
from balancer.core.http_headers import Headers
from balancer.core.load import LegGuard
from balancer.core.plan import Candidate, RoutePlan
from balancer.core.record import LegRecord, RequestRecord
from balancer.core.request import GenerateRequest, PromptView
from balancer.core.rewrite import encode_body, with_usage
from balancer.core.usage import prefill_fault, read_usage
from balancer.leg_sender import LegSender
from balancer.router import Route, Router
from indexer.core.types import RankId

MAX_ERROR_BYTES = 16 * 1024 * 1024
MAX_PREFILL_ANSWER_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeAnswer:
    """A good answer whose first bytes are here. Nothing of it has gone to the client."""

    answer: UpstreamAnswer
    first: bytes
    leg: LegRecord
    guard: LegGuard
    plan: RoutePlan


Deliver = Callable[[DecodeAnswer], Awaitable[None]]
T = TypeVar("T")


class _PrefillLegError(Exception):
    """A prefill leg failed in a way that another instance may mend."""

    def __init__(self, cause: BalancerError) -> None:
        super().__init__(cause.message)
        self.cause = cause


class Legs:
    """Carries out plans. One per process."""

    def __init__(
        self,
        *,
        router: Router,
        sender: LegSender,
        connectors: Mapping[str, Connector],
        settings: DataPlaneSettings,
        clock: Callable[[], float],
    ) -> None:
        self._router = router
        self._sender = sender
        self._connectors = connectors
        self._retries = settings.retries
        self._clock = clock

    async def carry(self, job: Job, deliver: Deliver) -> None:
        """Get the request answered and have `deliver` pass the answer on. Raises BalancerError."""
        tried: frozenset[RankId] = frozenset()
        retries_left = self._retries
        failed: BalancerError | None = None
        without_prefill = False
        while True:
            route = await self._route(job, tried, failed, without_prefill=without_prefill)
            try:
                with route:
                    await self._carry_route(job, route, deliver)
            except _PrefillLegError as error:
                failed, without_prefill = error.cause, True
            except EngineError as error:
                if not error.retryable or not retries_left or job.record.status is not None:
                    raise
                retries_left -= 1
                failed = error
                tried |= frozenset(route.plan.decode.candidate.instance.rank_ids())
            else:
                return

    async def _route(
        self,
        job: Job,
        tried: frozenset[RankId],
        failed: BalancerError | None,
        *,
        without_prefill: bool,
    ) -> Route:
        try:
            route = await self._router.route(
                job.fleet,
                job.request,
                job.prompt,
                exclude=tried,
                prefill_failed=without_prefill,
            )
        except FleetError:
            if failed is None:
                raise
            raise failed from None  # nobody else is left: what went wrong is the answer
        note_plan(job.record, route.plan)
        return route

    async def _carry_route(self, job: Job, route: Route, deliver: Deliver) -> None:
        if route.plan.prefill is None:
            await self._decode(job, route, job.body, (), deliver)
            return
        tried: frozenset[RankId] = frozenset()
        while True:
            source = route.plan.prefill.candidate.instance
            connector = self._connectors[source.connector]
            try:
                await self._carry_pair(job, route, connector, deliver)
            except _PrefillLegError as error:
                tried |= frozenset(source.rank_ids())
                if not self._router.replace_prefill(job.fleet, route, error.cause, tried):
                    raise
                note_plan(job.record, route.plan)
            else:
                return

    async def _carry_pair(
        self, job: Job, route: Route, connector: Connector, deliver: Deliver
    ) -> None:
        context = _leg_context(job, route.plan)
        if connector.style == "serial":
            leg = await self._prefill(
                job, route, connector, context, lambda answer: connector.decode_leg(context, answer)
            )
            _end_prefill(route)
            await self._decode(job, route, _leg_body(job, leg), leg.headers, deliver)
            return
        leg = connector.decode_leg(context, None)
        prefilled = asyncio.Event()

        async def prefill() -> None:
            await self._prefill(job, route, connector, context, lambda _: None)
            _end_prefill(route)
            prefilled.set()

        async def deliver_after_prefill(decoded: DecodeAnswer) -> None:
            await prefilled.wait()
            await deliver(decoded)

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(prefill())
                await self._decode(
                    job, route, _leg_body(job, leg), leg.headers, deliver_after_prefill
                )
        except ExceptionGroup as group_error:
            raise group_error.exceptions[0] from group_error

    async def _prefill(
        self,
        job: Job,
        route: Route,
        connector: Connector,
        context: LegContext,
        conclude: Callable[[Mapping[str, Any]], T],
    ) -> T:
        """Run the prefill leg; return what `conclude` makes of its answer.

        An answer from which nothing can be concluded is a failure of this leg.
        """
        choice = route.plan.prefill
        assert choice is not None  # noqa: S101  the callers look
        try:
            with self._recorded(job, "prefill", choice.candidate) as leg:
                request = connector.prefill_leg(context)
                body = encode_body(request.body)
                answer = await self._send(job, choice.candidate, body, request.headers)
                try:
                    await self._check_status(answer, leg)
                    raw = await answer.read(MAX_PREFILL_ANSWER_BYTES)
                finally:
                    answer.close()
                leg.first_byte_s = self._clock()
                return conclude(_read_prefill(raw, leg))
        except EngineError as error:
            if self._is_clients_fault(choice.candidate.instance, error):
                raise
            raise _PrefillLegError(error) from error

    async def _decode(
        self, job: Job, route: Route, body: bytes, headers: Headers, deliver: Deliver
    ) -> None:
        """Run the answering leg to its last byte."""
        candidate = route.plan.decode.candidate
        with self._recorded(job, "decode", candidate) as leg:
            answer = await self._send(job, candidate, body, headers)
            try:
                await self._check_status(answer, leg)
                first = await _first_chunk(answer)
                leg.first_byte_s = self._clock()
                await deliver(
                    DecodeAnswer(
                        answer=answer,
                        first=first,
                        leg=leg,
                        guard=route.decode_guard,
                        plan=route.plan,
                    )
                )
            finally:
                answer.close()

    async def _send(
        self, job: Job, candidate: Candidate, body: bytes, extra: Headers
    ) -> UpstreamAnswer:
        request = job.request
        headers = [*request.headers, (b"x-request-id", request.request_id.encode()), *extra]
        rank = candidate.instance.rank_header(candidate.rank.rank)
        if rank is not None:
            headers.append((b"x-data-parallel-rank", rank.encode()))
        target = request.endpoint.value + job.query
        return await self._sender.send(candidate.instance, "POST", target, tuple(headers), body)

    async def _check_status(self, answer: UpstreamAnswer, leg: LegRecord) -> None:
        leg.status = answer.status
        if answer.status >= 400:
            body = await answer.read(MAX_ERROR_BYTES)
            raise EngineRefusedError(answer.status, answer.headers, body, alias=leg.alias)

    @contextmanager
    def _recorded(self, job: Job, kind: str, candidate: Candidate) -> Iterator[LegRecord]:
        overlap_tokens = _overlap(candidate) if job.prompt.prompts else None
        with self._sender.recorded(candidate.instance, kind, job.record, overlap_tokens) as leg:
            note_candidate(leg, candidate)
            yield leg

    def _is_clients_fault(self, instance: Instance, error: BalancerError) -> bool:
        """Tell whether another prefill engine would refuse the request, too."""
        if not isinstance(error, EngineRefusedError) or not 400 <= error.status < 500:
            return False
        if error.status in {401, 403}:
            return self._sender.engine_key(instance.id) is None
        return error.status not in {408, 429}


async def _first_chunk(answer: UpstreamAnswer) -> bytes:
    """Wait for the body's beginning: engines send a stream's 200 before they compute anything."""
    try:
        first = await answer.next_chunk()
    except StreamCutError as error:
        raise EngineClosedError("the engine left before its answer's first byte") from error
    if not first and answer.status == 200:
        raise EngineClosedError("the engine answered 200 without a body")
    return first


def note_plan(record: RequestRecord, plan: RoutePlan) -> None:
    """Write down what was decided and what could have been."""
    record.plan = plan
    if record.prompt_tokens is None:
        return
    considered = (*plan.considered, *plan.considered_prefill, plan.decode)
    record.available_tokens = max(_overlap(each.candidate) for each in considered)
    record.chosen_tokens = _overlap((plan.prefill or plan.decode).candidate)


def note_candidate(leg: LegRecord, candidate: Candidate) -> None:
    """Write down what the index said of the rank that gets the leg."""
    leg.rank = candidate.rank.rank
    leg.trust = candidate.trust.value
    leg.block_size = candidate.block_size
    if leg.overlap_tokens is not None:
        leg.held_tokens = candidate.overlap_tokens


def _overlap(candidate: Candidate) -> int:
    """What the engine is expected to report as cached."""
    return max(candidate.overlap_tokens, candidate.predicted_tokens)


def _leg_context(job: Job, plan: RoutePlan) -> LegContext:
    assert plan.prefill is not None  # noqa: S101  the callers look
    prefill, decode = plan.prefill.candidate, plan.decode.candidate
    return LegContext(
        request_id=job.request.request_id,
        path=job.request.endpoint.value,
        body=job.request.body,
        prefill=prefill.instance,
        prefill_rank=prefill.rank.rank,
        decode=decode.instance,
        decode_rank=decode.rank.rank,
    )


def _leg_body(job: Job, leg: LegRequest) -> bytes:
    if leg.body is job.request.body:
        return job.body
    return encode_body(with_usage(leg.body) if job.asks_usage else leg.body)


def _end_prefill(route: Route) -> None:
    """The prefill leg did its work: its rank is free, its blocks are expected to be there."""
    if route.prefill_guard is not None:
        route.prefill_guard.first_token()
        route.prefill_guard.__exit__(None, None, None)


def _read_prefill(raw: bytes, leg: LegRecord) -> Mapping[str, Any]:
    try:
        answer = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise NoTransferError("the prefill answer is not JSON") from error
    fault = prefill_fault(answer)
    if fault is not None:
        raise NoTransferError(fault)
    usage = read_usage(answer.get("usage"))
    if usage is not None:
        leg.prompt_tokens = usage.prompt_tokens
        leg.cached_tokens = usage.cached_tokens
        leg.completion_tokens = usage.completion_tokens
    read: Mapping[str, Any] = answer
    return read
