"""Real `kvlb` processes for the end-to-end tests: started, watched by their output, stopped by pid."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest

ROOT = Path(__file__).parent.parent.parent
KVLB = (sys.executable, "-m", "kvlb")


@dataclass(slots=True)
class RunningCommand:
    """One process and everything it printed so far."""

    process: asyncio.subprocess.Process
    lines: list[str] = field(default_factory=list)
    _grown: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    async def collect(self) -> None:
        """Read until the process closes its output."""
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self.lines.append(line.decode().rstrip("\n"))
            self._grown.set()
        self._grown.set()

    async def printed(self, text: str, *, deadline_s: float = 60) -> str:
        """Wait for a line that holds `text`; return it."""
        try:
            async with asyncio.timeout(deadline_s):
                while True:
                    for line in self.lines:
                        if text in line:
                            return line
                    if self.process.returncode is not None:
                        raise AssertionError(f"ended without printing {text!r}:\n{self.output}")
                    self._grown.clear()
                    await self._grown.wait()
        except TimeoutError as error:
            raise AssertionError(f"never printed {text!r}:\n{self.output}") from error

    async def stop(self, signal_number: int = signal.SIGTERM, *, deadline_s: float = 30) -> int:
        """Send a signal and wait for the end; return the exit code."""
        if self.process.returncode is None:
            self.process.send_signal(signal_number)
        async with asyncio.timeout(deadline_s):
            return await self.process.wait()


StartCommand = Callable[..., AbstractAsyncContextManager[RunningCommand]]


@pytest.fixture
def start_command() -> StartCommand:
    """Starts `kvlb` with the arguments given; the process ends with the `async with` block."""

    @asynccontextmanager
    async def start(
        *arguments: str,
        program: tuple[str, ...] = KVLB,
        cwd: Path = ROOT,
        env: dict[str, str] | None = None,
    ) -> AsyncIterator[RunningCommand]:
        process = await asyncio.create_subprocess_exec(
            *program,
            *arguments,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            stdin=asyncio.subprocess.DEVNULL,
            cwd=cwd,
            env={**os.environ, "COLUMNS": "200", "PYTHONUNBUFFERED": "1", **(env or {})},
        )
        command = RunningCommand(process)
        async with asyncio.TaskGroup() as group:
            group.create_task(command.collect())
            try:
                yield command
            finally:
                if process.returncode is None:
                    process.kill()
                await process.wait()

    return start


@pytest.fixture
def free_ports() -> Callable[[int], list[int]]:
    """A factory of ports nobody listens on at this moment."""
    return _free_ports


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


@pytest.fixture
def free_range() -> Callable[[int], int]:
    """A factory of the first of so many neighbouring ports that nobody listens on."""
    return _free_range


def _free_range(count: int) -> int:
    # Below the range from which the system takes ports for outgoing connections.
    for first in Random().sample(range(10_000, 15_000), k=100):  # noqa: S311 - no secret
        if all(_is_free(first + offset) for offset in range(count)):
            return first
    raise AssertionError(f"no {count} neighbouring free ports")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0
