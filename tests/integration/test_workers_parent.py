"""The parent of workers: what it refuses, and what it does about workers that end."""

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
from prometheus_client import CollectorRegistry

from kvlb.errors import SettingsError, WorkersError
from kvlb.settings import KvlbSettings, Overrides, load_fleet
from kvlb.up import ONE_PROCESS, up
from kvlb.workers import processes
from kvlb.workers.processes import run_workers


class Parent:
    """`run_workers` of one port, as the command runs it."""

    def __init__(self, redis_url: str, *, config: Path | None = None, port: int = 0) -> None:
        self.overrides = Overrides(
            instances=["http://127.0.0.1:9"], redis_url=redis_url, port=port, workers=2
        )
        self.settings: KvlbSettings = load_fleet(None, self.overrides, {})
        self.config = config
        self.stop = asyncio.Event()
        self.listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        await run_workers(
            self.settings,
            overrides=self.overrides,
            config=self.config,
            registry=CollectorRegistry(),
            stop=self.stop,
            on_listening=self.listening.set_result,
        )


async def until(is_so: Callable[[], Any], deadline_s: float = 30) -> None:
    async with asyncio.timeout(deadline_s):
        while True:
            if await is_so():
                return
            await asyncio.sleep(0.05)


async def test_a_worker_that_ends_is_started_again(redis_server: Any) -> None:
    """Whoever ended it; its sibling answers meanwhile, and the port stays."""
    parent = Parent(redis_server.settings().url)
    with structlog.testing.capture_logs() as logs:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(parent.run())
            async with asyncio.timeout(30):
                url = await parent.listening
            victims = children()
            os.kill(victims[0], signal.SIGTERM)

            async def is_restarted() -> bool:
                async with httpx.AsyncClient(trust_env=False) as http:
                    text = (await http.get(f"{url}/metrics")).text
                return "kvlb_worker_restarts_total 1.0" in text and "kvlb_workers 2.0" in text

            await until(is_restarted)
            alive = children()
            parent.stop.set()
            async with asyncio.timeout(20):
                await task

    assert len(victims) == len(alive) == 2
    assert victims[0] not in alive
    assert [each["exit_code"] for each in logs if each["event"] == "worker_ended"] == [0]


async def test_a_stuck_worker_is_killed_and_started_again(
    redis_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would keep its connections waiting for ever."""
    parent = Parent(redis_server.settings().url)
    with structlog.testing.capture_logs() as logs:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(parent.run())
            async with asyncio.timeout(30):
                await parent.listening
            monkeypatch.setattr(processes, "STUCK_S", 3.0)
            os.kill(children()[0], signal.SIGSTOP)

            async def has_ended() -> bool:
                return any(each["event"] == "worker_ended" for each in logs)

            await until(has_ended)
            parent.stop.set()
            async with asyncio.timeout(20):
                await task

    assert [each["exit_code"] for each in logs if each["event"] == "worker_ended"] == [
        -signal.SIGKILL
    ]


def children() -> list[int]:
    """Workers that this process has started."""
    own = os.getpid()
    found = [int(each) for each in Path(f"/proc/{own}/task/{own}/children").read_text().split()]
    return [
        each
        for each in found
        if b"kvlb.workers.child" in Path(f"/proc/{each}/cmdline").read_bytes()
    ]


async def test_workers_that_refuse_their_settings_end_the_parent(
    redis_server: Any, tmp_path: Path
) -> None:
    """Their file went away between its reading and theirs: starting them again wouldn't help."""
    parent = Parent(redis_server.settings().url, config=tmp_path / "gone.yaml")

    with pytest.RaisesGroup(WorkersError, flatten_subgroups=True):
        await parent.run()


async def test_a_port_that_is_taken_is_refused(redis_server: Any) -> None:
    """A socket that shares its port would join whoever is there, unnoticed."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        parent = Parent(redis_server.settings().url, port=other.getsockname()[1])
        with pytest.raises(SettingsError, match=r"can't listen .* --port"):
            await parent.run()


def test_up_is_one_process(tmp_path: Path) -> None:
    """It says what to run instead."""
    config = tmp_path / "kvlb.yaml"
    config.write_text("workers: 2\ninstances: [{url: 'http://127.0.0.1:9'}]\n")

    with pytest.raises(SettingsError) as refused:
        up(Overrides(), config=config, simulate=None)
    assert str(refused.value) == ONE_PROCESS
