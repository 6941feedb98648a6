"""The proxied paths, from a client's request to its answer's last byte.

Rules:

1. What is wrong with a request is told before an engine hears of it, in OpenAI's error form.
2. While a request is worked on its client is watched: when it leaves, everything stops.
3. Every request leaves one record and one log line, at its very end, however it ends.
4. Once a status has gone out, an error can only break the answer off.
"""

import asyncio
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final

import msgspec
import structlog

from balancer.connectors.contract import Connector
from balancer.connectors.encoders import encoder_connectors
from balancer.core.errors import (
    BalancerError,
    ClientGoneError,
    EngineRefusedError,
    FleetError,
)
from balancer.core.fleet.snapshot import Fleet, Instance, Role
from balancer.core.handlers import Reply, reply_headers
from balancer.core.http.body import whole
from balancer.core.http.engine_paths import belongs_to_engines, find_path
from balancer.core.http.generate import read_generate
from balancer.core.http.headers import (
    clean_request_id,
    find_header,
    pass_answer_headers,
    pass_request_headers,
)
from balancer.core.http.openai_errors import render_error
from balancer.core.http.own_mark import refuse_balancers
from balancer.core.http.rewrite import splice_usage, wants_usage
from balancer.core.http.session_close import INTERNAL_ERROR, SERVICE_RESTART
from balancer.core.load.ledger import LoadLedger
from balancer.core.prompt.encoded_items import EncodedItems
from balancer.core.record import RequestRecord
from balancer.core.request import Endpoint, GenerateRequest
from balancer.core.routing.full_reports import FullReports
from balancer.core.routing.unread import UNREAD
from balancer.core.settings.dataplane import DataPlaneSettings
from balancer.core.settings.encode import EncodeSettings
from balancer.core.settings.reliability import ReliabilitySettings
from balancer.dataplane.admission import Admission
from balancer.dataplane.answers import AnswerPasser
from balancer.dataplane.client_socket import ClientSocket
from balancer.dataplane.encoding import EncodeMeans
from balancer.dataplane.exchange import Exchange
from balancer.dataplane.forwarded_request import Forwarded
from balancer.dataplane.forwarding import Forwarding
from balancer.dataplane.handling import Handling
from balancer.dataplane.jobs import Job
from balancer.dataplane.leg_sender import EngineKey, LegSender, ReportHealth
from balancer.dataplane.legs import Legs
from balancer.dataplane.one_leg import OnLegEnd
from balancer.dataplane.placing import Placing
from balancer.dataplane.realtime import Realtime
from balancer.dataplane.reliability import Reliability
from balancer.dataplane.request_log import LoggedRequests, LogRequest
from balancer.dataplane.scoring import Prompts, Scoring
from balancer.dataplane.upstream import Upstream
from balancer.dataplane.young_objects import YoungObjects
from balancer.fleet.transfer_notices import TransferNotices
from balancer.routing.router import Router
from balancer.tracing import NoTracing, Tracing

_PARTING_S: Final = 0.5
CANCELLED: Final = "cancelled"


