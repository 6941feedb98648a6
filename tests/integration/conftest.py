"""Ports, addresses, certificates and fleets for tests that talk to real peers."""

import asyncio
import re
import socket
import subprocess
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from pathlib import Path

import pytest

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
