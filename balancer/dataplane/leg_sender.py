"""One leg to one instance: the engine's key, its `LegRecord`, and word of how it went.

Cost: plain calls. Every request passes here, so there is no generator behind a `with`.
"""

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType

from balancer.core.errors import (
    BalancerError,
    EngineError,
    EngineRefusedError,
    HandOverFailedError,
)
from balancer.core.fleet.snapshot import Instance
from balancer.core.http.body import Body
from balancer.core.http.headers import Headers, drop_header
from balancer.core.http.own_mark import BALANCER
from balancer.core.record import LegRecord, RequestRecord
from balancer.dataplane.connection import UpstreamAnswer
from balancer.dataplane.reliability import Reliability
from balancer.dataplane.upstream import Upstream
from balancer.tracing import Tracing
from indexer.core.types import InstanceId

ReportHealth = Callable[[InstanceId, bool, str | None], None]
EngineKey = Callable[[InstanceId], str | None]


class LegSender:
    """Sends one leg to one instance, with the headers it needs."""

    def __init__(  # noqa: PLR0913 - built in one place, which hands everything down
        self,
        *,
        upstream: Upstream,
        engine_key: EngineKey,
        report_health: ReportHealth,
        clock: Callable[[], float],
        tracing: Tracing,
        reliability: Reliability,
        balancer_id: str,
    ) -> None:
        self._mark = (BALANCER.encode(), balancer_id.encode())
        self._upstream = upstream
        self.reliability = reliability
        self._report_health = report_health
        self._clock = clock
        self._tracing = tracing
        self.traces = tracing.is_on
        self.engine_key = engine_key

    def send(
        self,
        instance: Instance,
        method: str,
        target: str,
        headers: Headers,
        body: Body,
        *,
        on_ready: Callable[[], None] | None = None,
    ) -> Awaitable[UpstreamAnswer]:
        """Send with the instance's own key, if it has one, in place of the client's.

        `on_ready` is asked just before the request is written; what it raises ends the attempt.
        """
        return self._upstream.send(
            instance.id,
            method,
            target,
            self.own_headers(instance, headers),
            body,
            on_ready=on_ready,
        )

    def own_headers(self, instance: Instance, headers: Headers) -> Headers:
        """What an instance is sent: its own key in the client's place, our name and our trace."""
        key = self.engine_key(instance.id)
        if key is None:
            headers = (*headers, self._mark)
        else:
            bearer = (b"authorization", b"Bearer " + key.encode())
            headers = (*drop_header(headers, b"authorization"), bearer, self._mark)
        return self._tracing.pass_on(headers) if self._tracing.is_on else headers

    def blames_client(self, instance: Instance, error: BalancerError) -> bool:
        """Tell whether another engine would refuse the request, too."""
        if not isinstance(error, EngineRefusedError) or not 400 <= error.status < 500:
            return False
        if error.status in {401, 403}:
            return self.engine_key(instance.id) is None
        return error.status not in {408, 429}

    def recorded(
        self, instance: Instance, kind: str, record: RequestRecord, overlap_tokens: int | None
    ) -> "LegInHand":
        """One attempt: its record, and word of how it went to those who mind the instance."""
        leg = LegRecord(
            kind=kind,
            alias=instance.alias,
            overlap_tokens=overlap_tokens,
            started_s=self._clock(),
        )
        record.legs.append(leg)
        self.reliability.started(instance, leg, record)
        return LegInHand(
            self, instance, leg, self._tracing.leg(leg) if self._tracing.is_on else None
        )

    def ended(self, instance: Instance, leg: LegRecord, error: BaseException | None) -> None:
        """Write down and tell how an attempt went: well, if there is no error."""
        try:
            if error is None:
                self._report_health(instance.id, True, None)
            elif isinstance(error, BalancerError):
                leg.error = error.code or error.type
                self._report(instance, error)
            else:
                leg.error = "cancelled"
        finally:
            leg.ended_s = self._clock()
            self.reliability.ended(leg, error)

    def when_answered(self, leg: LegRecord, *, has_word: bool) -> Callable[[], None] | None:
        """Its answer begins: with a word, or else what is returned is to be told of the first."""
        if has_word:
            self.answered(leg)
            return None
        return partial(self.answered, leg)

    def answered(self, leg: LegRecord) -> None:
        """The first byte of its answer is here that isn't a comment's."""
        leg.first_byte_s = self._clock()
        self.reliability.answered(leg)

    def doubt(self, instance: Instance) -> None:
        """It may be another process than it was taken for: that is no matter of its health."""
        self._report_health(instance.id, False, HandOverFailedError.code)

    def _report(self, instance: Instance, error: BalancerError) -> None:
        """An engine that refuses is well; what isn't the engine's fault says nothing of it."""
        if isinstance(error, EngineRefusedError | HandOverFailedError):
            self._report_health(instance.id, True, None)
        elif isinstance(error, EngineError):
            self._report_health(instance.id, False, error.code)


class LegInHand:
    """One attempt under way: gives its record to the `with` block, and ends with it."""

    __slots__ = ("_instance", "_sender", "_span", "record")

    def __init__(
        self,
        sender: LegSender,
        instance: Instance,
        leg: LegRecord,
        span: AbstractContextManager[object] | None,
    ) -> None:
        self._sender = sender
        self._instance = instance
        self.record = leg
        self._span = span

    def __enter__(self) -> LegRecord:
        if self._span is not None:
            self._span.__enter__()
        return self.record

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._span is not None:
            self._span.__exit__(kind, error, traceback)
        self._sender.ended(self._instance, self.record, error)
