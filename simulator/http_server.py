"""Serves an ASGI application with uvicorn's protocols on a socket of our own.

`uvicorn.Server` owns a process: it takes the signals and polls for its end. Many engines share one
process here and must be able to die at once with their connections, so only the protocol is used.
"""

import asyncio
import socket
from collections.abc import Callable, Coroutine
from email.utils import formatdate
from typing import Any

from uvicorn.config import Config
from uvicorn.server import ServerState

_BACKLOG = 4096
_SHUTDOWN_S = 2.0
_ACCEPT_TURNS = 4
"""Turns of the loop from an accepted socket to a connection that uvicorn's state knows of."""


class HttpServer:
    """One listening socket."""

    def __init__(
        self, application: Callable[..., Coroutine[Any, Any, None]], *, keep_alive_s: int
    ) -> None:
        self._config = Config(
            application,
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            timeout_keep_alive=keep_alive_s,
            server_header=False,
        )
        self._state = ServerState()
        self._server: asyncio.Server | None = None

    async def start(self, listener: socket.socket) -> None:
        """Accept connections from now on."""
        self._config.load()
        self._state.default_headers = [
            (b"date", formatdate(usegmt=True).encode()),
            (b"server", b"uvicorn"),
        ]
        self._server = await asyncio.get_running_loop().create_server(
            self._create_protocol, sock=listener, backlog=_BACKLOG
        )

    async def stop(self) -> None:
        """Close the socket and cut every connection, as a killed process would."""
        if self._server is None:
            return
        # What is just being accepted would outlive the engine, and asyncio loses it if the server
        # closes meanwhile: first accept no more, then let those arrive and cut them.
        asyncio.get_running_loop().remove_reader(self._server.sockets[0].fileno())
        for _ in range(_ACCEPT_TURNS):
            await asyncio.sleep(0)
            self._cut()
        self._server.close()
        if self._state.tasks:
            await asyncio.wait(list(self._state.tasks), timeout=_SHUTDOWN_S)
        self._server = None

    def _cut(self) -> None:
        for connection in list(self._state.connections):
            transport = connection.transport
            if transport is not None:
                transport.abort()

    def _create_protocol(self) -> asyncio.Protocol:
        create: Any = self._config.http_protocol_class
        protocol: asyncio.Protocol = create(
            config=self._config, server_state=self._state, app_state={}
        )
        return protocol
