"""Hands a request whole to one capable instance: every engine path that isn't split or scored.

Rules:

1. The body passes untouched, whatever it is. Its model is read where it is named (JSON, or a
   field of a form); an instance that serves it is chosen, the least busy one first.
2. One retry elsewhere, as for generated answers: only while nothing has been answered.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from balancer.core.dataplane_settings import DataPlaneSettings
from balancer.core.errors import (
    EngineError,
    EngineRefusedError,
    NoInstanceError,
)
from balancer.core.fleet import Fleet, Instance
from balancer.core.forwarded import named_model
from balancer.core.http_headers import Headers, find_header
from balancer.core.model_lookup import find_model
from balancer.core.record import LegRecord, RequestRecord
from balancer.dataplane.answers import AnswerPasser
from balancer.dataplane.beginnings import MAX_ERROR_BYTES
from balancer.dataplane.connection import UpstreamAnswer
from balancer.dataplane.leg_sender import LegSender
from indexer.core.types import InstanceId


@dataclass(frozen=True, slots=True, kw_only=True)
class Forwarded:
    """A request to hand over."""

    method: str
    target: str
    headers: Headers
    body: bytes


class Forwarding:
    """One per process: it counts what it has handed to whom."""

    def __init__(
        self, *, sender: LegSender, settings: DataPlaneSettings, clock: Callable[[], float]
    ) -> None:
        self._sender = sender
        self._retries = settings.retries
        self._clock = clock
        self._in_flight: Counter[InstanceId] = Counter()
        self._turn = 0

    async def carry(
        self, fleet: Fleet, request: Forwarded, record: RequestRecord, passer: AnswerPasser
    ) -> None:
        """Get it answered. Raises BalancerError."""
        candidates = self._candidates(fleet, request, record)
        retries_left = self._retries
        while True:
            instance = candidates.pop(0)
            try:
                await self._carry_to(instance, request, record, passer)
            except EngineError as error:
                safe = error.retryable and record.status is None
                if not safe or not retries_left or not candidates:
                    raise
                retries_left -= 1
            else:
                return

    def _candidates(
        self, fleet: Fleet, request: Forwarded, record: RequestRecord
    ) -> list[Instance]:
        """Instances that may answer, least busy first, equals in turn."""
        name = named_model(find_header(request.headers, b"content-type") or b"", request.body)
        instances = list(fleet.instances)
        if name is not None:
            meant = find_model(fleet, name)
            record.model, record.base_model = meant.model, meant.base_model
            instances = list(fleet.serving(meant.model))
        able = [each for each in instances if each.is_available and each.role.answers_clients]
        if not able:
            raise NoInstanceError("no instance that could answer this is available")
        self._turn += 1
        turn = self._turn % len(able)
        return sorted(able[turn:] + able[:turn], key=lambda each: self._in_flight[each.id])

    async def _carry_to(
        self, instance: Instance, request: Forwarded, record: RequestRecord, passer: AnswerPasser
    ) -> None:
        with (
            self._counted(instance),
            self._sender.recorded(instance, "forward", record, None) as leg,
        ):
            answer = await self._sender.send(
                instance, request.method, request.target, request.headers, request.body
            )
            try:
                leg.status = answer.status
                await _refuse_busy(answer, leg)
                first = await answer.next_chunk()
                leg.first_byte_s = self._clock()
                await passer.pass_forwarded(answer, first, leg)
            finally:
                answer.close()

    @contextmanager
    def _counted(self, instance: Instance) -> Iterator[None]:
        self._in_flight[instance.id] += 1
        try:
            yield
        finally:
            self._in_flight[instance.id] -= 1
            if not self._in_flight[instance.id]:
                del self._in_flight[instance.id]


async def _refuse_busy(answer: UpstreamAnswer, leg: LegRecord) -> None:
    if answer.status == 503:
        body = await answer.read(MAX_ERROR_BYTES)
        raise EngineRefusedError(503, answer.headers, body, alias=leg.alias)
