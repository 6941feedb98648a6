"""docs/migrating.md, read; and its lines, started before simulated engines."""

import asyncio
import re
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import yaml
import zmq

from simulator.core.settings import EngineSettings
from simulator.service import FleetSpec, RunningEngine, RunningFleet, running_fleet

TEXT = (Path(__file__).parents[3] / "docs/migrating.md").read_text()
SHELL = re.compile(r"^```sh ?([a-z0-9_ ]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
YAML = re.compile(r"^```yaml\n# (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OPTION = re.compile(r"--instance (\S+)")

StartCommand = Callable[..., AbstractAsyncContextManager[Any]]

BASE = EngineSettings(
    inter_token_ms=1.0, prefill_tokens_per_s=1e5, transfer_tokens_per_s=1e6, num_blocks=1024
)
KEY = "the-engines-key"
SETUPS: dict[str, dict[str, Any]] = {
    "none": {},
    "nixl": {"kv_connector": "nixl"},
    "nixl keyed": {"kv_connector": "nixl", "api_key": KEY},
    "nixl_both_ways": {"kv_connector": "nixl", "bidirectional": True},
    "nixl_push": {"kv_connector": "nixl_push"},
    "mooncake": {"kv_connector": "mooncake"},
    "moriio_registered": {"kv_connector": "moriio"},
    "p2p_nccl": {"kv_connector": "p2p_nccl", "version": "0.23.0", "randomizes_ids": False},
    "p2p_nccl_registered": {
        "kv_connector": "p2p_nccl",
        "version": "0.23.0",
        "randomizes_ids": False,
    },
    "lmcache": {"kv_connector": "lmcache"},
    "offloading": {"kv_connector": "offloading"},
    "example": {"kv_connector": "example"},
    "ec_mooncake": {"ec_connector": "mooncake"},
}
"""What a line's engines are started with, by the words behind `sh serve`."""

FACTS: dict[str, Callable[[RunningEngine], object]] = {
    "engine_id": lambda each: each.engine.engine_id,
    "kv_host": lambda _: "127.0.0.1",
    "side_channel_port": lambda each: each.side_port,
    "bootstrap_port": lambda each: each.bootstrap_port,
    "zmq_address": lambda each: each.zmq_address,
    "p2p_host": lambda _: "127.0.0.1",
    "p2p_port": lambda each: each.side_port,
    "ec_zmq_addrs": lambda each: "+".join(each.ec_zmq_addrs),
}
"""Settings under `transfer` that are other ones here than on the page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Documented:
    """One kvlb line of the page, and the proxy whose section it is in."""

    proxy: str
    setup: str
    line: str


def read_lines() -> list[Documented]:
    """Every line of a block that isn't the old way."""
    found = []
    for section in re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]:
        proxy = section.partition("\n")[0]
        for info, block in SHELL.findall(section):
            if info != "old":
                setup = info.removeprefix("serve ")
                joined = block.replace("\\\n", " ").splitlines()
                found += [Documented(proxy=proxy, setup=setup, line=line) for line in joined]
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """What docs/migrating.md has in it."""

    lines: tuple[Documented, ...]
    files: dict[str, str]
    """Configurations, by the names that lines give them."""

    def section(self, heading: str) -> str:
        return TEXT.split(f"\n## {heading}\n")[1].partition("\n## ")[0]

    def has_setup(self, documented: Documented) -> bool:
        """There are engines to try the line with."""
        return documented.setup in SETUPS


PAGE = Page(lines=tuple(read_lines()), files=dict(YAML.findall(TEXT)))


@pytest.fixture
def page() -> Page:
    """The page as it is in this tree."""
    return PAGE


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`documented` is every line of the page."""
    if "documented" in metafunc.fixturenames:
        ids = [f"{number}-{each.proxy}" for number, each in enumerate(PAGE.lines)]
        metafunc.parametrize("documented", PAGE.lines, ids=ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """kvlb as the page starts it, before simulated engines."""

    fleet: RunningFleet
    http: httpx.AsyncClient

    def legs_of(self, marker: str) -> list[str]:
        """Names of the engines that a request went to, in the order of their roles."""
        return sorted(
            each.name
            for each in self.fleet.engines
            for received in each.engine.received
            if received.path in {"/v1/completions", "/v1/chat/completions"}
            and marker.encode() in received.body
        )

    def roles_of(self, marker: str) -> list[str]:
        roles = {each.name: each.role for each in self.fleet.engines}
        return [roles[name] for name in self.legs_of(marker)]


@pytest.fixture
def on_stage(
    start_command: StartCommand, free_ports: Callable[[int], list[int]], tmp_path: Path
) -> Callable[[Documented], AbstractAsyncContextManager[Stage]]:
    """Start engines, and the line with their addresses in the place of the documented ones."""
    port, registration = free_ports(2)

    @asynccontextmanager
    async def run(documented: Documented) -> AsyncIterator[Stage]:
        line = documented.line
        files = {name: yaml.safe_load(text) for name, text in PAGE.files.items() if name in line}
        settings = msgspec.structs.replace(BASE, **SETUPS[documented.setup])
        spec = FleetSpec.parse("".join(f"1{each}" for each in roles_named(line, files)))
        async with running_fleet(spec, engine=settings) as fleet, asyncio.TaskGroup() as group:
            engines = list(fleet.engines)
            line = OPTION.sub(
                lambda found: f"--instance {put_into_option(found[1], engines)}", line
            )
            for name, values in files.items():
                put_into_file(values, engines, registration)
                (tmp_path / name).write_text(yaml.safe_dump(values))
            line = re.sub(r"--port \d+", "", line).replace("--host 0.0.0.0", "")
            beats = group.create_task(announce(fleet, registration))
            async with (
                start_command(
                    "-c",
                    f"exec env {line} --host 127.0.0.1 --port {port}",
                    program=("/bin/sh",),
                    cwd=tmp_path,
                    env={
                        "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
                        "OPENAI_API_KEY": KEY,
                    },
                ) as command,
                httpx.AsyncClient(
                    base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=30
                ) as http,
            ):
                await command.printed("listens on")
                await until_all_are_healthy(http, len(fleet.engines))
                yield Stage(fleet=fleet, http=http)
                beats.cancel()
                await command.stop()

    return run


def roles_named(line: str, files: dict[str, Any]) -> list[str]:
    """First letters of the instances' roles; two of each where engines register themselves."""
    options = [re.search(r"role=([a-z])", option) for option in OPTION.findall(line)]
    named = [found[1] if found else "m" for found in options]
    for values in files.values():
        named += [entry["role"][0] for entry in values.get("instances", [])]
    return named or ["p", "p", "d", "d"]


def put_into_option(option: str, engines: list[RunningEngine]) -> str:
    """One `--instance` value with the address of the next engine of its role."""
    found = re.search(r"role=([a-z]+)", option)
    engine = take(engines, found[1] if found else "mixed")
    _, *parts = option.split(",")
    for index, part in enumerate(parts):
        name, _, value = part.partition("=")
        fact = FACTS.get(name.removeprefix("transfer."))
        parts[index] = f"{name}={fact(engine) if fact else value}"
    return ",".join([engine.url, *parts])


def put_into_file(values: dict[str, Any], engines: list[RunningEngine], registration: int) -> None:
    for entry in values.get("instances", []):
        entry["url"] = take(engines, entry["role"]).url
    if "registration" in values:
        here = {"port": registration, "bind": "127.0.0.1", "networks": ["127.0.0.0/8"]}
        values["registration"] |= here


def take(engines: list[RunningEngine], role: str) -> RunningEngine:
    engine = next(each for each in engines if each.role == role)
    engines.remove(engine)
    return engine


async def announce(fleet: RunningFleet, port: int) -> None:
    """A beat of every engine, more often than its first worker sends one, until cancelled."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    while True:
        for each in fleet.engines:
            with context.socket(zmq.DEALER) as beat:
                beat.setsockopt(zmq.LINGER, 500)
                beat.connect(f"tcp://127.0.0.1:{port}")
                beat.send(msgspec.msgpack.encode(registration_of(each)))
        await asyncio.sleep(0.5)


def registration_of(engine: RunningEngine) -> dict[str, Any]:
    message: dict[str, Any] = {
        "type": "P" if engine.role == "prefill" else "D",
        "http_address": engine.url.removeprefix("http://"),
        "zmq_address": engine.zmq_address,
    }
    if engine.settings.kv_connector == "moriio":
        message |= {"dp_size": 1, "tp_size": 1, "transfer_mode": "WRITE"}
    return message


async def until_all_are_healthy(http: httpx.AsyncClient, count: int) -> None:
    async with asyncio.timeout(30):
        while True:
            status = (await http.get("/status")).json()
            ready = [each for each in status["instances"] if each["available"] and each["models"]]
            if len(ready) == count:
                return
            await asyncio.sleep(0.05)
