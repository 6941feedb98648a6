"""Serves the indexer's status on a port of its own."""

import asyncio
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI

from balancer.server import EmbeddedServer, listen

GRACE_S = 1


async def serve_status(
    api: FastAPI,
    *,
    host: str,
    port: int,
    stop: asyncio.Event,
    on_listening: Callable[[int], None],
) -> None:
    """Serve until `stop` is set. `port` 0 takes any free one. Raises ListenError."""
    listener = listen(host, port)
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

    with listener:
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(watch())
            await server.serve(sockets=[listener])
            watching.cancel()
