"""A replica that lagged is promoted: what Redis then has is older than what was written."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from indexer.config import InstanceSource
from indexer.core.hashing import Namespace
from indexer.core.index import Prompt
from indexer.core.types import InstanceId, RankId
from indexer.redis_index.connection import RedisConnection
from indexer.redis_index.reader import RedisIndexReader
from indexer.redis_index.redis_index import RedisIndex

BLOCK_SIZE = 4
R0 = RankId(InstanceId("http://e0:8000"), 0)
PROMPT = Prompt(Namespace(model="tiny"), range(100 * BLOCK_SIZE))


def stored(number: int) -> dict[str, Any]:
    """Block `number` of the prompt, counted from one."""
    return {
        "type": "BlockStored",
        "block_hashes": [number],
        "parent_block_hash": number - 1 or None,
        "token_ids": list(range((number - 1) * BLOCK_SIZE, number * BLOCK_SIZE)),
        "block_size": BLOCK_SIZE,
    }


def removed(*numbers: int) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(numbers), "medium": "GPU"}


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


@pytest.fixture
def gate() -> Callable[[], Any]:
    """Make a gate that passes on while its block runs; with it its port."""

    @asynccontextmanager
    async def run() -> AsyncIterator[tuple[Gate, int]]:
        gate = Gate()
        async with await asyncio.start_server(gate.pass_on, "127.0.0.1", 0) as server:
            try:
                yield gate, server.sockets[0].getsockname()[1]
            finally:
                gate.point_to("")

    return run


@pytest.fixture
def pair(own_redis: Callable[..., Any]) -> tuple[Any, Any]:
    """A primary, and a replica that has all that it has."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    primary, replica = own_redis(), own_redis()
    primary.start("--port", str(port), "--repl-diskless-sync-delay", "0")
    replica.start("--replicaof", "127.0.0.1", str(port))
    return primary, replica


async def follows(replica: Any, primary: Any) -> None:
    """Wait until the replica has what the primary has now."""
    async with asyncio.timeout(10):
        while True:
            theirs = offset(primary, "master_repl_offset")
            if "master_link_status:up" in replica.command("INFO", "replication"):
                if offset(replica, "slave_repl_offset") >= theirs:
                    return
            await asyncio.sleep(0.02)


def offset(server: Any, name: str) -> int:
    lines = server.command("INFO", "replication").split()
    return next(int(line.split(":")[1]) for line in lines if line.startswith(f"{name}:"))


@pytest.mark.parametrize("is_idle", [False, True], ids=["with-events", "idle"])
@pytest.mark.parametrize("has_new_life", [False, True], ids=["same-epoch", "new-epoch"])
async def test_promoted_replica_that_lagged_is_put_right(  # noqa: PLR0913 - fixtures
    publishing: Any,
    indexing: Any,
    gate: Any,
    pair: tuple[Any, Any],
    is_idle: bool,
    has_new_life: bool,
) -> None:
    """By the next heartbeat, with or without events; an unlucky reader gets old facts till then.

    The replica has missed a removal and more blocks, and the beginning of another life.
    """
    primary, replica = pair
    async with gate() as (door, port), publishing() as engine:
        door.target = str(primary.socket)
        url = f"redis://127.0.0.1:{port}"
        settings = primary.settings(url=url, heartbeat_s=0.2)
        index, reading = RedisIndex(RedisConnection(settings)), RedisConnection(settings)
        reader = RedisIndexReader(reading)
        beside = RedisConnection(replica.settings(prefix=settings.prefix))
        lagging = RedisIndexReader(beside)
        source = InstanceSource(
            url=R0.instance, events=engine.events, replay=engine.replay, model="tiny", ranks=1
        )
        async with indexing(source, index=index) as (service, _):
            await engine.subscribed()
            for number in range(1, 6):
                engine.publish(stored(number))
            await service.caught_up(R0, 4)
            await follows(replica, primary)
            replica.command("REPLICAOF", "NO", "ONE")
            if has_new_life:
                await engine.restart()
                await engine.subscribed()
                last = engine.publish(stored(1), stored(2))
                await service.until(R0, lambda now: now.counts.batches == 6)
            else:
                engine.publish(removed(5, 4))
                last = engine.publish(removed(3))
                await service.caught_up(R0, last)
            assert await tokens(reader) == 2 * BLOCK_SIZE
            assert await tokens(lagging) == 5 * BLOCK_SIZE
            door.point_to(str(replica.socket))
            if not is_idle:
                last = engine.publish(stored(3))
                engine.publish(removed(3))
            await becomes(reader, 2)
            rewritten = service.rank_status(R0)
            last = engine.publish(removed(2))
            await service.caught_up(R0, last)
            assert await tokens(reader) == BLOCK_SIZE
            keys = replica.command("--scan", "--pattern", f"{settings.prefix}:*").split()
            lives = [replica.command("GET", key) for key in keys if key.endswith(":life")]
            ttls = [int(replica.command("TTL", key)) for key in keys]
        await index.aclose()
        await reading.aclose()
        await beside.aclose()

    assert rewritten.counts.index_faults["lost"] == 1
    assert rewritten.counts.failures == 0
    assert rewritten.problem is None
    assert lives == [str(rewritten.epoch)]
    assert -1 not in ttls


async def tokens(reader: RedisIndexReader) -> int | None:
    match = (await reader.match(PROMPT)).get(R0)
    return match.tokens if match else None


async def becomes(reader: RedisIndexReader, blocks: int) -> None:
    """Wait, with a deadline. No lookup fails, and none says anything but old, new or nothing."""
    async with asyncio.timeout(10):
        seen = None
        while seen != blocks * BLOCK_SIZE:
            seen = await tokens(reader)
            assert seen in {None, 2 * BLOCK_SIZE, 5 * BLOCK_SIZE}
            await asyncio.sleep(0.01)
