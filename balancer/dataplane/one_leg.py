"""Carries one leg of a plan, prefill or decode, from its request to its last byte.

Rules:

1. Every attempt leaves a `LegRecord`; a leg that ends with an exception withdraws what was
   predicted for it.
2. A prefill leg's answer is read whole and must let the connector write the decode leg. If it
   doesn't, or the engine fails, another prefill instance may mend it: `PrefillLegError`. What the
   client got wrong (4xx of the prefill engine) is its answer.
3. A decode leg has succeeded when its answer's first token is here; then it is delivered. One that
   begins with a comment is delivered before, and is no success yet.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from balancer.connectors.contract import Connector, LegContext, LegRequest
from balancer.core.errors import (
    BalancerError,
    EngineError,
)
from balancer.core.http.headers import Headers
from balancer.core.http.rewrite import encode_body
from balancer.core.load.ledger import LegGuard
from balancer.core.record import LegRecord
from balancer.core.routing.conversations import Conversations
from balancer.core.routing.forecast import Forecast
from balancer.core.routing.full_reports import FullReports
from balancer.core.routing.plan import Candidate, RoutePlan
from balancer.core.routing.unread import UNREAD
from balancer.dataplane.beginnings import Readiness, check_status, good_beginning, is_good
from balancer.dataplane.connection import UpstreamAnswer
from balancer.dataplane.jobs import (
    Job,
    asking_full_report,
    ended_turn,
    kept_s,
    leg_body,
    leg_headers,
    note_candidate,
    overlap,
    read_prefill,
)
from balancer.dataplane.leg_sender import LegInHand, LegSender
from balancer.routing.route import Route

MAX_PREFILL_ANSWER_BYTES = 64 * 1024 * 1024


class DecodeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A good answer whose first bytes are here. Nothing of it has gone to the client."""

    answer: UpstreamAnswer
    first: bytes
    leg: LegRecord
    guard: LegGuard
    plan: RoutePlan
    is_handed: bool = False
    """It loads what another engine computed, or finds it by a name."""
    keep: Callable[[bytes], None] | None = None
    """Wants the whole answer once it is complete, if it isn't too large."""
    on_word: Callable[[], None] | None = None
    """Wants to hear of its first token, where that isn't in `first`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilled:
    """A prefill leg that has ended well."""

    decode: LegRequest | None
    """What it let the connector write; None if that was written before."""
    answered_s: float
    """When its answer began."""


Deliver = Callable[[DecodeAnswer], Awaitable[None]]
OnLegEnd = Callable[[Forecast, LegRecord], None]


class PrefillLegError(Exception):
    """A prefill leg failed in a way that another instance may mend."""

    def __init__(self, cause: BalancerError) -> None:
        super().__init__(cause.message)
        self.cause = cause


class LegCarrier:
    """Carries single legs. One per process."""

    def __init__(
        self,
        *,
        sender: LegSender,
        conversations: Conversations,
        clock: Callable[[], float],
        on_leg_end: OnLegEnd,
        full_reports: FullReports,
    ) -> None:
        self._sender = sender
        self._conversations = conversations
        self._clock = clock
        self._on_leg_end = on_leg_end
        self._full_reports = full_reports

    async def prefill(
        self,
        job: Job,
        route: Route,
        connector: Connector,
        context: LegContext,
        conclude: Callable[[Mapping[str, Any]], LegRequest | None],
    ) -> Prefilled:
        """Run the prefill leg; `conclude` writes the decode leg from its answer.

        An answer from which nothing can be concluded is a failure of this leg.
        """
        choice = route.plan.prefill
        assert choice is not None  # noqa: S101  the callers look
        try:
            loads = context.earlier is not None
            forecast = route.forecast("prefill", loads=loads)
            with self._recorded(job, choice.candidate, "prefill") as leg:
                request = self._settled(job, connector.prefill_leg(context), choice.candidate)
                body = encode_body(request.body)
                headers = leg_headers(job, request)
                is_named = loads or connector.style(context) == "concurrent"
                ready = Readiness(clock=self._clock, by_s=None, is_handed=is_named)
                answer = await self._send(
                    job, choice.candidate, body, headers, on_ready=ready.check
                )
                answered_s = self._clock()
                try:
                    await check_status(answer, leg)
                    raw = await answer.read(MAX_PREFILL_ANSWER_BYTES)
                finally:
                    answer.close()
                self._sender.answered(leg)
                done = Prefilled(decode=conclude(read_prefill(raw, leg)), answered_s=answered_s)
                route.prefill_cached(leg.cached_tokens)
        except EngineError as error:
            if self._sender.blames_client(choice.candidate.instance, error):
                raise
            raise PrefillLegError(error) from error
        if forecast is not None:
            self._on_leg_end(forecast, leg)
        return done

    async def decode(
        self,
        job: Job,
        route: Route,
        request: LegRequest,
        deliver: Deliver,
        *,
        by_s: float | None = None,
    ) -> None:
        """Run the answering leg to its last byte. It isn't sent later than `by_s`."""
        plan = route.plan
        candidate = plan.decode.candidate
        loads = request.body is not job.request.body
        is_handed = loads or plan.prefill is not None
        on_ready = None
        if is_handed or by_s is not None:
            on_ready = Readiness(clock=self._clock, by_s=by_s, is_handed=is_handed).check
        if plan.prefill is None:
            request = self._settled(job, request, candidate)
        forecast = route.forecast("decode", loads=loads)
        with self._recorded(job, candidate, "decode") as leg:
            answer = await self._send(
                job, candidate, leg_body(job, request), leg_headers(job, request), on_ready=on_ready
            )
            try:
                first, has_word = await good_beginning(answer, leg, is_handed=is_handed)
                on_word = self._sender.when_answered(leg, has_word=has_word)
                await deliver(
                    DecodeAnswer(
                        answer=answer,
                        first=first,
                        leg=leg,
                        guard=route.decode_guard,
                        plan=plan,
                        is_handed=is_handed,
                        keep=self._keeper(job, plan),
                        on_word=on_word,
                    )
                )
            finally:
                answer.close()
        if forecast is not None:
            self._on_leg_end(forecast, leg)

    async def decode_plain(self, job: Job, route: Route, deliver: Deliver) -> None:
        """The same for a leg that is all there is: only the client's request is sent.

        In one step what else takes a dozen: most requests go this way.
        """
        candidate = route.plan.decode.candidate
        request, record, instance = job.request, job.record, candidate.instance
        sender, rank = self._sender, candidate.rank.rank
        leg = LegRecord(
            kind="decode",
            alias=instance.alias,
            overlap_tokens=None,
            started_s=self._clock(),
            rank=rank,
        )
        forecast = None
        if job.prompt is not UNREAD:
            forecast = route.forecast("decode", loads=False)
            if job.prompt.prompts:
                leg.overlap_tokens = overlap(candidate)
            note_candidate(leg, candidate)
            self._full_reports.ask(candidate, request, leg.started_s)  # so that it knows its trust
        record.legs.append(leg)
        sender.reliability.started(instance, leg, record)
        headers = (*request.headers, (b"x-request-id", request.request_id.encode()))
        if len(instance.ranks) > 1:
            headers = (*headers, (b"x-data-parallel-rank", b"%d" % (rank - instance.rank_base)))
        try:
            answer = await sender.send(
                instance, "POST", request.endpoint + job.query, headers, job.body
            )
            try:
                leg.status = answer.status
                if is_good(answer):
                    first, has_word = answer.take(), True
                else:
                    first, has_word = await good_beginning(answer, leg, is_handed=False)
                on_word = sender.when_answered(leg, has_word=has_word)
                await deliver(
                    DecodeAnswer(
                        answer=answer,
                        first=first,
                        leg=leg,
                        guard=route.decode_guard,
                        plan=route.plan,
                        on_word=on_word,
                    )
                )
            finally:
                answer.close()
        except BaseException as error:
            sender.ended(instance, leg, error)
            raise
        sender.ended(instance, leg, None)
        if forecast is not None:
            self._on_leg_end(forecast, leg)

    def _keeper(self, job: Job, plan: RoutePlan) -> Callable[[bytes], None] | None:
        """Who remembers what the decode engine keeps of this turn; None if it keeps nothing."""
        conversation = job.request.conversation
        if conversation is None:
            return None
        ttl_s = kept_s(job, plan)
        if ttl_s is None:
            return None

        def keep(raw: bytes) -> None:
            turn = ended_turn(job, plan, raw)
            if turn is not None:
                now_s = self._clock()
                self._conversations.put(conversation, turn, now_s=now_s, expires_s=now_s + ttl_s)

        return keep

    def _send(
        self,
        job: Job,
        candidate: Candidate,
        body: bytes,
        extra: Headers,
        *,
        on_ready: Callable[[], None] | None = None,
    ) -> Awaitable[UpstreamAnswer]:
        request = job.request
        headers = (*request.headers, *extra)
        rank = candidate.instance.rank_header(candidate.rank.rank)
        if rank is not None:
            headers = (*headers, (b"x-data-parallel-rank", rank.encode()))
        target = request.endpoint + job.query
        return self._sender.send(
            candidate.instance, "POST", target, headers, body, on_ready=on_ready
        )

    def _recorded(self, job: Job, candidate: Candidate, kind: str) -> LegInHand:
        """One attempt on the chosen rank."""
        overlap_tokens = overlap(candidate) if job.prompt.prompts else None
        leg = self._sender.recorded(candidate.instance, kind, job.record, overlap_tokens)
        if job.prompt is UNREAD:
            leg.record.rank = candidate.rank.rank
        else:
            note_candidate(leg.record, candidate)
        return leg

    def _settled(self, job: Job, request: LegRequest, candidate: Candidate) -> LegRequest:
        """The leg that prefills, as it is sent."""
        asks = self._full_reports.ask(candidate, job.request, self._clock())
        return asking_full_report(request) if asks else request