class DataPlane:
    """One per process."""

    def __init__(  # noqa: PLR0913 - everything is built in one place and handed down
        self,
        *,
        fleet: Callable[[], Fleet],
        reader: Prompts,
        router: Router,
        upstream: Upstream,
        connectors: Mapping[str, Connector],
        settings: DataPlaneSettings,
        on_record: Callable[[RequestRecord], None],
        report_health: ReportHealth,
        clock: Callable[[], float],
        new_id: Callable[[], str],
        ledger: LoadLedger,
        engine_key: EngineKey = lambda _: None,
        tracing: Tracing | None = None,
        handling: Handling | None = None,
        on_leg_end: OnLegEnd = lambda _forecast, _leg: None,
        full_reports: FullReports | None = None,
        encoded: EncodedItems | None = None,
        reliability: Reliability | None = None,
        admission: Admission | None = None,
        notices: TransferNotices | None = None,
        log_request: LogRequest | None = None,
        balancer_id: str = "",
    ) -> None:
        """`engine_key` gives an instance's API key; without one the client's own is passed on.

        `balancer_id` marks legs: a request that has such a mark already is refused.
        `log_request` writes a finished request's log line; without one it goes the way of the others.
        """
        self.running = 0
        """Requests and sessions under way."""
        self.cut = 0
        """Those that ended because the server had to."""
        self._fleet = fleet
        self._reader = reader
        self._router = router
        self._settings = settings
        self._on_record = on_record
        self._clock = clock
        self._new_id = new_id
        self._balancer_id = balancer_id
        self._tracing = tracing or NoTracing()
        self._log = structlog.stdlib.get_logger(__name__)
        self._log_request = log_request or LoggedRequests()
        sender = LegSender(
            upstream=upstream,
            engine_key=engine_key,
            report_health=report_health,
            clock=clock,
            tracing=self._tracing,
            balancer_id=balancer_id,
            reliability=reliability or Reliability(ReliabilitySettings(), fleet=fleet, clock=clock),
        )
        self._legs = Legs(
            fleet=fleet,
            router=router,
            sender=sender,
            connectors=connectors,
            settings=settings,
            clock=clock,
            new_id=new_id,
            on_leg_end=on_leg_end,
            full_reports=full_reports or FullReports(0),
            encode=EncodeMeans(
                sender=sender,
                ledger=ledger,
                items=EncodedItems(EncodeSettings()) if encoded is None else encoded,
                connectors=encoder_connectors(),
                clock=clock,
                new_id=new_id,
            ),
            admission=admission,
            notices=notices,
        )
        self._handling = handling or Handling()
        self._young = YoungObjects(clock=clock)
        placing = Placing(
            ledger=ledger,
            clock=clock,
            vetting=sender.reliability,
            is_bound=partial(_takes_legs_only, connectors),
        )
        self._forwarding = Forwarding(
            sender=sender,
            settings=settings,
            clock=clock,
            placing=placing,
            scoring=Scoring(reader, router),
            handling=self._handling,
        )
        self._realtime = Realtime(sender=sender, settings=settings, clock=clock, placing=placing)

    proxies = staticmethod(belongs_to_engines)
    """Tell whether `handle` answers a path."""

    async def handle(self, exchange: Exchange) -> None:
        """Answer one request. Raises nothing but cancellation."""
        record = self._begin(exchange)
        passer = AnswerPasser(
            exchange=exchange,
            record=record,
            settings=self._settings,
            clock=self._clock,
            on_stream=self._young.stream_began,
        )
        try:
            if self._tracing.is_on:
                with self._tracing.request(record, exchange.headers):
                    await self._answer(exchange, record, passer)
            else:
                await self._answer(exchange, record, passer)
        except BalancerError as error:
            await self._tell(error, record, passer)
        except asyncio.CancelledError:
            record.error = CANCELLED
            await self._part(record, passer)
            raise
        except Exception as error:  # noqa: BLE001 - the outermost: a bug costs one request
            self._note_bug(error, record)
            await self._tell(BalancerError("internal error"), record, passer)
        finally:
            self._conclude(record)

    async def relay(self, socket: ClientSocket) -> None:
        """Carry one WebSocket session to its end. Raises nothing but cancellation."""
        record = self._begin(socket)
        try:
            with self._tracing.request(record, socket.headers):
                refuse_balancers(socket.headers, self._balancer_id)
                await self._realtime.carry(self._fleet(), socket, record)
        except BalancerError as error:
            await _end_session(error, record, socket)
        except asyncio.CancelledError:
            record.error = CANCELLED
            await _end_session(FleetError("this balancer is shutting down"), record, socket)
            raise
        except Exception as error:  # noqa: BLE001 - as above
            self._note_bug(error, record)
            await _end_session(BalancerError("internal error"), record, socket)
        finally:
            self._conclude(record)

    def _begin(self, asked: Exchange | ClientSocket) -> RequestRecord:
        self.running += 1
        named = find_header(asked.headers, b"x-request-id")
        asked_id = None if named is None else clean_request_id(named)
        return RequestRecord(
            request_id=asked_id or self._new_id(), path=asked.path, arrived_s=self._clock()
        )

    def _note_bug(self, error: Exception, record: RequestRecord) -> None:
        record.error = type(error).__name__
        self._log.error("request_failed", **_bug_facts(error, record))

    def _conclude(self, record: RequestRecord) -> None:
        self.running -= 1
        self.cut += record.error == CANCELLED
        record.ended_s = self._clock()
        self._on_record(record)
        self._log_request(record)

    async def _answer(
        self, exchange: Exchange, record: RequestRecord, passer: AnswerPasser
    ) -> None:
        refuse_balancers(exchange.headers, self._balancer_id)
        use = find_path(exchange.method, exchange.path)
        body = await exchange.read_body(self._settings.max_body_bytes)
        query = "?" + exchange.query.decode("latin-1") if exchange.query else ""
        if use.endpoint is None:
            headers = pass_request_headers(exchange.headers)
            request_id = (b"x-request-id", record.request_id.encode())
            forwarded = Forwarded(
                use=use,
                method=exchange.method,
                path=exchange.path,
                query=query,
                headers=(*headers, request_id),
                body=body,
            )
            work = self._forwarding.carry(self._fleet(), forwarded, record, passer)
        else:
            request = self._read(exchange, use.endpoint, whole(body), record)
            work = self._generate(request, query, record, passer)
        await exchange.while_present(work)

    def _read(
        self, exchange: Exchange, endpoint: Endpoint, raw: bytes, record: RequestRecord
    ) -> GenerateRequest:
        """Understand a chat or completions request. Raises RequestError or NoInstanceError."""
        request = read_generate(
            endpoint,
            raw,
            self._fleet(),
            request_id=record.request_id,
            # An encoded stream couldn't be read for its usage; engines don't encode anyway.
            headers=pass_request_headers(exchange.headers, readable=True),
            # Handlers are told of bodies as they are decoded.
            texts=None if self._handling.is_on else self._reader.texts,
        )
        is_named = "request_id" in request.body
        if is_named and find_header(exchange.headers, b"x-request-id") is None:
            named = clean_request_id(request.body.get("request_id"))
            if named is not None:
                request = msgspec.structs.replace(request, request_id=named)
                record.request_id = named
        _note_request(record, request)
        return request

    async def _generate(
        self, request: GenerateRequest, query: str, record: RequestRecord, passer: AnswerPasser
    ) -> None:
        fleet = self._fleet()
        if self._handling.is_on:
            judged = await self._handling.judge(request, fleet)
            if isinstance(judged, Reply):
                await passer.pass_own(judged.status, reply_headers(judged), judged.body)
                return
            request = judged
            _note_request(record, request)
        if self._router.reads_prompt(fleet, request.model):
            prompt = await self._reader.read(fleet, request)
        else:
            prompt = UNREAD
        record.prompt_tokens = prompt.prompt_tokens
        record.prompt_source = prompt.source
        record.unscorable = prompt.unscorable
        asks = self._settings.usage_inject and record.stream and not wants_usage(request.body)
        job = Job(
            fleet=fleet,
            request=request,
            prompt=prompt,
            record=record,
            body=splice_usage(request.body, request.raw_body) if asks else request.raw_body,
            asks_usage=asks,
            query=query,
        )

        deliver = partial(passer.pass_generated, withhold_usage=asks)
        await self._legs.carry(job, deliver)

    async def _part(self, record: RequestRecord, passer: AnswerPasser) -> None:
        """The server has to end. A client that doesn't read can't delay that."""
        error = FleetError("this balancer is shutting down")
        with suppress(TimeoutError, ClientGoneError):
            async with asyncio.timeout(_PARTING_S):
                if record.status is None:
                    await self._tell(error, record, passer)
                else:
                    await passer.break_off(error)

    async def _tell(
        self, error: BalancerError, record: RequestRecord, passer: AnswerPasser
    ) -> None:
        """Answer with `error`, unless an answer is under way or nobody is there to read it."""
        record.error = record.error or error.code or error.type
        if record.status is not None:
            return
        if isinstance(error, ClientGoneError):
            record.status = error.status
            return
        try:
            if isinstance(error, EngineRefusedError):
                await passer.pass_refusal(error)
            else:
                told = render_error(error, path=record.path)
                await passer.pass_own(told.status, told.headers, told.body)
        except ClientGoneError:
            return  # it left before it could read the error


