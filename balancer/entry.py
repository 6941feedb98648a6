"""Where every request enters: who answers a path, and what browsers may ask.

Engines' paths go to the data plane without touching the web framework; everything else goes to
the FastAPI application of `balancer.routes`. Pages of other origins may call what clients may, if
the operator has named them, and never what operators may.
"""

import asyncio
from collections.abc import Callable

from balancer.core.http.cors import Cors
from balancer.core.http.engine_paths import methods_of
from balancer.core.settings.dataplane import DataPlaneSettings
from balancer.dataplane.client_socket import ClientSocket
from balancer.dataplane.cross_origin import Application, CrossOrigin, Message, Receive, Send
from balancer.dataplane.exchange import AsgiExchange
from balancer.dataplane.plane import DataPlane


class Entry:
    """An ASGI application made of two."""

    def __init__(
        self,
        *,
        routes: Application,
        dataplane: DataPlane,
        cors: Cors,
        settings: DataPlaneSettings,
    ) -> None:
        self._routes = routes
        self.settings = settings
        """What a server of this lets clients do."""
        self.dataplane = dataplane
        self.handle = dataplane.handle
        """Answer an engines' path. Raises nothing but cancellation."""
        self._answer: Application = self._dispatch
        self.proxies: Callable[[str], bool] = _none if cors.is_on else dataplane.proxies
        """Tell whether a server may hand a path to `handle`, past ASGI.

        Not where browsers of other origins are told what they may do: that is done there.
        """
        if cors.is_on:
            self._answer = CrossOrigin(self._dispatch, cors, methods=_browsers_methods)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one connection of the server's."""
        if scope["type"] == "lifespan":
            await self._routes(scope, receive, send)
            return
        try:
            if scope["type"] == "websocket":
                await self.dataplane.relay(ClientSocket(scope, receive, send))
            else:
                await self._answer(scope, receive, send)
        except asyncio.CancelledError:
            # Only a server that has to end cancels an answer, and nothing of the task is left to
            # do: it would log a traceback for what the request's own line tells.
            return

    async def _dispatch(self, scope: Message, receive: Receive, send: Send) -> None:
        if self.dataplane.proxies(scope["path"]):
            await self.dataplane.handle(AsgiExchange(scope, receive, send))
        else:
            await self._routes(scope, receive, send)


def _none(_path: str) -> bool:
    return False


def _browsers_methods(path: str) -> tuple[str, ...]:
    if path == "/v1/models" or path.startswith("/v1/models/"):
        return ("GET", "HEAD")
    return methods_of(path)
