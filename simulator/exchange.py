"""What the API needs of one HTTP exchange; plain ASGI, as cheap as it gets."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

import msgspec

from simulator.core.errors import RequestRefusedError
from simulator.core.settings import Version

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_FIRST_RELEASE_WITH_NESTED_ERRORS = (0, 10, 1)
_EVENT_STREAM = (b"content-type", b"text/event-stream; charset=utf-8")


class ClientGoneError(Exception):
    """The client closed the connection before its answer was complete."""


class Exchange:
    """One request and its answer."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers: dict[str, str] = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        self.body = b""
        self.is_complete = False
        self._receive = receive
        self._send = send

    async def read_body(self) -> None:
        """Read the whole body, or raise ClientGoneError."""
        parts: list[bytes] = []
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                break
        self.body = b"".join(parts)

    async def run_until_gone(self) -> None:
        """Raise ClientGoneError when the client leaves before the answer is complete."""
        message = await self._receive()
        while message["type"] != "http.disconnect":
            message = await self._receive()
        if not self.is_complete:
            raise ClientGoneError

    async def send(
        self,
        body: bytes,
        *,
        status: int = 200,
        content_type: str = "application/json",
        headers: dict[str, str] | None = None,
    ) -> None:
        """Answer at once."""
        listed = [(b"content-type", content_type.encode())] if content_type else []
        listed.append((b"content-length", str(len(body)).encode()))
        listed.extend((name.encode(), value.encode()) for name, value in (headers or {}).items())
        await self._send({"type": "http.response.start", "status": status, "headers": listed})
        self.is_complete = True
        await self._send({"type": "http.response.body", "body": body})

    async def send_json(self, value: object, *, status: int = 200) -> None:
        """Answer with a JSON document."""
        await self.send(msgspec.json.encode(value), status=status)

    async def start_stream(self) -> None:
        """Begin an answer of server-sent events."""
        await self._send({"type": "http.response.start", "status": 200, "headers": [_EVENT_STREAM]})

    async def send_event(self, value: object) -> None:
        """Send one event of a stream."""
        await self.send_chunk(b"data: " + msgspec.json.encode(value) + b"\n\n")

    async def send_chunk(self, data: bytes) -> None:
        """Send a piece of an answer that was begun."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self) -> None:
        """End the answer without a marker."""
        self.is_complete = True
        await self._send({"type": "http.response.body", "body": b""})

    async def end_stream(self) -> None:
        """Send the end marker and finish the answer."""
        self.is_complete = True
        await self._send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


def render_error(error: RequestRefusedError, release: Version) -> dict[str, object]:
    """Return the error body: nested from 0.10.1 on, flat before."""
    fields: dict[str, object] = {
        "message": error.message,
        "type": error.kind,
        "param": error.param,
        "code": error.status,
    }
    if release < _FIRST_RELEASE_WITH_NESTED_ERRORS:
        return {"object": "error", **fields}
    return {"error": fields}
