"""Serves the indexer's status on a port of its own."""

import asyncio
import socket
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI

from balancer.server import EmbeddedServer

GRACE_S = 1


async def serve_status(
    api: FastAPI,
    *,
    listener: socket.socket,
    stop: asyncio.Event,
    on_listening: Callable[[int], None],
) -> None:
    """Serve on an open listener until `stop` is set."""
    server = EmbeddedServer(
        uvicorn.Config(
            api,
            loop="none",
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=GRACE_S,
        )
    )

    async def watch() -> None:
        await server.accepts.wait()
        on_listening(listener.getsockname()[1])
        await stop.wait()
        server.should_exit = True

    async with asyncio.TaskGroup() as group:
        watching = group.create_task(watch())
        await server.serve(sockets=[listener])
        watching.cancel()
