"""Real peers: engines that misbehave on real sockets, fleets, servers; ports and certificates."""

import asyncio
import json
import re
import socket
import struct
import subprocess
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pytest

from balancer.server import BACKLOG
from kvlb.simulated import instance_option, parse_fleet, simulated_fleet
from simulator.core.settings import EngineSettings


class Reserved:
    """Ports that no other process is given while the test runs, whether or not it listens there now.

    The system hands out what is merely unused at the moment, and several test processes ask it. A
    socket that is bound and doesn't listen refuses connections, and shares its port with one that
    comes to listen.
    """

    def __init__(self, until: ExitStack) -> None:
        self._until = until

    def port(self) -> int:
        holder = self._until.enter_context(socket.socket())
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        return int(holder.getsockname()[1])


@pytest.fixture
def reserved() -> Iterator[Reserved]:
    with ExitStack() as stack:
        yield Reserved(stack)


@pytest.fixture
def unused_url(reserved: Reserved) -> str:
    """An address where nobody listens."""
    return f"http://127.0.0.1:{reserved.port()}"


async def _eventually(is_so: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while True:
            if is_so():
                return
            await asyncio.sleep(0.005)


@pytest.fixture
def eventually() -> Callable[[Callable[[], object]], Awaitable[None]]:
    """Wait, with a deadline, for what nobody announces."""
    return _eventually


@dataclass
class Received:
    """One request as the engine saw it."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes
    connection: int
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the peer closes the connection."""

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name.lower()), None)

    @property
    def json(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.body)
        return value


class Wire:
    """What a script writes to the peer."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    async def raw(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def head(self, status: int = 200, **headers: str) -> None:
        """Send status and headers; a chunked body follows."""
        lines = [f"HTTP/1.1 {status} Status", "transfer-encoding: chunked"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        await self.raw("\r\n".join(lines).encode() + b"\r\n\r\n")

    async def chunk(self, data: bytes) -> None:
        await self.raw(b"%x\r\n%b\r\n" % (len(data), data))

    async def end(self) -> None:
        await self.raw(b"0\r\n\r\n")

    async def json(self, value: object, status: int = 200, **headers: str) -> None:
        body = json.dumps(value).encode()
        lines = [f"HTTP/1.1 {status} Status", f"content-length: {len(body)}"]
        lines += ["content-type: application/json"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        await self.raw("\r\n".join(lines).encode() + b"\r\n\r\n" + body)

    async def events(self, *events: bytes) -> None:
        """Answer with a whole event stream."""
        await self.head(content_type="text/event-stream; charset=utf-8")
        for event in events:
            await self.chunk(event)
        await self.end()

    def close(self) -> None:
        self._writer.close()

    def reset(self) -> None:
        """Close with RST instead of FIN."""
        raw = self._writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()


Script = Callable[[Received, Wire], Awaitable[None]]


class FakeEngine:
    """Runs `script` for every request; keeps what it received."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.received: list[Received] = []
        self.connections = 0
        self.url = ""
        self._writers: set[asyncio.StreamWriter] = set()
        self._changed = asyncio.Condition()

    async def wait_for_requests(self, count: int) -> None:
        async with asyncio.timeout(20), self._changed:
            await self._changed.wait_for(lambda: len(self.received) >= count)

    async def wait_for_connections(self, count: int) -> None:
        """Wait until exactly `count` connections are open."""
        async with asyncio.timeout(20), self._changed:
            await self._changed.wait_for(lambda: len(self._writers) == count)

    @asynccontextmanager
    async def running(self, host: str) -> AsyncIterator["FakeEngine"]:
        server = await asyncio.start_server(self._on_connection, host, 0, backlog=BACKLOG)
        port = server.sockets[0].getsockname()[1]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        try:
            yield self
        finally:
            server.close()
            for writer in list(self._writers):
                writer.transport.abort()
            await self.wait_for_connections(0)
            await server.wait_closed()

    async def _on_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.connections += 1
        number = self.connections
        self._writers.add(writer)
        active: list[Received] = []
        try:
            async with asyncio.TaskGroup() as group:
                while (received := await _read_request(reader, number)) is not None:
                    active.append(received)
                    async with self._changed:
                        self.received.append(received)
                        self._changed.notify_all()
                    group.create_task(self._play(received, Wire(writer)))
                for each in active:
                    each.gone.set()
        finally:
            writer.close()
            async with self._changed:
                self._writers.discard(writer)
                self._changed.notify_all()

    async def _play(self, received: Received, wire: Wire) -> None:
        try:
            await self.script(received, wire)
        except ConnectionError:
            received.gone.set()


async def _read_request(reader: asyncio.StreamReader, number: int) -> Received | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    first, *lines = head[:-4].split("\r\n")
    method, target, _ = first.split(" ")
    headers = [(name.lower(), value.strip()) for name, value in (x.split(":", 1) for x in lines)]
    length = int(next((value for name, value in headers if name == "content-length"), "0"))
    try:
        body = await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return Received(method, target, headers, body, number)


class EngineFactory(Protocol):
    """Starts a fake engine that lives as long as the `async with` block."""

    def __call__(
        self, script: Script, host: str = "127.0.0.1"
    ) -> AbstractAsyncContextManager[FakeEngine]: ...


@pytest.fixture
def engine() -> EngineFactory:
    """Factory of fake engines, for `async with`."""

    def start(script: Script, host: str = "127.0.0.1") -> AbstractAsyncContextManager[FakeEngine]:
        return FakeEngine(script).running(host)

    return start


@pytest.fixture
def engines_beside() -> Iterator[Callable[..., list[str]]]:
    """Starts a simulated fleet in a thread and returns its `--instance` values.

    For commands, which want the main thread: they run a loop of their own and take signals.
    """
    with ExitStack() as stack:

        def start(spec: str = "1", engine: EngineSettings | None = None) -> list[str]:
            options: list[str] = []
            started, ended = threading.Event(), threading.Event()
            settings = engine or EngineSettings(inter_token_ms=1.0)
            thread = threading.Thread(
                target=lambda: asyncio.run(_serve_beside(spec, settings, options, started, ended))
            )
            stack.callback(thread.join)
            stack.callback(ended.set)
            thread.start()
            assert started.wait(10)
            return options

        yield start


async def _serve_beside(
    spec: str,
    settings: EngineSettings,
    options: list[str],
    started: threading.Event,
    ended: threading.Event,
) -> None:
    async with simulated_fleet(parse_fleet(spec), settings) as fleet:
        options += map(instance_option, fleet.engines)
        started.set()
        await asyncio.to_thread(ended.wait)


@pytest.fixture
def endpoint() -> Callable[..., AbstractAsyncContextManager[str]]:
    """A server that gives one answer after the other, and the last one for ever; `async with` is its URL."""

    @asynccontextmanager
    async def serve(*answers: bytes) -> AsyncIterator[str]:
        waiting = list(answers)

        async def give(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head)
            await reader.readexactly(int(length[1]) if length else 0)
            writer.write(waiting.pop(0) if len(waiting) > 1 else waiting[0])
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(give, "127.0.0.1", 0)
        async with server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    return serve


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """Key and self-signed certificate of `localhost`."""
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"),
            *("-keyout", str(key), "-out", str(certificate), "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=DNS:localhost"),
        ],
        check=True,
        capture_output=True,
    )
    return key, certificate