def _note_request(record: RequestRecord, request: GenerateRequest) -> None:
    record.model, record.base_model = request.model, request.base_model
    record.stream = request.stream


async def _end_session(error: BalancerError, record: RequestRecord, socket: ClientSocket) -> None:
    """Tell the client of `error`: by an answer, or by how its session is closed."""
    record.error = record.error or error.code or error.type
    with suppress(ClientGoneError):
        if socket.is_accepted:
            cancelled = isinstance(error, FleetError)
            await socket.close(SERVICE_RESTART if cancelled else INTERNAL_ERROR, "")
            return
        record.status = error.status
        if isinstance(error, EngineRefusedError):
            await socket.refuse(error.status, pass_answer_headers(error.headers), error.body)
        elif not isinstance(error, ClientGoneError):
            told = render_error(error, path=record.path)
            await socket.refuse(told.status, told.headers, told.body)


def _takes_legs_only(connectors: Mapping[str, Connector], instance: Instance) -> bool:
    connector = connectors.get(instance.connector)
    is_decode = instance.role is Role.DECODE
    return is_decode and connector is not None and connector.needs_prefill(instance)


def _bug_facts(error: Exception, record: RequestRecord) -> dict[str, Any]:
    """Where it happened. Messages and locals may hold a prompt, so they stay out."""
    frames = traceback.extract_tb(error.__traceback__)
    return {
        "request_id": record.request_id,
        "error": record.error,
        "frames": [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames[-12:]],
    }
