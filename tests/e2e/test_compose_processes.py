"""docker-compose.yml without Docker: its command lines, configuration and health checks, as processes.

Names of services become 127.0.0.1 and their ports free ones; everything else is run as it is written.
"""

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(sys.executable).parent
ENGINES = 12
"""Ports of `kvlb simulate 2p2d`, from 8100 on."""

StartCommand = Callable[..., AbstractAsyncContextManager[Any]]


@dataclass(frozen=True, slots=True)
class Stage:
    """What docker-compose makes of the file, and free ports in place of the ones in it."""

    config: dict[str, Any]
    ports: dict[int, int]

    def here(self, text: str) -> str:
        """`text` as it can be run on this machine."""
        text = re.sub(r"\b(engines|balancer|indexer|redis|prometheus):(?=\d)", "127.0.0.1:", text)
        text = text.replace("0.0.0.0", "127.0.0.1")  # noqa: S104 - nobody else may come in
        return re.sub(
            r"\b\d{4}\b", lambda found: str(self.ports.get(int(found[0]), found[0])), text
        )

    def command(self, service: str) -> list[str]:
        return [self.here(word) for word in self.config["services"][service]["command"]]

    def kvlb_file(self, directory: Path) -> Path:
        """The configuration that is mounted at /etc/kvlb/kvlb.yaml."""
        written = directory / "kvlb.yaml"
        written.write_text(self.here(self.config["configs"]["kvlb"]["content"]))
        return written

    async def until_healthy(self, service: str) -> None:
        """Run the service's own health check until it succeeds."""
        check = self.config["services"][service]["healthcheck"]["test"]
        program = {"python": sys.executable}.get(check[1], check[1])
        arguments = [self.here(word) for word in check[2:]]
        if service == "redis":
            arguments = ["-p", str(self.ports[6379]), *arguments]
        async with asyncio.timeout(30):
            while True:
                probe = await asyncio.create_subprocess_exec(
                    program, *arguments, stderr=asyncio.subprocess.DEVNULL
                )
                if await probe.wait() == 0:
                    return
                await asyncio.sleep(0.1)


@pytest.fixture
def stage(free_ports: Callable[[int], list[int]], free_range: Callable[[int], int]) -> Stage:
    """The compose file, with ports for one test."""
    done = subprocess.run(
        [PROGRAMS / "docker-compose", "--profile", "load", "config", "--format", "json"],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "GRAFANA_PASSWORD": "chosen"},
        capture_output=True,
        text=True,
        check=True,
        timeout=15,
    )
    balancer, indexer, redis = free_ports(3)
    first = free_range(ENGINES)
    ports = {8080: balancer, 8081: indexer, 6379: redis}
    ports |= {8100 + number: first + number for number in range(ENGINES)}
    return Stage(json.loads(done.stdout), ports)


def documented_request() -> tuple[str, dict[str, Any]]:
    """Path and body of the first `curl` in docs/compose.md."""
    text = (ROOT / "docs/compose.md").read_text().replace("\\\n", " ")
    found = re.search(r"curl -i http://127\.0\.0\.1:8080(\S+) .*? -d '([^']*)'", text)
    assert found
    return found[1], json.loads(found[2])


async def until_load_is_answered(load: Any) -> None:
    """The demo traffic reports from the start; only an answer shows that it reaches somebody."""
    async with asyncio.timeout(60):
        while not any(re.search(r'"answered": ?[1-9]', line) for line in load.lines):
            assert load.process.returncode is None, load.output
            await asyncio.sleep(0.05)


async def test_first_request_of_the_documentation_is_answered(
    stage: Stage, start_command: StartCommand, tmp_path: Path
) -> None:
    """Engines, a balancer over them and the demo traffic, each healthy by its own check."""
    path, body = documented_request()
    url = f"http://127.0.0.1:{stage.ports[8080]}"
    file = stage.kvlb_file(tmp_path)
    assert shutil.which("redis-server"), "run .ci/setup-services: it installs what tests need"
    async with AsyncExitStack() as stack:
        program, *options = stage.command("redis")
        options += ["--port", str(stage.ports[6379]), "--dir", str(tmp_path)]
        await stack.enter_async_context(start_command(*options, program=(program,)))
        await stage.until_healthy("redis")
        await stack.enter_async_context(start_command(*stage.command("engines")))
        await stage.until_healthy("engines")
        own_port = {"indexer": ["--status-port", str(stage.ports[8081])], "balancer": []}
        for service, more in own_port.items():
            command = [*stage.command(service), *more]
            command[command.index("--config") + 1] = str(file)
            await stack.enter_async_context(start_command(*command))
            await stage.until_healthy(service)
        load = await stack.enter_async_context(start_command(*stage.command("load")))
        async with httpx.AsyncClient(trust_env=False, timeout=30) as http:
            answer = await http.post(f"{url}{path}", json=body)
            await until_load_is_answered(load)
            metrics = (await http.get(f"http://127.0.0.1:{stage.ports[8081]}/metrics")).text

    assert answer.status_code == 200
    assert answer.headers["x-kvlb-instance"] in {"d0", "d1"}
    assert answer.json()["choices"][0]["message"]["content"]
    for alias in ("p0", "p1", "d0", "d1"):
        assert f'kvlb_rank_trust{{instance="{alias}",rank="0",trust="exact"}} 1.0' in metrics


async def test_redis_starts_with_the_options_given(
    stage: Stage, start_command: StartCommand, tmp_path: Path
) -> None:
    """A real redis-server takes the command line, and is healthy by its own check."""
    assert shutil.which("redis-server"), "run .ci/setup-services: it installs what tests need"
    program, *options = stage.command("redis")
    options += ["--port", str(stage.ports[6379]), "--dir", str(tmp_path)]
    async with start_command(*options, program=(program,)) as redis:
        await stage.until_healthy("redis")
        question = ("-p", str(stage.ports[6379]), "config", "get", "maxmemory*")
        async with start_command(*question, program=("redis-cli",)) as asking:
            await asking.process.wait()
        code = await redis.stop()

    assert "noeviction" in asking.lines
    assert str(512 * 2**20) in asking.lines
    assert code == 0
    assert "appendonlydir" in os.listdir(tmp_path)


async def test_prometheus_starts_with_the_options_given(
    stage: Stage,
    start_command: StartCommand,
    free_ports: Callable[[int], list[int]],
    tmp_path: Path,
) -> None:
    """Command line and mounted files as they are; it finds the rules beside its configuration."""
    assert shutil.which("prometheus"), "run .ci/setup-services: it installs what tests need"
    service = stage.config["services"]["prometheus"]
    mounted = {each["target"]: each["source"] for each in service["volumes"]}
    shutil.copytree(mounted["/etc/prometheus/rules"], tmp_path / "rules")
    shutil.copy(mounted["/etc/prometheus/prometheus.yml"], tmp_path)
    options = [
        word.replace("=/etc/prometheus", f"={tmp_path}").replace("=/prometheus", f"={tmp_path}/db")
        for word in service["command"]
    ]
    options.append(f"--web.listen-address=127.0.0.1:{free_ports(1)[0]}")
    async with start_command(*options, program=("prometheus",)) as prometheus:
        await prometheus.printed("Server is ready")
        url = options[-1].replace("--web.listen-address=", "http://")
        async with httpx.AsyncClient(trust_env=False) as http:
            groups = (await http.get(f"{url}/api/v1/rules")).json()["data"]["groups"]

        assert await prometheus.stop() == 0
    assert len(groups) >= 3
