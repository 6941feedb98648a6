"""A changed file or SIGHUP: what is taken over, what is refused, what has to wait."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from balancer.core.settings.dataplane import DataPlaneSettings
from kvlb.reload import Reloader
from kvlb.settings import KvlbSettings, Overrides, load_fleet

ONE = "instances: [{url: 'http://a:1'}]"
TWO = "instances: [{url: 'http://a:1'}, {url: 'http://b:1'}]"


class Watched:
    """A file, the process that runs on it, and what it was told."""

    def __init__(self, path: Path, ignored: frozenset[str]) -> None:
        self.path = path
        self.applied: list[KvlbSettings] = []
        self.log: list[Any] = []
        self.is_broken = False
        self._ignored = ignored

    def read(self) -> KvlbSettings:
        return load_fleet(self.path, Overrides(), {})

    def apply(self, settings: KvlbSettings) -> None:
        if self.is_broken:
            raise RuntimeError("a bug")
        self.applied.append(settings)

    def write(self, text: str) -> None:
        """As most editors do: another file in its place."""
        beside = self.path.with_suffix(".new")
        beside.write_text(text)
        beside.replace(self.path)

    async def logged(self, event: str, times: int = 1) -> dict[str, Any]:
        """Wait for the line, the last one of `times`."""
        async with asyncio.timeout(20):
            while True:
                found: list[dict[str, Any]] = [x for x in self.log if x["event"] == event]
                if len(found) >= times:
                    return found[times - 1]
                await asyncio.sleep(0.005)

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Watched"]:
        reloader = Reloader(
            self.path,
            running=self.read(),
            read=self.read,
            apply=self.apply,
            ignored=self._ignored,
            poll_s=0.01,
        )
        with capture_logs() as self.log:
            async with asyncio.TaskGroup() as group:
                task = group.create_task(reloader.run())
                await asyncio.sleep(0)  # until it has begun
                yield self
                task.cancel()


Watch = Callable[..., AbstractAsyncContextManager[Watched]]


@pytest.fixture
def watch(tmp_path: Path) -> Watch:
    """Watches a file that begins with the text given."""

    def start(text: str, ignored: frozenset[str] = frozenset()) -> Any:
        path = tmp_path / "kvlb.yaml"
        path.write_text(text)
        return Watched(path, ignored).running()

    return start


def hang_up() -> None:
    os.kill(os.getpid(), signal.SIGHUP)


async def test_changed_file_is_taken_over(watch: Watch) -> None:
    """Nobody has to send a signal."""
    async with watch(ONE) as watched:
        watched.write(TWO)
        line = await watched.logged("reloaded")

    assert [each.url for each in watched.applied[0].instances] == ["http://a:1", "http://b:1"]
    assert line["changed"] == ["instances"]
    assert line["reason"] == "file_changed"


async def test_file_written_in_place_is_taken_over_once_it_is_whole(watch: Watch) -> None:
    """Half a file is another file, too: it is read when it has stopped changing."""
    async with watch(ONE) as watched:
        with watched.path.open("w") as file:
            file.write(TWO)
        await watched.logged("reloaded")

    assert len(watched.applied[-1].instances) == 2


async def test_mounted_config_map_is_taken_over(watch: Watch, tmp_path: Path) -> None:
    """Kubernetes swaps a link to a folder; YAML or JSON, the file's own link stays the same."""
    folder = tmp_path / "mount"
    for version, text in (("v1", ONE), ("v2", '{"instances": [{"url": "http://c:1"}]}')):
        (folder / version).mkdir(parents=True)
        (folder / version / "kvlb.yaml").write_text(text)
    (folder / "..data").symlink_to("v1")
    async with watch(ONE) as watched:
        watched.path.unlink()
        watched.path.symlink_to(folder / "..data" / "kvlb.yaml")
        await watched.logged("reloaded")
        (folder / "..data_tmp").symlink_to("v2")
        (folder / "..data_tmp").replace(folder / "..data")
        await watched.logged("reloaded", times=2)

    assert [each.url for each in watched.applied[-1].instances] == ["http://c:1"]


