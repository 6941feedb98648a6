"""A client's WebSocket as a session needs it, over ASGI.

Nothing is accepted before an engine has: until then a refusal is an HTTP answer, with status and
body.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from balancer.core.errors import ClientGoneError
from balancer.core.http.headers import Headers
from balancer.dataplane.exchange import Message

NO_CODE: Final = 1005
LOST: Final = 1006


class SocketClosedError(Exception):
    """The other side has closed the session, or its connection is gone."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code)
        self.code = code
        self.reason = reason


class ClientSocket:
    """One session's client."""

    def __init__(
        self,
        scope: Mapping[str, Any],
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        self.path: str = scope["path"]
        self.query: bytes = scope["query_string"]
        self.headers: Headers = tuple(scope["headers"])
        self.subprotocols: tuple[str, ...] = tuple(scope["subprotocols"])
        self.is_accepted = False
        self._can_answer = "websocket.http.response" in (scope.get("extensions") or {})
        self._receive = receive
        self._send = send

    async def gone(self) -> None:
        """Return when the client has left before it was accepted."""
        while (await self._receive())["type"] != "websocket.disconnect":
            pass

    async def accept(self, subprotocol: str | None, headers: Headers) -> None:
        """Open the session. Raises ClientGoneError."""
        self.is_accepted = True
        await self._pass(
            {"type": "websocket.accept", "subprotocol": subprotocol, "headers": list(headers)}
        )

    async def refuse(self, status: int, headers: Headers, body: bytes) -> None:
        """Answer with an error in place of a session. Raises ClientGoneError."""
        if not self._can_answer:
            await self._pass({"type": "websocket.close"})  # servers make it a 403
            return
        start = {"status": status, "headers": list(headers)}
        await self._pass({"type": "websocket.http.response.start", **start})
        await self._pass({"type": "websocket.http.response.body", "body": body})

    async def receive(self) -> str | bytes:
        """Wait for a message. Raises SocketClosedError."""
        message = await self._receive()
        if message["type"] != "websocket.receive":
            # uvicorn says 1005 of a lost connection, too, but gives a reason only with a close.
            said = "reason" in message
            raise SocketClosedError(message["code"] if said else LOST, message.get("reason") or "")
        text: str | None = message.get("text")
        data: bytes = message.get("bytes") or b""
        return data if text is None else text

    async def send(self, message: str | bytes) -> None:
        """Send a message; waits while the client is slow. Raises ClientGoneError."""
        kind = "text" if isinstance(message, str) else "bytes"
        await self._pass({"type": "websocket.send", kind: message})

    async def close(self, code: int, reason: str) -> None:
        """End the session. Raises ClientGoneError."""
        await self._pass({"type": "websocket.close", "code": code, "reason": reason})

    async def _pass(self, message: Message) -> None:
        try:
            await self._send(message)
        except (OSError, RuntimeError) as error:  # uvicorn: a session that is over already
            raise ClientGoneError("the client went away") from error
