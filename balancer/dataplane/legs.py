"""Carries out a plan: one leg, two in a row, or two at once; tries elsewhere while it is safe.

Rules:

1. Nothing goes to the client before the answering engine's first token is here, so a failure up
   to then still has its right status, or another instance.
2. Another instance is tried for errors that say so (`retryable`), as often as `core.reliability.tries`
   says, and only while all requests together don't retry too much (`core.reliability.retry_budget`). Who isn't asked again is
   said by `core.reliability.suspects`; each further attempt sees the fleet as it is then.
3. A decode leg that would be on its way only after the prefill engine's lease isn't sent, nor one
   that an engine may have begun already: both legs run again. Nobody is blamed.
4. A failed prefill leg is repeated on another prefill instance as long as the router offers one,
   then the decode instance does it all, or the request fails with 503, as the operator chose.
   What the client got wrong (4xx of the prefill engine) is its answer: decode never starts.
   Where a hand-over failed, its prefill engine is known as down by then, and no other is left, that is told:
   503, not 502.
5. If one leg of a pair dies, or the client leaves, the other is cancelled and its connection
   closed before anything else happens. So does who waits for a prefill engine that is lost
   (`dataplane.source_watch`).
6. What has to be encoded is encoded before any other leg (`dataplane.encoding`).
7. Where no rank has room the first decision waits for its turn (`dataplane.admission`).
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Final

from balancer.connectors.contract import Connector, LegContext, Notice, NoTransferError
from balancer.core.errors import (
    BalancerError,
    EngineError,
    EngineUnreachableError,
    FleetError,
    HandOverFailedError,
    LeaseEndedError,
    NoInstanceError,
)
from balancer.core.fleet.snapshot import Fleet, Role
from balancer.core.reliability.suspects import Suspects
from balancer.core.reliability.tries import Tries
from balancer.core.routing.conversations import Conversations
from balancer.core.routing.full_reports import FullReports
from balancer.core.routing.plan import RoutePlan
from balancer.core.routing.unread import UNREAD
from balancer.core.settings.dataplane import DataPlaneSettings
from balancer.dataplane.admission import Admission
from balancer.dataplane.encoding import EncodeMeans, RequestMedia
from balancer.dataplane.jobs import (
    Job,
    earlier_blocks,
    leg_context,
    note_plan,
    take_turn,
    whole_leg,
)
from balancer.dataplane.leg_sender import LegSender
from balancer.dataplane.one_leg import (
    DecodeAnswer,
    Deliver,
    LegCarrier,
    OnLegEnd,
    PrefillLegError,
)
from balancer.dataplane.source_watch import SourceWatch, Waiting
from balancer.fleet.transfer_notices import Arrival, TransferNotices
from balancer.routing.route import Route, UnreadRoute
from balancer.routing.router import Router
from indexer.core.types import RankId, Trust

_DEGRADED: Final = Trust.DEGRADED
OTHER_LEG_S: Final = 0.1
"""As long is waited for the prefill leg to fail, too, when a hand-over has: a refused connection takes less."""


class Legs:
    """Carries out plans. One per process."""

    def __init__(  # noqa: PLR0913 - built in one place, which hands everything down
        self,
        *,
        fleet: Callable[[], Fleet],
        router: Router,
        sender: LegSender,
        connectors: Mapping[str, Connector],
        settings: DataPlaneSettings,
        clock: Callable[[], float],
        new_id: Callable[[], str],
        on_leg_end: OnLegEnd,
        full_reports: FullReports,
        encode: EncodeMeans,
        admission: Admission | None,
        notices: TransferNotices | None,
    ) -> None:
        """`new_id` makes 32 hexadecimal digits that nobody else has."""
        self._fleet = fleet
        self._sender = sender
        self._router = router
        self._connectors = connectors
        self._retries = settings.retries
        self._reliability = sender.reliability
        self._clock = clock
        self._new_id = new_id
        self._encode = encode
        self._admission = admission
        self._notices = notices
        self._conversations = Conversations()
        self._watch = SourceWatch(fleet)
        self._carrier = LegCarrier(
            sender=sender,
            conversations=self._conversations,
            clock=clock,
            on_leg_end=on_leg_end,
            full_reports=full_reports,
        )

    async def carry(self, job: Job, deliver: Deliver) -> None:
        """Get the request answered and have `deliver` pass the answer on. Raises BalancerError."""
        self._reliability.requested()
        suspects: Suspects | None = None
        tries = Tries(self._retries)
        failed: BalancerError | None = None
        without_prefill = False
        media = self._encode.media_of(job)
        route = self._route_unread(job) if media is None and job.prompt is UNREAD else None
        while True:
            if route is None:
                suspects = suspects or Suspects()
                job, route = await self._next(
                    job, media, suspects, failed, without_prefill=without_prefill
                )
            try:
                with route:
                    await self._carried(job, media, route, deliver)
            except PrefillLegError as error:
                failed, without_prefill = error.cause, True
            except (EngineError, LeaseEndedError) as error:
                is_open = tries.has_after(error) and job.record.status is None
                is_redone = is_open and media is not None and media.redoes(error)
                if not is_open or not self._may_repeat(job, error, is_redone=is_redone):
                    raise
                tries.spend(error)
                failed = error
                suspects = suspects or Suspects()
                doubted = None if is_redone else suspects.note(error, route.plan)
                if doubted is not None:
                    self._sender.doubt(doubted)
            else:
                return
            route = None

    def _may_repeat(self, job: Job, error: BalancerError, *, is_redone: bool) -> bool:
        """Whether trying again is safe, and all requests together don't do so too much."""
        return (error.retryable or is_redone) and self._reliability.may_retry(job.record)

    def _route_unread(self, job: Job) -> Route | None:
        """Decide at once; None: it has to wait for room, or its steps are wanted for a trace."""
        if self._sender.traces or (self._admission is not None and self._admission.must_wait(job)):
            return None
        route = self._router.route_unread(job.fleet, job.request)
        if route is not None:
            job.record.plan = route.plan
            if self._reliability.standings.held_back:
                self._claim(route.plan)
        return route

    def _carried(
        self, job: Job, media: RequestMedia | None, route: Route, deliver: Deliver
    ) -> Awaitable[None]:
        if media is None and not self._sender.traces and self._is_plain(job, route):
            return self._carrier.decode_plain(job, route, deliver)
        return self._carry_route(job, media, route, deliver)

    def _is_plain(self, job: Job, route: Route) -> bool:
        """Whether one leg is all there is, with the client's own body, and nothing is kept of it."""
        if isinstance(route, UnreadRoute):
            return True
        target = route.plan.decode.candidate
        if route.plan.prefill is not None or job.request.conversation is not None:
            return False
        connector = self._connectors.get(target.instance.connector)
        may_ask = target.trust is _DEGRADED  # for a full report
        return not may_ask and (connector is None or not connector.pulls)

    async def _next(
        self,
        job: Job,
        media: RequestMedia | None,
        suspects: Suspects,
        failed: BalancerError | None,
        *,
        without_prefill: bool,
    ) -> tuple[Job, Route]:
        """What to attempt now."""
        if media is not None:
            job = await media.ready(None)
        return job, await self._route(job, suspects, failed, without_prefill=without_prefill)

    async def _route(
        self,
        job: Job,
        suspects: Suspects,
        failed: BalancerError | None,
        *,
        without_prefill: bool,
    ) -> Route:
        admission = self._admission
        is_first = failed is None and not without_prefill
        if is_first and admission is not None and admission.must_wait(job):
            turn = await admission.wait(job)
            try:
                return await self._choose(job, self._fleet(), suspects, None, without_prefill=False)
            finally:
                turn.end()
        # Who failed may be known as down by now, who restarted under its new ids.
        fleet = job.fleet if failed is None else self._fleet()
        return await self._choose(job, fleet, suspects, failed, without_prefill=without_prefill)

    async def _choose(
        self,
        job: Job,
        fleet: Fleet,
        suspects: Suspects,
        failed: BalancerError | None,
        *,
        without_prefill: bool,
    ) -> Route:
        for exclude in suspects.exclusions():
            try:
                route = await self._router.route(
                    fleet,
                    job.request,
                    job.prompt,
                    exclude=exclude,
                    prefill_failed=without_prefill,
                )
            except FleetError:
                if failed is None:
                    raise
            else:
                break
        else:
            assert failed is not None  # noqa: S101  else it was raised
            raise _last_word(fleet, job, failed)  # nobody is left
        note_plan(job.record, route.plan)
        self._claim(route.plan)
        return route

    async def _carry_route(
        self, job: Job, media: RequestMedia | None, route: Route, deliver: Deliver
    ) -> None:
        if media is not None:
            job = await media.ready(route.plan)
        if route.plan.prefill is None:
            leg = whole_leg(job, route.plan, self._connectors, self._new_id)
            await self._carrier.decode(job, route, leg, deliver)
        else:
            await self._carry_pairs(job, media, route, deliver)

    async def _carry_pairs(
        self, job: Job, media: RequestMedia | None, route: Route, deliver: Deliver
    ) -> None:
        """A prefill leg first, on another instance as long as there is one that may mend it."""
        assert route.plan.prefill is not None  # noqa: S101  the caller looked
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
            except PrefillLegError as error:
                if not isinstance(error.cause, EngineUnreachableError):
                    turn = None  # somebody may have read it
                tried |= frozenset(source.rank_ids())
                if not self._reliability.may_retry(job.record):
                    raise
                if not self._router.replace_prefill(self._fleet(), route, error.cause, tried):
                    raise
                note_plan(job.record, route.plan)
                self._claim(route.plan)
                if media is not None:
                    job = await media.ready(route.plan)
            else:
                return

    def _claim(self, plan: RoutePlan) -> None:
        """Who was chosen on trial is on trial from now on, however long its leg has to wait."""
        target, prefill = plan.decode.candidate.instance, plan.prefill
        chosen = (target,) if prefill is None else (prefill.candidate.instance, target)
        self._reliability.claim(*chosen)

    async def _carry_pair(
        self,
        job: Job,
        route: Route,
        connector: Connector,
        context: LegContext,
        deliver: Deliver,
    ) -> None:
        if connector.style(context) == "serial":
            with self._expecting(connector.notice(context)) as arrival:
                done = await self._carrier.prefill(
                    job,
                    route,
                    connector,
                    context,
                    lambda answer: connector.decode_leg(context, answer),
                )
                assert done.decode is not None  # noqa: S101  it was written just now
                route.end_prefill()
                if arrival is not None:
                    await arrival.wait()
            lease_s = connector.lease_s(context)
            by_s = None if lease_s is None else done.answered_s + lease_s
            async with self._watch.over(context.prefill.id) as waiting:
                waiting.begin()
                await self._carrier.decode(
                    job, route, done.decode, _ending(waiting, deliver), by_s=by_s
                )
            return
        async with self._watch.over(context.prefill.id) as waiting:
            await self._carry_concurrent(job, route, connector, context, waiting, deliver)

    def _expecting(self, notice: Notice | None) -> AbstractContextManager[Arrival | None]:
        if self._notices is None or notice is None:
            return nullcontext()
        return self._notices.expecting(notice)

    async def _carry_concurrent(
        self,
        job: Job,
        route: Route,
        connector: Connector,
        context: LegContext,
        waiting: Waiting,
        deliver: Deliver,
    ) -> None:
        try:
            leg = connector.decode_leg(context, None)
        except NoTransferError as error:
            raise PrefillLegError(error) from error
        prefilled = asyncio.Event()

        async def prefill() -> None:
            await self._carrier.prefill(job, route, connector, context, lambda _: None)
            route.end_prefill()
            prefilled.set()
            waiting.begin()

        async def deliver_after_prefill(decoded: DecodeAnswer) -> None:
            await prefilled.wait()
            await _ending(waiting, deliver)(decoded)

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(prefill())
                try:
                    await self._carrier.decode(job, route, leg, deliver_after_prefill)
                except HandOverFailedError:
                    # The prefill leg knows better why, if it fails: its error ends this block.
                    with suppress(TimeoutError):
                        async with asyncio.timeout(OTHER_LEG_S):
                            await prefilled.wait()
                    raise
        except ExceptionGroup as group_error:
            raise group_error.exceptions[0] from group_error


def _last_word(fleet: Fleet, job: Job, failed: BalancerError) -> BalancerError:
    """What went wrong is the answer. Of a hand-over it may be that nobody can hand over any more."""
    if isinstance(failed, HandOverFailedError):
        serving = fleet.serving(job.request.model)
        filling = [each for each in serving if each.role is Role.PREFILL]
        if filling and not any(each.is_available for each in filling):
            return NoInstanceError("no prefill instance of this model is available")
    return failed


def _ending(waiting: Waiting, deliver: Deliver) -> Deliver:
    """`deliver`, from when on nobody waits any more."""

    def delivered(decoded: DecodeAnswer) -> Awaitable[None]:
        waiting.end()
        return deliver(decoded)

    return delivered