async def test_hangup_reads_the_file_again(watch: Watch) -> None:
    """Also one that looks the same: what it names may be another."""
    async with watch(ONE) as watched:
        hang_up()
        line = await watched.logged("reloaded")

    assert line["reason"] == "sighup"
    assert line["changed"] == []


async def test_untouched_file_is_left_alone(watch: Watch) -> None:
    """A reload per change."""
    async with watch(ONE) as watched:
        watched.write(TWO)
        await watched.logged("reloaded")
        hang_up()
        await watched.logged("reloaded", times=2)

    assert [each["reason"] for each in watched.log] == ["file_changed", "sighup"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param("{routing: {polcy: kvlb}}", "`routing.polcy`", id="unknown-key"),
        pytest.param(
            "instances: [{url: 'http://a:1', ranks: 0}]", "instances[0].ranks", id="value"
        ),
        pytest.param("instances: [", "is not YAML", id="not-yaml"),
        pytest.param("", "no engine", id="empty"),
        pytest.param(
            "instances: [{url: 'http://a:1'}, {url: 'http://localhost:8080'}]",
            "instances[1].url`: http://localhost:8080 is where this balancer listens itself",
            id="own-address",
        ),
    ],
)
async def test_broken_file_is_refused_and_named(watch: Watch, text: str, says: str) -> None:
    """The old settings stay, whole, and the next good file is taken."""
    async with watch(ONE) as watched:
        watched.write(text)
        refused = await watched.logged("reload_refused")
        assert watched.applied == []
        watched.write(TWO)
        await watched.logged("reloaded")

    assert says in refused["error"]
    assert refused["log_level"] == "error"
    assert len(watched.applied) == 1


async def test_removed_file_changes_nothing(watch: Watch) -> None:
    """Some editors remove it before they write the new one."""
    async with watch(ONE) as watched:
        watched.path.unlink()
        hang_up()
        refused = await watched.logged("reload_refused")
        watched.write(TWO)
        await watched.logged("reloaded")

    assert "cannot be read" in refused["error"]
    assert len(watched.applied) == 1


async def test_keys_that_need_a_restart_are_named_each_time(watch: Watch) -> None:
    """They keep their values; the others change."""
    async with watch(ONE) as watched:
        text = "{port: 1, dataplane: {retries: 7}, routing: {policy: session}, " + ONE + "}"
        watched.write(text)
        first = await watched.logged("restart_needed")
        hang_up()
        second = await watched.logged("restart_needed", times=2)

    assert first["keys"] == second["keys"] == ["port", "dataplane.retries"]
    assert watched.applied[0].port == 8080
    assert watched.applied[0].dataplane.retries == DataPlaneSettings().retries
    assert watched.applied[0].routing.policy == "session"


async def test_size_of_books_needs_a_restart(watch: Watch) -> None:
    """Alone among the keys of routing."""
    async with watch(ONE) as watched:
        watched.write("{routing: {max_predicted_blocks: 5, policy: session}, " + ONE + "}")
        line = await watched.logged("restart_needed")

    assert line["keys"] == ["routing.max_predicted_blocks"]
    assert watched.applied[0].routing.policy == "session"


async def test_sections_of_other_processes_are_not_mentioned(watch: Watch) -> None:
    """One file serves several processes."""
    async with watch(ONE, ignored=frozenset({"indexer"})) as watched:
        watched.write("{indexer: {replay_timeout_s: 9}, " + ONE + "}")
        await watched.logged("reloaded")

    assert [each["event"] for each in watched.log] == ["reloaded"]


async def test_secrets_do_not_show_in_the_log(watch: Watch) -> None:
    """Keys are named, values never."""
    async with watch(ONE) as watched:
        watched.write("{engine_api_key: s3cret, admin: {api_key: s3cret}, " + ONE + "}")
        line = await watched.logged("reloaded")

    assert line["changed"] == ["engine_api_key", "admin.api_key"]
    assert "s3cret" not in str(watched.log)


async def test_bug_while_taking_over_does_not_end_the_watch(watch: Watch) -> None:
    """The process goes on, and so does the watching."""
    async with watch(ONE) as watched:
        watched.is_broken = True
        watched.write(TWO)
        await watched.logged("reload_failed")
        watched.is_broken = False
        hang_up()
        await watched.logged("reloaded")

    assert len(watched.applied) == 1
