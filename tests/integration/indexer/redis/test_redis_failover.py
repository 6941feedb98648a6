"""A replica that lagged is promoted: what Redis then has is older than what was written."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pytest

from indexer.core.types import InstanceId, RankId
from indexer.redis_index.connection import RedisConnection
from indexer.redis_index.reader import RedisIndexReader
from indexer.redis_index.redis_index import RedisIndex
from indexer.service import IndexerService

R0 = RankId(InstanceId("http://e0:8000"), 0)
Store = Callable[[int], dict[str, Any]]
Remove = Callable[..., dict[str, Any]]
Held = Callable[[Any], Awaitable[int | None]]
Lagging = Callable[[], AbstractAsyncContextManager[tuple[Any, IndexerService]]]


class Gate:
    """One TCP address in front of whichever server is primary now."""

    def __init__(self) -> None:
        self.target = ""
        """Path of its unix socket."""
        self._open: set[asyncio.StreamWriter] = set()

    async def pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_unix_connection(self.target)
        except OSError:
            writer.close()
            return
        self._open |= {writer, back}
        async with asyncio.TaskGroup() as group:
            group.create_task(_pump(reader, back))
            group.create_task(_pump(there, writer))
        self._open -= {writer, back}

    def point_to(self, target: str) -> None:
        """From now on; connections to the old one break."""
        self.target = target
        for writer in self._open:
            writer.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while part := await reader.read(65_536):
            writer.write(part)
            await writer.drain()
    writer.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A primary, a replica of it, and one address that can point to either."""

    primary: Any
    replica: Any
    gate: Gate
    index: RedisIndex
    """The indexer's, through the gate."""
    reader: RedisIndexReader
    """A balancer's, through the gate."""
    lagging: RedisIndexReader
    """Asks the replica itself."""
    prefix: str

    async def cut_replication(self) -> None:
        """Once the replica has what the primary has now. It gets nothing more, and is promoted."""
        async with asyncio.timeout(20):
            theirs = offset(self.primary, "master_repl_offset")
            while True:
                is_up = "master_link_status:up" in self.replica.command("INFO", "replication")
                if is_up and offset(self.replica, "slave_repl_offset") >= theirs:
                    break
                await asyncio.sleep(0.02)
        self.replica.command("REPLICAOF", "NO", "ONE")

    def fail_over(self) -> None:
        self.gate.point_to(str(self.replica.socket))

    def keys(self) -> list[str]:
        found: str = self.replica.command("--scan", "--pattern", f"{self.prefix}:*")
        return found.split()


def offset(server: Any, name: str) -> int:
    lines = server.command("INFO", "replication").split()
    return next(int(line.split(":")[1]) for line in lines if line.startswith(f"{name}:"))


@pytest.fixture
async def pair(own_redis: Callable[..., Any], reserved: Any) -> AsyncIterator[Pair]:
    """Replicating."""
    primary, replica, gate = own_redis(), own_redis(), Gate()
    port = str(reserved.port())
    primary.start("--port", port, "--repl-diskless-sync-delay", "0")
    replica.start("--replicaof", "127.0.0.1", port)
    gate.target = str(primary.socket)
    async with await asyncio.start_server(gate.pass_on, "127.0.0.1", 0) as server:
        url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        settings = primary.settings(url=url, heartbeat_s=0.2)
        connections = [
            RedisConnection(each)
            for each in (settings, settings, replica.settings(prefix=settings.prefix))
        ]
        yield Pair(
            primary=primary,
            replica=replica,
            gate=gate,
            index=RedisIndex(connections[0]),
            reader=RedisIndexReader(connections[1]),
            lagging=RedisIndexReader(connections[2]),
            prefix=settings.prefix,
        )
        for each in connections:
            await each.aclose()
        gate.point_to("")


@pytest.fixture
def block(stored: Callable[..., dict[str, Any]]) -> Store:
    """Block `number` of the prompt, counted from one."""
    return lambda number: stored(number, parent=number - 1 or None, first=number - 1)


@pytest.fixture
def lagging(publishing: Any, indexing: Any, source: Any, pair: Pair, block: Store) -> Lagging:
    """Run an engine and its indexer; after five blocks the replica hears of nothing more."""

    @asynccontextmanager
    async def run() -> AsyncIterator[tuple[Any, IndexerService]]:
        async with (
            publishing() as engine,
            indexing(source(engine), index=pair.index) as (service, _),
        ):
            await engine.subscribed()
            for number in range(1, 6):
                engine.publish(block(number))
            await service.caught_up(R0, 4)
            await pair.cut_replication()
            yield engine, service

    return run


@pytest.fixture
def becomes(held: Held) -> Callable[[RedisIndexReader, int], Awaitable[None]]:
    """Wait, with a deadline. No lookup fails, and none says anything but old, new or nothing."""

    async def wait(reader: RedisIndexReader, blocks: int) -> None:
        async with asyncio.timeout(20):
            seen = None
            while seen != blocks:
                seen = await held(reader)
                assert seen in {None, 2, 5}
                await asyncio.sleep(0.01)

    return wait


@pytest.mark.parametrize("is_idle", [False, True], ids=["with-events", "idle"])
async def test_removals_that_a_promoted_replica_missed_are_made_good(
    lagging: Lagging,
    pair: Pair,
    block: Store,
    removed: Remove,
    held: Held,
    becomes: Any,
    is_idle: bool,
) -> None:
    """By the next heartbeat, or the next batch; one removal takes one block afterwards."""
    async with lagging() as (engine, service):
        engine.publish(removed(5, 4))
        await service.caught_up(R0, engine.publish(removed(3)))
        assert (await held(pair.reader), await held(pair.lagging)) == (2, 5)
        pair.fail_over()
        if not is_idle:
            engine.publish(block(3))
            engine.publish(removed(3))
        await becomes(pair.reader, 2)
        # Readers see what is written before the answer to it is here.
        status = await service.until(R0, lambda now: now.problem is None)
        await service.caught_up(R0, engine.publish(removed(2)))

        assert await held(pair.reader) == 1
    assert status.counts.index_faults["lost"] == 1
    assert (status.counts.failures, status.problem) == (0, None)


async def test_life_that_a_promoted_replica_missed_begins_there(
    lagging: Lagging, pair: Pair, block: Store, held: Held, becomes: Any
) -> None:
    """The engine was restarted while the replica lagged: its old blocks stop counting again."""
    async with lagging() as (engine, service):
        await engine.restart()
        await engine.subscribed()
        engine.publish(block(1), block(2))
        status = await service.until(R0, lambda now: now.counts.batches == 6)
        assert (await held(pair.reader), await held(pair.lagging)) == (2, 5)
        pair.fail_over()
        await becomes(pair.reader, 2)
        keys = pair.keys()
        lives = [pair.replica.command("GET", key) for key in keys if key.endswith(":life")]

    assert lives == [str(status.epoch)]
    assert "-1" not in [pair.replica.command("TTL", key) for key in keys]
