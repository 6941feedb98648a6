"""Relays a WebSocket session (`/v1/realtime`) between a client and one instance.

Rules:

1. The model is the `model` of the query, or the fleet's only one: the instance is chosen before the
   client can say anything else.
2. The engine accepts first. Its refusal is the client's answer, as it is.
3. Messages pass both ways as they are. A slow engine holds its client back once a mebibyte waits; a
   slow client holds its engine back.
4. Whoever closes, the other is told the code and the reason, after the messages before it. A client
   that is gone ends the engine's side at once.
5. A session counts as one request on its rank as long as it lasts, and is never taken up again
   elsewhere. Sessions are limited in number; each has pings on both sides, and no time limit.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from typing import Final
from urllib.parse import parse_qs

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI

from balancer.core.errors import (
    ClientGoneError,
    ConnectTimeoutError,
    EngineError,
    EngineProtocolError,
    EngineRefusedError,
    EngineUnreachableError,
    OverloadedError,
    PathNotFoundError,
    StreamCutError,
)
from balancer.core.fleet.lacking import says_lacking
from balancer.core.fleet.snapshot import Fleet
from balancer.core.http.engine_paths import is_session
from balancer.core.http.headers import Headers, pass_request_headers
from balancer.core.http.session_close import BAD_GATEWAY, GOING_AWAY, is_failure, passed_code
from balancer.core.record import LegRecord, RequestRecord
from balancer.core.settings.dataplane import DataPlaneSettings
from balancer.dataplane.client_socket import (
    LOST,
    NO_CODE,
    ClientSocket,
    SocketClosedError,
)
from balancer.dataplane.elsewhere import try_places
from balancer.dataplane.leg_sender import LegSender
from balancer.dataplane.placing import Place, Placing
from balancer.dataplane.server_protocols import MAX_MESSAGE_BYTES

SESSION_STATUS: Final = 101
_MAX_WAITING_BYTES: Final = 1024 * 1024
_FLUSH_S: Final = 0.5
_CLOSE_S: Final = 0.5
_OF_THE_HANDSHAKE: Final = b"sec-websocket-"


class _EngineClosedError(SocketClosedError):
    """It was the engine who closed."""


class Realtime:
    """One per process: it counts its sessions."""

    def __init__(
        self,
        *,
        placing: Placing,
        sender: LegSender,
        settings: DataPlaneSettings,
        clock: Callable[[], float],
    ) -> None:
        self._placing = placing
        self._sender = sender
        self._settings = settings
        self._clock = clock
        self._sessions = 0

    async def carry(self, fleet: Fleet, socket: ClientSocket, record: RequestRecord) -> None:
        """Open a session and relay it to its end. Raises BalancerError."""
        if not is_session(socket.path):
            raise PathNotFoundError("no engine serves a WebSocket here")
        if self._sessions >= self._settings.max_sessions:
            raise OverloadedError("this balancer has as many sessions as it takes")
        self._sessions += 1
        try:
            await self._open(fleet, socket, record)
        finally:
            self._sessions -= 1

    async def _open(self, fleet: Fleet, socket: ClientSocket, record: RequestRecord) -> None:
        model = parse_qs(socket.query.decode("latin-1")).get("model", [""])[-1]
        places = self._placing.places(fleet, model=model, path=socket.path, record=record)
        reliability = self._sender.reliability
        reliability.requested()
        await try_places(
            places,
            lambda place: self._carry_to(place, socket, record),
            record=record,
            reliability=reliability,
            retries=self._settings.retries,
            is_lacking=_is_lacking,
        )

    async def _carry_to(self, place: Place, socket: ClientSocket, record: RequestRecord) -> None:
        with (
            self._placing.hold(place) as guard,
            self._sender.recorded(place.instance, "forward", record, None) as leg,
        ):
            engine = await _unless_gone(socket, self._dial(place, socket, record))
            try:
                leg.status = SESSION_STATUS
                await socket.accept(engine.subprotocol, self._answer_headers(place, record))
                record.status = SESSION_STATUS
                self._sender.answered(leg)
                record.first_byte_s = leg.first_byte_s
                guard.first_token()
                await _relay(socket, engine, leg, record)
            finally:
                await engine.close(GOING_AWAY)  # nothing happens if it is closed already

    def _answer_headers(self, place: Place, record: RequestRecord) -> Headers:
        if self._settings.headers == "off":
            return ()
        named: Headers = ((b"x-request-id", record.request_id.encode()),)
        if self._settings.headers == "id":
            return named
        return (*named, (b"x-kvlb-instance", place.instance.alias.encode()))

    async def _dial(
        self, place: Place, socket: ClientSocket, record: RequestRecord
    ) -> ClientConnection:
        """Open the engine's side. Raises EngineError."""
        passed = pass_request_headers(socket.headers)
        headers = self._sender.own_headers(place.instance, passed)
        lines = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in (*headers, (b"x-request-id", record.request_id.encode()))
            if not name.startswith(_OF_THE_HANDSHAKE)
        ]
        query = "?" + socket.query.decode("latin-1") if socket.query else ""
        try:
            return await connect(
                "ws" + place.instance.id.removeprefix("http") + socket.path + query,
                additional_headers=lines,
                user_agent_header=None,
                subprotocols=list(socket.subprotocols) or None,  # type: ignore[arg-type]
                compression=None,
                proxy=None,
                open_timeout=self._settings.connect_timeout_s,
                close_timeout=_CLOSE_S,
                max_size=MAX_MESSAGE_BYTES,
            )
        except InvalidStatus as error:
            refused = _read_refusal(error, place)
            if _is_lacking(refused):
                self._placing.lacking.note(place.instance.id, socket.path, self._clock())
            raise refused from error
        except TimeoutError as error:
            raise ConnectTimeoutError("the engine did not accept a session in time") from error
        except OSError as error:
            raise EngineUnreachableError("no connection to the engine") from error
        except (InvalidHandshake, InvalidURI, EOFError) as error:
            raise EngineProtocolError("the engine opened no session") from error


