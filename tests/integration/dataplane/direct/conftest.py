"""A server of our own protocol on a real socket, a raw client of it, and what it answers."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Any, Protocol

import msgspec
import pytest
import uvicorn

from balancer.core.errors import BodyTooLargeError, ClientGoneError
from balancer.core.http.body import whole
from balancer.core.settings.dataplane import DataPlaneSettings
from balancer.dataplane.direct import direct_protocol
from balancer.dataplane.exchange import Exchange

Answer = Callable[[Exchange], Awaitable[None]]
LIMIT_BYTES = 1_000_000


class FakePlane:
    """Answers `/v1/...` with what a test says; remembers how each exchange ended."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.ended: asyncio.Queue[BaseException | None] = asyncio.Queue()
        self.seen: list[Exchange] = []
        self._has_begun = asyncio.Event()

    def proxies(self, path: str) -> bool:
        return path.startswith("/v1/")

    async def handle(self, exchange: Exchange) -> None:
        self.seen.append(exchange)
        self._has_begun.set()
        try:
            await self._answer(exchange)
        except BaseException as error:
            self.ended.put_nowait(error)
            if not isinstance(error, ClientGoneError | BodyTooLargeError):
                raise
        else:
            self.ended.put_nowait(None)

    async def begun(self) -> None:
        """A first request is answered."""
        async with asyncio.timeout(20):
            await self._has_begun.wait()

    async def next_end(self) -> BaseException | None:
        async with asyncio.timeout(20):
            return await self.ended.get()


class Client:
    """A raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def read(self, data: bytes) -> None:
        """Expect exactly these bytes next."""
        async with asyncio.timeout(20):
            assert await self.reader.readexactly(len(data)) == data

    async def read_rest(self) -> bytes:
        """Everything up to the end of the connection."""
        async with asyncio.timeout(20):
            return await self.reader.read()

    async def is_reset(self) -> bool:
        try:
            await self.read_rest()
        except ConnectionResetError:
            return True
        return False


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.leave = asyncio.Event()
        self.accepts = asyncio.Event()

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        self.accepts.set()

    async def main_loop(self) -> None:
        await self.leave.wait()

    @contextmanager
    def capture_signals(self) -> Any:
        yield


async def _hello(scope: Any, receive: Any, send: Any) -> None:
    """An application that answers every other path."""
    if scope["path"] == "/large":  # refused before it is read
        last = [(b"content-length", b"2"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 413, "headers": last})
        await send({"type": "http.response.body", "body": b"no"})
        return
    body = scope["path"].encode() + b"?" + scope["query_string"] + b" "
    is_read = False
    while not is_read:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body += message["body"]
        is_read = not message.get("more_body", False)
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": 200, "headers": [length]})
    await send({"type": "http.response.body", "body": body})


class Connect(Protocol):
    """Starts a server, and connects to it."""

    def __call__(
        self, answer: Answer, **options: Any
    ) -> AbstractAsyncContextManager[tuple[Client, FakePlane]]: ...


@pytest.fixture
def connected() -> Connect:
    """Factory of a client connected to a server whose proxied paths get the given answer."""

    @asynccontextmanager
    async def connect(answer: Answer, **options: Any) -> AsyncIterator[tuple[Client, FakePlane]]:
        plane = FakePlane(answer)
        limits = msgspec.convert(options.pop("limits", {}), DataPlaneSettings)
        server = _Server(
            uvicorn.Config(
                _hello,
                port=0,
                loop="none",
                http=direct_protocol(plane, limits),
                lifespan="off",
                log_config=None,
                server_header=False,
                date_header=False,
                timeout_graceful_shutdown=1,
                **options,
            )
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(server.serve())
            await server.accepts.wait()
            port = server.servers[0].sockets[0].getsockname()[1]
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                yield Client(reader, writer), plane
            finally:
                writer.transport.abort()
                server.leave.set()

    return connect


@pytest.fixture
def echo() -> Answer:
    """The request's body, with its length."""

    async def answer(exchange: Exchange) -> None:
        body = await exchange.read_body(LIMIT_BYTES)
        await exchange.start(200, ((b"content-length", str(body.size_bytes).encode()),))
        await exchange.write(whole(body))
        await exchange.finish()

    return answer


@pytest.fixture
def stream() -> Answer:
    """Two pieces, without a length."""

    async def answer(exchange: Exchange) -> None:
        await exchange.read_body(LIMIT_BYTES)
        await exchange.start(200, ((b"a", b"b"),))
        await exchange.write(b"one")
        await exchange.write(b"")
        await exchange.write(b"two!")
        await exchange.finish()

    return answer


@pytest.fixture
def post() -> Callable[..., bytes]:
    """A whole request."""

    def make(
        body: bytes, *headers: bytes, version: bytes = b"1.1", path: bytes = b"/v1/x"
    ) -> bytes:
        lines = [b"POST %b HTTP/%b" % (path, version), b"host: x", *headers]
        return b"\r\n".join([*lines, b"content-length: %d" % len(body), b"", body])

    return make
