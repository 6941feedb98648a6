"""Encode legs: the images, audio and video of a chat are encoded before its prompt is computed.

Rules:

1. A request without media, or a fleet without encode instances of its model, costs one look.
2. Every different item is a leg of its own, several at once. The client sees nothing of them.
3. A leg that fails is tried on another encode instance, up to `encode.attempts`. A refusal that blames
   the item isn't tried elsewhere. Then the engine that computes the prompt does it, where connector
   and operator allow it: it has the media anyway. Else 503, or the refusal itself.
4. Where the consumer pulls, items are encoded before the route is chosen. Where they are pushed to one
   rank they can only be encoded after, and anew for each other consumer.
5. What was counted on from an earlier request and led to a 500 is encoded anew, once.
6. The client leaves, or one item can't be had: all other legs are cancelled.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from balancer.connectors.contract import NoTransferError
from balancer.connectors.encoders import (
    PARAMS,
    EncodeContext,
    EncoderConnector,
    Encoding,
)
from balancer.core.errors import (
    BalancerError,
    EncodeFailedError,
    EngineError,
    EngineRefusedError,
    EngineTimeoutError,
)
from balancer.core.fleet.snapshot import Instance, Role
from balancer.core.http.rewrite import encode_body, splice_field, with_usage
from balancer.core.http.usage import prefill_fault
from balancer.core.load.ledger import LegWork, LoadLedger
from balancer.core.prompt.encoded_items import EncodedItems, EncoderChoice
from balancer.core.prompt.media_items import MediaItem, media_items
from balancer.core.record import EncodeRecord, LegRecord
from balancer.core.routing.plan import Candidate, RoutePlan
from balancer.dataplane.beginnings import check_status
from balancer.dataplane.jobs import Job
from balancer.dataplane.leg_sender import LegSender
from indexer.core.types import RankId

MAX_ANSWER_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeMeans:
    """What all encode legs of a process share."""

    sender: LegSender
    ledger: LoadLedger
    items: EncodedItems
    connectors: Mapping[str, EncoderConnector]
    clock: Callable[[], float]
    new_id: Callable[[], str]

    def media_of(self, job: Job) -> "RequestMedia | None":
        """What `job` has to have encoded; None: nothing, or there is nobody to do it."""
        if not job.fleet.encoders:
            return None
        encoders = [
            each
            for each in job.fleet.encoders
            if each.models is None or each.models.serves(job.request.model)
        ]
        items = media_items(job.request) if encoders else ()
        return RequestMedia(self, job, items, encoders) if items else None

    def legs_on(self, instance: Instance) -> int:
        """Legs in flight there."""
        return sum(self.ledger.load(rank).requests for rank in instance.rank_ids())


class RequestMedia:
    """The items of one request, and what is known of their encodings."""

    def __init__(
        self, means: EncodeMeans, job: Job, items: Sequence[MediaItem], encoders: Sequence[Instance]
    ) -> None:
        self._means = means
        self._job = job
        self._order = [item.key for item in items]
        self._items = {item.key: item for item in items}
        self._encoders = [each for each in encoders if each.is_available]
        self._connectors = [means.connectors[each.connector] for each in encoders]
        self._encodings: dict[bytes, Encoding] = {}
        self._reused: set[bytes] = set()
        self._local: set[bytes] = set()
        self._names: dict[bytes, str] = {}
        self._has_redone = False
        self._problem = _problem(self._encoders, None)

    async def ready(self, plan: RoutePlan | None) -> Job:
        """The job as its prompt legs carry it; `plan` None: nobody is chosen yet.

        Raises EncodeFailedError or what an encode engine refused.
        """
        pushes = not all(each.reuses for each in self._connectors)
        if pushes and plan is None:
            return self._job
        if pushes:
            self._forget_all()
            self._problem = _problem(self._encoders, plan)
            if self._problem == "no_address":
                self._leave_all()
                return self._job
        missing = self._missing()
        if missing:
            await self._encode_all(missing, plan)
            self._note()
        return self._with_params()

    def redoes(self, error: BalancerError) -> bool:
        """Whether `error` may come of an encoding that isn't there any more: then, once, all anew."""
        is_500 = isinstance(error, EngineRefusedError) and error.status == 500
        if self._has_redone or not is_500 or not self._encodings:
            return False
        self._has_redone = True
        self._means.items.drop(self._items)
        self._forget_all()
        return True

    def _forget_all(self) -> None:
        for known in (self._encodings, self._reused, self._local, self._names):
            known.clear()

    def _missing(self) -> list[MediaItem]:
        """Those that need a leg; what earlier requests left is taken up."""
        means, now_s = self._means, self._means.clock()
        for key in self._items.keys() - self._encodings.keys() - self._local:
            seen = means.items.usable(key, self._encoders, now_s)
            if seen is not None:
                self._encodings[key] = seen.encoding
                self._names[key] = next(
                    each.alias for each in self._encoders if each.id == seen.instance
                )
                self._reused.add(key)
        return [
            item
            for key, item in self._items.items()
            if key not in self._encodings and key not in self._local
        ]

    async def _encode_all(self, items: Sequence[MediaItem], plan: RoutePlan | None) -> None:
        seats = asyncio.Semaphore(self._means.items.settings.parallel)
        consumer = None if plan is None else (plan.prefill or plan.decode).candidate

        async def encode(item: MediaItem) -> None:
            async with seats:
                await self._encode(item, consumer)

        try:
            async with asyncio.TaskGroup() as group:
                for item in items:
                    group.create_task(encode(item))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            self._note()

    async def _encode(self, item: MediaItem, consumer: Candidate | None) -> None:
        """One item, on one instance after the other."""
        means = self._means
        reliability = means.sender.reliability
        left = list(reliability.usable(self._encoders))
        failed: EngineError | None = None
        blames_item = False
        for _ in range(means.items.settings.attempts):
            if not left or (failed is not None and not reliability.may_retry(self._job.record)):
                break
            choice = means.items.choose(item.key, left, means.legs_on)
            left.remove(choice.instance)
            reliability.claim(choice.instance)
            try:
                encoding = await self._leg(item, choice, consumer)
            except EngineError as error:
                failed = error
                blames_item = self._blames_item(choice.instance, error)
                if blames_item:
                    break
            else:
                reuses = means.connectors[encoding.connector].reuses
                means.items.put(
                    item.key, choice.instance.id, encoding if reuses else None, means.clock()
                )
                self._encodings[item.key] = encoding
                self._names[item.key] = choice.instance.alias
                return
        self._leave(item, failed, blames_item=blames_item)

    def _leave_all(self) -> None:
        """To an engine that nobody pushes to, so it doesn't wait."""
        if self._means.items.settings.on_failure != "local":
            raise EncodeFailedError("the instance that computes the prompt has no `ec_zmq_addrs`")
        self._local.update(self._items)
        self._note()

    def _leave(self, item: MediaItem, failed: EngineError | None, *, blames_item: bool) -> None:
        """To the engine that computes the prompt, if it may and can. Raises what is the answer else."""
        allows = all(each.allows_local for each in self._connectors)
        if allows and self._means.items.settings.on_failure == "local":
            self._local.add(item.key)
            return
        if failed is None:
            raise EncodeFailedError("no encode instance of this model is available")
        if blames_item:
            raise failed
        raise EncodeFailedError(f"an image, audio or video could not be encoded: {failed.message}")

    def _blames_item(self, instance: Instance, error: EngineError) -> bool:
        """A refusal that another encode engine would repeat. One of the model's name is no such."""
        is_unknown = isinstance(error, EngineRefusedError) and error.status == 404
        return not is_unknown and self._means.sender.blames_client(instance, error)

    async def _leg(
        self, item: MediaItem, choice: EncoderChoice, consumer: Candidate | None
    ) -> Encoding:
        means, job, instance = self._means, self._job, choice.instance
        connector = means.connectors[instance.connector]
        context = EncodeContext(
            body=job.request.body,
            part=item.part,
            consumer=None if consumer is None else consumer.instance,
            consumer_rank=0 if consumer is None else consumer.rank.rank,
            transfer_id=means.new_id(),
        )
        try:
            body = encode_body(connector.encode_body(context))
        except NoTransferError as error:
            raise EncodeFailedError(error.message) from error
        number = self._order.index(item.key)
        request_id = f"{job.request.request_id}:{number}:{context.transfer_id[:6]}"
        rank = next(instance.rank_ids())
        with (
            means.ledger.hold(_work(rank)),
            means.sender.recorded(instance, "encode", job.record, None) as leg,
        ):
            leg.rank, leg.reason = rank.rank, choice.reason
            try:
                async with asyncio.timeout(means.items.settings.timeout_s):
                    raw = await self._ask(instance, body, request_id, leg)
            except TimeoutError as error:
                raise EngineTimeoutError("the encode leg took too long") from error
            means.sender.answered(leg)
            return connector.read(context, _read(raw))

    async def _ask(self, instance: Instance, body: bytes, request_id: str, leg: LegRecord) -> bytes:
        """Send an encode leg, and read its good answer whole."""
        request = self._job.request
        headers = (*request.headers, (b"x-request-id", request_id.encode()))
        target = request.endpoint.value + self._job.query
        answer = await self._means.sender.send(instance, "POST", target, headers, body)
        try:
            await check_status(answer, leg)
            return await answer.read(MAX_ANSWER_BYTES)
        finally:
            answer.close()

    def _note(self) -> None:
        """Write down how far it has come."""
        encoded = self._encodings.keys() - self._reused
        self._job.record.encode = EncodeRecord(
            items=len(self._order),
            encoded=len(encoded),
            reused=len(self._reused),
            local=len(self._items) - len(self._encodings),
            instances=sorted({self._names[key] for key in self._encodings}),
            problem=self._problem,
        )

    def _with_params(self) -> Job:
        """The job with what the connectors hand over, if they hand over anything."""
        job = self._job
        self._note()
        known = [self._encodings[key] for key in self._order if key in self._encodings]
        params: dict[str, Any] = {}
        for name in dict.fromkeys(each.connector for each in known):
            handles = [each.handle for each in known if each.connector == name]
            params |= self._means.connectors[name].consumer_params(handles)
        if not params:
            return job
        body = {**job.request.body, PARAMS: params}
        raw = splice_field(job.body, PARAMS, params)
        if raw is None:
            raw = encode_body(with_usage(body) if job.asks_usage else body)
        request = msgspec.structs.replace(job.request, body=body)
        return msgspec.structs.replace(job, request=request, body=raw)


def _problem(encoders: Sequence[Instance], plan: RoutePlan | None) -> str:
    """What is wrong if items are left to the consumer. Decode instances needn't be consumers."""
    consumer = None if plan is None else (plan.prefill or plan.decode).candidate.instance
    if consumer is not None and consumer.role is Role.DECODE and not consumer.ec_zmq_addrs:
        return "no_address"
    return "encode_failed" if encoders else "no_encode_instance"


def _work(rank: RankId) -> LegWork:
    """No prompt: it counts as a leg in flight, and nothing is learned from it."""
    return LegWork(
        rank=rank, kind="encode", prompt_tokens=0, uncached_tokens=0, work_s=0.0, streamed=False
    )


def _read(raw: bytes) -> Mapping[str, Any]:
    """An encode leg's 200. Raises NoTransferError."""
    try:
        answer = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise NoTransferError("the answer to an encode leg is not JSON") from error
    if prefill_fault(answer) is not None:
        raise NoTransferError("the answer to an encode leg tells of an error")
    told: Mapping[str, Any] = answer
    return told
