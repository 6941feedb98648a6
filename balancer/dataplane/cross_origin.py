"""Answers browsers' preflights and adds CORS headers to whatever an application answers.

Plain ASGI around another application. What is allowed is decided in `core.http.cors`.
"""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from balancer.core.http.cors import Cors

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]


class CrossOrigin:
    """Stands in front of `application` for the paths that browsers may call."""

    def __init__(
        self,
        application: Application,
        cors: Cors,
        *,
        methods: Callable[[str], tuple[str, ...]],
    ) -> None:
        """`methods` tells what a path takes; nothing for paths that are none of browsers'."""
        self._application = application
        self._cors = cors
        self._methods = methods

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request."""
        methods = self._methods(scope["path"]) if scope["type"] == "http" else ()
        if not methods:
            await self._application(scope, receive, send)
            return
        asked = tuple(scope["headers"])
        if self._cors.is_preflight(scope["method"], asked):
            headers = self._cors.preflight(asked, methods)
            await send({"type": "http.response.start", "status": 204, "headers": list(headers)})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return

        async def send_allowed(message: Message) -> None:
            if message["type"] == "http.response.start":
                answered = self._cors.answer(asked, message["headers"])
                message = {**message, "headers": list(answered)}
            await send(message)

        await self._application(scope, receive, send_allowed)
