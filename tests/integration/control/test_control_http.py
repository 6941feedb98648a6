"""Cancelled control calls, before real servers that count their connections."""

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager

import httpx
import pytest

from balancer.fleet.control_http import ControlHttp

IDLE_S = 0.02
SERVERS = 6
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"


class Server:
    """Answers every request, except those for `/never`."""

    def __init__(self) -> None:
        self.open = 0
        self.asked = 0
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                self.asked += 1
                if b"/never" not in head:
                    writer.write(ANSWER)
        except asyncio.IncompleteReadError:
            pass
        finally:
            self.open -= 1
            writer.close()


@asynccontextmanager
async def listening() -> AsyncIterator[Server]:
    server = Server()
    async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listener:
        server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        yield server


@pytest.fixture
def uncollected() -> Iterator[None]:
    """What is lost stays lost."""
    gc.disable()
    yield
    gc.enable()
    gc.collect()


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("turns", range(12))
async def test_cancelled_call_loses_none_of_the_connections_it_was_closing(
    turns: int, eventually: Callable[[Callable[[], object]], Awaitable[None]]
) -> None:
    """Whatever it was at: several have been idle for too long, and are closed when it begins."""
    limits = httpx.Limits(keepalive_expiry=IDLE_S)
    async with listening() as server:
        async with ControlHttp(trust_env=False, limits=limits) as http:
            async with asyncio.TaskGroup() as group:
                for _ in range(SERVERS):
                    group.create_task(http.get(server.url))
            await asyncio.sleep(2 * IDLE_S)
            async with asyncio.TaskGroup() as group:
                call = group.create_task(http.get(server.url))
                for _ in range(turns):
                    await asyncio.sleep(0)
                call.cancel()
        await eventually(lambda: server.open == 0)


async def test_engine_sees_that_a_call_was_cancelled(
    eventually: Callable[[Callable[[], object]], Awaitable[None]],
) -> None:
    """It stops computing for it: the client may go on without."""
    async with listening() as server, ControlHttp(trust_env=False) as http:
        async with asyncio.TaskGroup() as group:
            call = group.create_task(http.get(f"{server.url}/never"))
            await eventually(lambda: server.asked)
            call.cancel()
        assert call.cancelled()
        await eventually(lambda: server.open == 0)
        assert (await http.get(server.url)).status_code == 200


async def test_failure_and_timeout_of_a_call_are_httpxs_own(unused_url: str) -> None:
    """Callers catch the same errors."""
    async with listening() as server, ControlHttp(trust_env=False) as http:
        with pytest.raises(httpx.ConnectError):
            await http.get(unused_url)
        with pytest.raises(httpx.ReadTimeout):
            await http.get(f"{server.url}/never", timeout=0.05)
