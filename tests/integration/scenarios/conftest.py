"""`kvlb up` over simulated engines, with a file that changes while it runs."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import yaml

from kvlb.running import ConfigFile, RunningKvlb, run_kvlb
from kvlb.settings import Overrides, load_fleet
from kvlb.simulated import parse_fleet, simulated_fleet
from simulator.core.settings import EngineSettings

PATIENT = {
    "probes": {"interval_s": 0.05, "timeout_s": 5.0},
    "tokens": {"deadline_s": 10.0},
    "routing": {"lookup_timeout_s": 5.0},
    "indexer": {"discovery_interval_s": 0.1, "discovery_retry_s": 0.05},
}
"""Soon noticed, but with deadlines that a loaded machine keeps."""


@dataclass
class Kvlb:
    """One running process, its file, and ways to ask it."""

    url: str
    file: Path
    http: httpx.AsyncClient
    settings: dict[str, Any] = field(default_factory=dict)

    async def complete(self, prompt: object, **fields: Any) -> httpx.Response:
        body = {"model": "sim", "prompt": prompt, "max_tokens": 1, **fields}
        return await self.http.post(f"{self.url}/v1/completions", json=body)

    async def get(self, path: str) -> httpx.Response:
        return await self.http.get(self.url + path)

    async def status(self) -> dict[str, Any]:
        """Of each instance by its alias."""
        shown = (await self.get("/status")).json()
        return {each["alias"]: each for each in shown["instances"]}

    async def series(self, *names: str) -> dict[str, float]:
        """Samples of /metrics, of these names or all of them."""
        lines = (await self.get("/metrics")).text.splitlines()
        samples = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        wanted = {key: value for key, value in samples.items() if _name(key) in names or not names}
        return {key: float(value) for key, value in wanted.items()}

    async def total(self, name: str) -> float:
        """A counter, over all its labels."""
        return sum((await self.series(name)).values())

    async def overlaps(self, prompt: Sequence[int], model: str = "sim") -> dict[str, int]:
        """Cached tokens by instance, as events told."""
        body = {"model": model, "prompt": list(prompt), "max_tokens": 1}
        asked = {"path": "/v1/completions", "body": body}
        plan = (await self.http.post(f"{self.url}/explain", json=asked)).json()
        considered = plan["decode"]["considered"]
        return {each["instance"]: each["overlap_tokens"] for each in considered}

    async def reload(self, instances: Sequence[Mapping[str, Any]]) -> None:
        """Write another fleet and have it read now."""
        write(self.file, {**self.settings, "instances": list(instances)})
        os.kill(os.getpid(), signal.SIGHUP)
        listed = {each["alias"]: each.get("enabled", True) for each in instances}
        await self.until(lambda: self._lists(listed))

    async def _lists(self, listed: Mapping[str, bool]) -> bool:
        status = await self.status()
        return {name: each["enabled"] for name, each in status.items()} == listed

    async def all_known(self, names: Sequence[str]) -> None:
        """Wait until these can be asked and their events are complete."""

        async def is_so() -> bool:
            status = await self.status()
            return all(_is_known(status.get(name)) for name in names)

        await self.until(is_so)

    async def until(self, is_so: Callable[[], Awaitable[bool]]) -> None:
        async with asyncio.timeout(20):
            while True:
                if await is_so():
                    return
                await asyncio.sleep(0.02)


def _name(series: str) -> str:
    return series.partition("{")[0]


def _is_known(instance: Mapping[str, Any] | None) -> bool:
    if instance is None or not instance["available"]:
        return False
    return all(
        rank["index"] is not None and rank["index"]["trust"] == "exact"
        for rank in instance["ranks"]
    )


def write(file: Path, settings: Mapping[str, Any]) -> None:
    beside = file.with_suffix(".new")
    beside.write_text(yaml.safe_dump(dict(settings)))
    beside.replace(file)


@pytest.fixture
def kvlb_up(tmp_path: Path) -> Callable[..., AbstractAsyncContextManager[Kvlb]]:
    """Starts `kvlb up` on a file with these instances and further sections."""

    @asynccontextmanager
    async def start(instances: Sequence[Mapping[str, Any]], **sections: Any) -> AsyncIterator[Kvlb]:
        file = tmp_path / "kvlb.yaml"
        settings: dict[str, Any] = {"port": 0, "drain_s": 2, **PATIENT}
        settings |= msgspec.to_builtins(sections)
        write(file, {**settings, "instances": list(instances)})
        stop = asyncio.Event()
        listening: asyncio.Future[RunningKvlb] = asyncio.get_running_loop().create_future()
        async with (
            asyncio.TaskGroup() as group,
            httpx.AsyncClient(trust_env=False, timeout=30) as http,
        ):
            running = run_kvlb(
                load_fleet(file, Overrides(), {}),
                stop=stop,
                on_listening=listening.set_result,
                file=ConfigFile.of(file, Overrides()),
            )
            group.create_task(running)
            try:
                yield Kvlb((await listening).url, file, http, settings)
            finally:
                stop.set()

    return start


@pytest.fixture
def engines_up() -> Callable[..., AbstractAsyncContextManager[Any]]:
    """Starts a simulated fleet: quick, unless told otherwise."""

    def start(fleet: str, **settings: Any) -> AbstractAsyncContextManager[Any]:
        usual = {"prefill_tokens_per_s": 1e6, "inter_token_ms": 1.0}
        return simulated_fleet(parse_fleet(fleet), EngineSettings(**(usual | settings)))

    return start


@pytest.fixture
def describe() -> Callable[..., dict[str, Any]]:
    """How an engine stands in the file."""

    def entry(engine: Any, **fields: Any) -> dict[str, Any]:
        return {"url": engine.url, "alias": engine.name, **fields}

    return entry
