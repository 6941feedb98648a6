"""Serves an ASGI application with uvicorn's protocols on a socket of our own.

`uvicorn.Server` owns a process: it takes the signals and polls for its end. Many engines share one
process here and must be able to die at once with their connections, so only the protocol is used.

What a process can suffer from outside: `stop` kills it, `freeze` has it stand still (connections are
accepted, nothing is answered), `cut_off` takes it off the network, `cut` breaks what is open.
"""

import asyncio
import socket
from collections.abc import Callable, Coroutine, MutableMapping
from email.utils import formatdate
from typing import Any

from uvicorn.config import Config
from uvicorn.server import ServerState

_BACKLOG = 4096
_SHUTDOWN_S = 2.0
Application = Callable[..., Coroutine[Any, Any, None]]

_ACCEPT_TURNS = 4
"""Turns of the loop from an accepted socket to a connection that uvicorn's state knows of."""


class HttpServer:
    """One listening socket."""

    def __init__(self, application: Application, *, keep_alive_s: int) -> None:
        self._application = application
        self._thawed = asyncio.Event()
        self._thawed.set()
        self._config = Config(
            self._serve,
            interface="asgi3",
            lifespan="off",
            ws="websockets-sansio",
            log_config=None,
            access_log=False,
            timeout_keep_alive=keep_alive_s,
            server_header=False,
        )
        self._state = ServerState()
        self._server: asyncio.Server | None = None

    async def start(self, listener: socket.socket) -> None:
        """Accept connections from now on, also again after `cut_off`."""
        if not self._config.loaded:
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
        self.thaw()
        await self.cut_off()
        if self._state.tasks:
            await asyncio.wait(list(self._state.tasks), timeout=_SHUTDOWN_S)

    async def cut_off(self) -> None:
        """Refuse connections and break those there are; what is behind the server lives on."""
        if self._server is None:
            return
        # What is just being accepted would outlive the engine, and asyncio loses it if the server
        # closes meanwhile: first accept no more, then let those arrive and cut them.
        asyncio.get_running_loop().remove_reader(self._server.sockets[0].fileno())
        for _ in range(_ACCEPT_TURNS):
            await asyncio.sleep(0)
            self.cut()
        self._server.close()
        self._server = None

    def close(self) -> None:
        """The same without waiting for anything; what is just being accepted may be missed."""
        self.thaw()
        self.cut()
        if self._server is not None:
            self._server.close()
            self._server = None

    def cut(self) -> None:
        """Break every connection."""
        for connection in list(self._state.connections):
            transport = connection.transport
            if transport is not None:
                transport.abort()

    def freeze(self) -> None:
        """Stand still: the system accepts connections and bytes, nobody reads or writes any."""
        self._thawed.clear()

    def thaw(self) -> None:
        """Go on where it stood still; what arrived meanwhile is seen now."""
        self._thawed.set()

    async def _serve(
        self,
        scope: MutableMapping[str, Any],
        receive: Callable[[], Coroutine[Any, Any, Any]],
        send: Callable[[Any], Coroutine[Any, Any, None]],
    ) -> None:
        async def received() -> Any:
            message = await receive()
            await self._thawed.wait()
            return message

        async def sent(message: Any) -> None:
            await self._thawed.wait()
            await send(message)

        await self._application(scope, received, sent)

    def _create_protocol(self) -> asyncio.Protocol:
        create: Any = self._config.http_protocol_class
        protocol: asyncio.Protocol = create(
            config=self._config, server_state=self._state, app_state={}
        )
        return protocol
