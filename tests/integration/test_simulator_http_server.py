"""How the simulator's HTTP server dies."""

import asyncio
import socket
from contextlib import suppress
from typing import Any

import pytest

from simulator.http_server import HttpServer


async def never_asked(scope: Any, receive: Any, send: Any) -> None:
    """No request comes."""
    raise AssertionError("nothing was asked")


@pytest.mark.parametrize("turns", range(6))
async def test_a_connection_that_is_being_accepted_dies_with_the_server(turns: int) -> None:
    """However far it has come: a killed process keeps none."""
    server = HttpServer(never_asked, keep_alive_s=60)
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    await server.start(listener)
    with socket.create_connection(listener.getsockname()) as client:
        client.setblocking(False)
        for _ in range(turns):
            await asyncio.sleep(0)

        await server.stop()

        async with asyncio.timeout(20):
            with suppress(ConnectionResetError):  # as good as an end
                assert await asyncio.get_running_loop().sock_recv(client, 1) == b""
