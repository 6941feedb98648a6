"""docs/cli.md: every command line in it does what it says."""

import asyncio
import re
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

ROOT = Path(__file__).parent.parent.parent
TEXT = (ROOT / "docs/cli.md").read_text()
BLOCK = re.compile(r"^```sh ?(run|serve)? ?(up|engines)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
READY = {
    "up": "listens on",
    "indexer": "listens on",
    "balancer": "listens on",
    "simulate": "Balance over them",
    "events": "following",
    "record": "recording what comes to",
}
ENGINE_PORTS = 12
"""8101 to 8112: four engines with events and replay."""

StartCommand = Callable[..., AbstractAsyncContextManager[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Documented:
    """One line of a block, and how the block is to be run."""

    kind: str
    needs: str
    line: str


LINES = [
    Documented(kind=kind, needs=needs, line=line)
    for kind, needs, block in BLOCK.findall(TEXT)
    for line in block.replace("\\\n", " ").splitlines()
]


def lines(kind: str) -> list[Any]:
    return [pytest.param(each, id=each.line[:60]) for each in LINES if each.kind == kind]


@dataclass(frozen=True, slots=True)
class Ports:
    """Free ports in the place of the documented ones."""

    balancer: int
    status: int
    engines: int

    def put_into(self, line: str) -> str:
        """`line` as it can be run here: other ports, and no other machines."""
        line = re.sub(r"\b(8080|9000)\b", str(self.balancer), line)
        line = re.sub(r"\b8081\b", str(self.status), line)
        line = re.sub(r"\b81(\d\d)\b", lambda found: str(self.engines + int(found[1]) - 1), line)
        return line.replace("10.0.0.", "127.0.0.")


@pytest.fixture
def ports(free_ports: Callable[[int], list[int]], free_range: Callable[[int], int]) -> Ports:
    """Ports for one test."""
    balancer, status = free_ports(2)
    return Ports(balancer, status, free_range(ENGINE_PORTS))


@pytest.fixture
def environment(ports: Ports) -> dict[str, str]:
    """The port where none is said, and `kvlb` on the path."""
    path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
    url = f"http://127.0.0.1:{ports.balancer}"
    return {"KVLB_PORT": str(ports.balancer), "KVLB_URL": url, "PATH": path}


def test_every_block_says_how_it_is_run() -> None:
    """A line that no test runs may be wrong."""
    assert len(LINES) > 12
    assert [each.line for each in LINES if not each.kind] == []


@pytest.mark.parametrize("documented", lines("serve"))
async def test_served_line_starts_and_ends(
    documented: Documented,
    start_command: StartCommand,
    ports: Ports,
    environment: dict[str, str],
    tmp_path: Path,
) -> None:
    """It says that it is ready, and ends in peace at Ctrl-C."""
    for yaml in re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL):
        name = yaml.splitlines()[0].removeprefix("# ")
        (tmp_path / name).write_text(ports.put_into(yaml))
    line = ports.put_into(documented.line)
    async with AsyncExitStack() as stack:
        await started(documented.needs, stack, start_command, ports, environment)
        command = await stack.enter_async_context(
            start_command("-c", f"exec {line}", program=("/bin/sh",), cwd=tmp_path, env=environment)
        )
        await command.printed(READY[line.split()[1]])

        assert await command.stop(signal.SIGINT) == 0


@pytest.mark.parametrize("documented", lines("run"))
async def test_run_line_succeeds(
    documented: Documented,
    start_command: StartCommand,
    ports: Ports,
    environment: dict[str, str],
) -> None:
    """It ends by itself, with exit code 0 and something to read."""
    async with AsyncExitStack() as stack:
        await started(documented.needs, stack, start_command, ports, environment)
        line = ports.put_into(documented.line)
        command = await stack.enter_async_context(
            start_command("-c", line, program=("/bin/sh",), env=environment)
        )
        code = await command.process.wait()

    assert code == 0, command.output
    assert command.output


async def started(
    needs: str,
    stack: AsyncExitStack,
    start_command: StartCommand,
    ports: Ports,
    environment: dict[str, str],
) -> None:
    """Start what the block says it needs."""
    if needs == "up":
        command = start_command("up", "--simulate", "2p2d", env=environment)
        await (await stack.enter_async_context(command)).printed("listens on")
        await until_ready(ports.balancer)
    elif needs == "engines":
        command = start_command("simulate", "4", "--base-port", str(ports.engines))
        await (await stack.enter_async_context(command)).printed("Balance over them")


async def until_ready(port: int) -> None:
    async with asyncio.timeout(30), httpx.AsyncClient(trust_env=False) as http:
        while True:
            answer = await http.get(f"http://127.0.0.1:{port}/ready")
            if answer.status_code == 200:
                return
            await asyncio.sleep(0.05)
