"""Carries out a plan: one leg, two in a row, or two at once; tries elsewhere while it is safe.

Rules:

1. Nothing goes to the client before the answering engine's first token is here, so a failure up
   to then still has its right status, or another instance.
2. Another instance is tried for errors that say so (`retryable`), at most `retries` times.
3. A decode leg that would be on its way only after the prefill engine's lease isn't sent, nor one
   that an engine may have begun already: both legs run again. Nobody is blamed.
4. A failed prefill leg is repeated on another prefill instance as long as the router offers one,
   then the decode instance does it all, or the request fails with 503, as the operator chose.
   What the client got wrong (4xx of the prefill engine) is its answer: decode never starts.
5. If one leg of a pair dies, or the client leaves, the other is cancelled and its connection
   closed before anything else happens.
6. What has to be encoded is encoded before any other leg (`dataplane.encoding`).
7. Every attempt leaves a `LegRecord`; a leg that ends with an exception withdraws what was
   predicted for it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from balancer.connectors.contract import (
    Connector,
    LegContext,
    LegRequest,
    NoTransferError,
)
from balancer.core.conversations import Conversations
from balancer.core.dataplane_settings import DataPlaneSettings
from balancer.core.errors import (
    BalancerError,
    EngineError,
    EngineUnreachableError,
    FleetError,
    LeaseEndedError,
)
from balancer.core.forecast import Forecast
from balancer.core.full_reports import FullReports
from balancer.core.http_headers import Headers
from balancer.core.load import LegGuard
from balancer.core.plan import Candidate, RoutePlan
from balancer.core.record import LegRecord
from balancer.core.rewrite import encode_body
from balancer.dataplane.beginnings import Readiness, check_status, good_beginning
from balancer.dataplane.connection import UpstreamAnswer
from balancer.dataplane.encoding import EncodeMeans, RequestMedia
from balancer.dataplane.jobs import (
    Job,
    asking_full_report,
    earlier_blocks,
    ended_turn,
    kept_s,
    leg_body,
    leg_context,
    leg_headers,
    note_candidate,
    note_plan,
    overlap,
    read_prefill,
    take_turn,
    whole_leg,
)
from balancer.dataplane.leg_sender import LegSender
from balancer.routing.router import Route, Router
from indexer.core.types import RankId

MAX_PREFILL_ANSWER_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeAnswer:
    """A good answer whose first bytes are here. Nothing of it has gone to the client."""

    answer: UpstreamAnswer
    first: bytes
    leg: LegRecord
    guard: LegGuard
    plan: RoutePlan
    keep: Callable[[bytes], None] | None = None
    """Wants the whole answer once it is complete, if it isn't too large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prefilled:
    """A prefill leg that has ended well."""

    decode: LegRequest | None
    """What it let the connector write; None if that was written before."""
    answered_s: float
    """When its answer began."""


Deliver = Callable[[DecodeAnswer], Awaitable[None]]
OnLegEnd = Callable[[Forecast, LegRecord], None]


class _PrefillLegError(Exception):
    """A prefill leg failed in a way that another instance may mend."""

    def __init__(self, cause: BalancerError) -> None:
        super().__init__(cause.message)
        self.cause = cause


