"""Engines that speak WebSocket, and a real client of the balancer before them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

Session = Callable[[ServerConnection], Awaitable[None]]


@dataclass
class SocketEngine:
    """An engine that speaks WebSocket, and the ends of its sessions."""

    url: str = ""
    sessions: list[ServerConnection] = field(default_factory=list)
    closed: list[tuple[int, str]] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait_closed(self, count: int = 1) -> list[tuple[int, str]]:
        async with asyncio.timeout(20):
            while len(self.closed) < count:
                self.changed.clear()
                await self.changed.wait()
        return self.closed


SocketEngineFactory = Callable[..., AbstractAsyncContextManager[SocketEngine]]


@pytest.fixture
def socket_engine() -> SocketEngineFactory:
    """Factory of engines whose sessions are played by a script."""

    @asynccontextmanager
    async def start(session: Session, **options: Any) -> AsyncIterator[SocketEngine]:
        engine = SocketEngine()

        async def play(connection: ServerConnection) -> None:
            engine.sessions.append(connection)
            try:
                await session(connection)
            except ConnectionClosed:
                pass
            finally:
                await connection.wait_closed()
                engine.closed.append((connection.close_code or 0, connection.close_reason or ""))
                engine.changed.set()

        async with serve(play, "127.0.0.1", 0, compression=None, **options) as server:
            port = next(iter(server.sockets)).getsockname()[1]
            engine.url = f"http://127.0.0.1:{port}"
            yield engine

    return start


@pytest.fixture
def echo() -> Session:
    """A session that greets, and sends back what it is sent."""

    async def play(connection: ServerConnection) -> None:
        await connection.send('{"type":"session.created"}')
        async for message in connection:
            await connection.send(message)

    return play


@pytest.fixture
def opened() -> Callable[..., connect]:
    """A client's session with a balancer, for `async with`."""

    def start(proxy: Any, query: str = "?model=m", **options: Any) -> connect:
        url = f"ws://127.0.0.1:{proxy.port}/v1/realtime{query}"
        return connect(url, proxy=None, compression=None, **options)

    return start


@pytest.fixture
def receive() -> Callable[[ClientConnection], Awaitable[str | bytes]]:
    """The next message."""

    async def wait(client: ClientConnection) -> str | bytes:
        async with asyncio.timeout(20):
            return await client.recv()

    return wait


@pytest.fixture
def ended() -> Callable[[ClientConnection], Awaitable[tuple[int | None, str | None]]]:
    """Code and reason with which a session was closed."""

    async def wait(client: ClientConnection) -> tuple[int | None, str | None]:
        async with asyncio.timeout(20):
            await client.wait_closed()
        return client.close_code, client.close_reason

    return wait