async def _unless_gone(
    socket: ClientSocket, dialling: Awaitable[ClientConnection]
) -> ClientConnection:
    """Wait for the engine as long as the client does. Raises ClientGoneError, EngineError."""

    async def watch() -> None:
        await socket.gone()
        raise ClientGoneError("the client went away")

    async with AsyncExitStack() as unless_used:
        try:
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(watch())
                engine = await dialling
                unless_used.push_async_callback(engine.close, GOING_AWAY)
                watching.cancel()
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        unless_used.pop_all()
        return engine


async def _relay(
    socket: ClientSocket, engine: ClientConnection, leg: LegRecord, record: RequestRecord
) -> None:
    """Pass messages until one side has closed, then close the other."""
    waiting = _Waiting(engine.send)
    ended: Exception | None = None
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(_pass_to_engine(socket, waiting))
            group.create_task(_pass_to_client(engine, socket))
            group.create_task(waiting.run())
    except ExceptionGroup as errors:
        ended = errors.exceptions[0]
    if isinstance(ended, _EngineClosedError):
        code = passed_code(ended.code, lost=BAD_GATEWAY)
        with suppress(ClientGoneError):
            await socket.close(code, ended.reason)
        if ended.code == LOST:
            raise StreamCutError("the engine left in the middle of a session")
        if is_failure(ended.code):
            leg.error = record.error = "session_failed"
    elif isinstance(ended, SocketClosedError):
        code = passed_code(ended.code, lost=GOING_AWAY)
        await engine.close(code, ended.reason)
        if ended.code == LOST:
            raise ClientGoneError("the client went away")
    elif ended is not None:
        raise ended


async def _pass_to_engine(socket: ClientSocket, waiting: "_Waiting") -> None:
    try:
        while True:
            await waiting.put(await socket.receive())
    except SocketClosedError:
        with suppress(TimeoutError):
            async with asyncio.timeout(_FLUSH_S):
                await waiting.emptied()
        raise


async def _pass_to_client(engine: ClientConnection, socket: ClientSocket) -> None:
    try:
        while True:
            await socket.send(await engine.recv())
    except ConnectionClosed as closed:
        received = closed.rcvd
        if received is None:
            raise _EngineClosedError(LOST, "") from closed
        raise _EngineClosedError(received.code or NO_CODE, received.reason) from closed


def _read_refusal(error: InvalidStatus, place: Place) -> EngineRefusedError:
    """The engine's answer to a handshake, as it can be passed on."""
    answer = error.response
    headers = tuple(
        (name.lower().encode("latin-1"), value.encode("latin-1"))
        for name, value in answer.headers.raw_items()
    )
    body = bytes(answer.body or b"")
    return EngineRefusedError(answer.status_code, headers, body, alias=place.instance.alias)


def _is_lacking(error: EngineError) -> bool:
    """Tell whether the engine has no such session: frameworks answer 403 without a word."""
    if not isinstance(error, EngineRefusedError):
        return False
    return says_lacking(error.status, error.body) or (error.status == 403 and not error.body)


class _Waiting:
    """A client's messages on their way to the engine.

    They are taken from the client although the engine is slow, up to a limit, because only who
    reads from a connection sees it end.
    """

    def __init__(self, send: Callable[[str | bytes], Awaitable[None]]) -> None:
        self._send = send
        self._messages: deque[str | bytes] = deque()
        self._waiting_bytes = 0
        self._changed = asyncio.Condition()

    async def put(self, message: str | bytes) -> None:
        """Add a message; wait while too much is waiting."""
        async with self._changed:
            self._messages.append(message)
            self._waiting_bytes += len(message)
            self._changed.notify_all()
            await self._changed.wait_for(lambda: self._waiting_bytes <= _MAX_WAITING_BYTES)

    async def emptied(self) -> None:
        """Wait until everything is sent."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._messages)

    async def run(self) -> None:
        """Send what comes, until the engine has closed: its reader says how."""
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._messages)
            try:
                await self._send(self._messages[0])
            except ConnectionClosed:
                return
            async with self._changed:
                self._waiting_bytes -= len(self._messages.popleft())
                self._changed.notify_all()