class Legs:
    """Carries out plans. One per process."""

    def __init__(  # noqa: PLR0913 - built in one place, which hands everything down
        self,
        *,
        router: Router,
        sender: LegSender,
        connectors: Mapping[str, Connector],
        settings: DataPlaneSettings,
        clock: Callable[[], float],
        new_id: Callable[[], str],
        on_leg_end: OnLegEnd,
        full_reports: FullReports,
        encode: EncodeMeans,
    ) -> None:
        """`new_id` makes 32 hexadecimal digits that nobody else has."""
        self._router = router
        self._sender = sender
        self._connectors = connectors
        self._retries = settings.retries
        self._clock = clock
        self._new_id = new_id
        self._on_leg_end = on_leg_end
        self._full_reports = full_reports
        self._encode = encode
        self._conversations = Conversations()

    async def carry(self, job: Job, deliver: Deliver) -> None:
        """Get the request answered and have `deliver` pass the answer on. Raises BalancerError."""
        tried: frozenset[RankId] = frozenset()
        retries_left = self._retries
        failed: BalancerError | None = None
        without_prefill = False
        media = self._encode.media_of(job)
        while True:
            job = await media.ready(None)
            route = await self._route(job, tried, failed, without_prefill=without_prefill)
            try:
                with route:
                    await self._carry_route(media, route, deliver)
            except _PrefillLegError as error:
                failed, without_prefill = error.cause, True
            except (EngineError, LeaseEndedError) as error:
                if not retries_left or job.record.status is not None:
                    raise
                is_redone = media.redoes(error)
                if not error.retryable and not is_redone:
                    raise
                retries_left -= 1
                failed = error
                if isinstance(error, EngineError) and not is_redone:
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

    async def _carry_route(self, media: RequestMedia, route: Route, deliver: Deliver) -> None:
        job = await media.ready(route.plan)
        if route.plan.prefill is None:
            await self._decode(
                job, route, whole_leg(job, route.plan, self._connectors, self._new_id), deliver
            )
            return
        tried: frozenset[RankId] = frozenset()
        turn = take_turn(job, route.plan, self._conversations, self._clock())
        while True:
            source = route.plan.prefill.candidate.instance
            earlier = earlier_blocks(job, route.plan, turn)
            context = leg_context(job, route.plan, self._new_id(), earlier)
            try:
                await self._carry_pair(
                    job, route, self._connectors[source.connector], context, deliver
                )
            except _PrefillLegError as error:
                if not isinstance(error.cause, EngineUnreachableError):
                    turn = None  # somebody may have read it
                tried |= frozenset(source.rank_ids())
                if not self._router.replace_prefill(job.fleet, route, error.cause, tried):
                    raise
                note_plan(job.record, route.plan)
                job = await media.ready(route.plan)
            else:
                return

    async def _carry_pair(
        self,
        job: Job,
        route: Route,
        connector: Connector,
        context: LegContext,
        deliver: Deliver,
    ) -> None:
        if connector.style(context) == "serial":
            done = await self._prefill(
                job, route, connector, context, lambda answer: connector.decode_leg(context, answer)
            )
            assert done.decode is not None  # noqa: S101  it was written just now
            route.end_prefill()
            lease_s = connector.lease_s(context)
            by_s = None if lease_s is None else done.answered_s + lease_s
            await self._decode(job, route, done.decode, deliver, by_s=by_s)
            return
        await self._carry_concurrent(job, route, connector, context, deliver)

    async def _carry_concurrent(
        self,
        job: Job,
        route: Route,
        connector: Connector,
        context: LegContext,
        deliver: Deliver,
    ) -> None:
        try:
            leg = connector.decode_leg(context, None)
        except NoTransferError as error:
            raise _PrefillLegError(error) from error
        prefilled = asyncio.Event()

        async def prefill() -> None:
            await self._prefill(job, route, connector, context, lambda _: None)
            route.end_prefill()
            prefilled.set()

        async def deliver_after_prefill(decoded: DecodeAnswer) -> None:
            await prefilled.wait()
            await deliver(decoded)

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(prefill())
                await self._decode(job, route, leg, deliver_after_prefill)
        except ExceptionGroup as group_error:
            raise group_error.exceptions[0] from group_error

    async def _prefill(
        self,
        job: Job,
        route: Route,
        connector: Connector,
        context: LegContext,
        conclude: Callable[[Mapping[str, Any]], LegRequest | None],
    ) -> _Prefilled:
        """Run the prefill leg; `conclude` writes the decode leg from its answer.

        An answer from which nothing can be concluded is a failure of this leg.
        """
        choice = route.plan.prefill
        assert choice is not None  # noqa: S101  the callers look
        try:
            loads = context.earlier is not None
            with self._recorded(job, route, "prefill", loads=loads) as leg:
                request = self._settled(job, connector.prefill_leg(context), choice.candidate)
                body = encode_body(request.body)
                headers = leg_headers(job, request)
                ready = Readiness(clock=self._clock, by_s=None, is_handed=loads)
                answer = await self._send(
                    job, choice.candidate, body, headers, on_ready=ready.check
                )
                answered_s = self._clock()
                try:
                    await check_status(answer, leg)
                    raw = await answer.read(MAX_PREFILL_ANSWER_BYTES)
                finally:
                    answer.close()
                leg.first_byte_s = self._clock()
                done = _Prefilled(decode=conclude(read_prefill(raw, leg)), answered_s=answered_s)
                route.prefill_cached(leg.cached_tokens)
                return done
        except EngineError as error:
            if self._sender.blames_client(choice.candidate.instance, error):
                raise
            raise _PrefillLegError(error) from error

    async def _decode(
        self,
        job: Job,
        route: Route,
        request: LegRequest,
        deliver: Deliver,
        *,
        by_s: float | None = None,
    ) -> None:
        """Run the answering leg to its last byte. It isn't sent later than `by_s`."""
        candidate = route.plan.decode.candidate

        loads = request.body is not job.request.body
        is_handed = loads or route.plan.prefill is not None
        ready = Readiness(clock=self._clock, by_s=by_s, is_handed=is_handed)
        if route.plan.prefill is None:
            request = self._settled(job, request, candidate)
        with self._recorded(job, route, "decode", loads=loads) as leg:
            answer = await self._send(
                job,
                candidate,
                leg_body(job, request),
                leg_headers(job, request),
                on_ready=ready.check,
            )
            try:
                first = await good_beginning(answer, leg, is_handed=is_handed)
                leg.first_byte_s = self._clock()
                await deliver(
                    DecodeAnswer(
                        answer=answer,
                        first=first,
                        leg=leg,
                        guard=route.decode_guard,
                        plan=route.plan,
                        keep=self._keeper(job, route.plan),
                    )
                )
            finally:
                answer.close()

    def _keeper(self, job: Job, plan: RoutePlan) -> Callable[[bytes], None] | None:
        """Who remembers what the decode engine keeps of this turn; None if it keeps nothing."""
        conversation, ttl_s = job.request.conversation, kept_s(job, plan)
        if conversation is None or ttl_s is None:
            return None

        def keep(raw: bytes) -> None:
            turn = ended_turn(job, plan, raw)
            if turn is not None:
                self._conversations.put(conversation, turn, expires_s=self._clock() + ttl_s)

        return keep

    async def _send(
        self,
        job: Job,
        candidate: Candidate,
        body: bytes,
        extra: Headers,
        *,
        on_ready: Callable[[], None] | None = None,
    ) -> UpstreamAnswer:
        request = job.request
        headers = [*request.headers, *extra]
        rank = candidate.instance.rank_header(candidate.rank.rank)
        if rank is not None:
            headers.append((b"x-data-parallel-rank", rank.encode()))
        target = request.endpoint.value + job.query
        return await self._sender.send(
            candidate.instance, "POST", target, tuple(headers), body, on_ready=on_ready
        )

    @contextmanager
    def _recorded(self, job: Job, route: Route, kind: str, *, loads: bool) -> Iterator[LegRecord]:
        """One attempt: its record, and what it shows of the index when it has ended."""
        forecast = route.forecast(kind, loads=loads)
        plan = route.plan
        choice = plan.prefill if kind == "prefill" and plan.prefill else plan.decode
        candidate = choice.candidate
        overlap_tokens = overlap(candidate) if job.prompt.prompts else None
        with self._sender.recorded(candidate.instance, kind, job.record, overlap_tokens) as leg:
            note_candidate(leg, candidate)
            yield leg
        self._on_leg_end(forecast, leg)

    def _settled(self, job: Job, request: LegRequest, candidate: Candidate) -> LegRequest:
        """The leg that prefills, as it is sent."""
        asks = self._full_reports.ask(candidate, job.request, self._clock())
        return asking_full_report(request) if asks else request
