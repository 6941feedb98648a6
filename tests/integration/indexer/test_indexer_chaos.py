"""Processes that die, halves of an engine that go missing, instances that come and go."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from indexer.config import InstanceSource
from indexer.core.hashing import Namespace
from indexer.core.index import BlockIndex, Prompt
from indexer.core.types import InstanceId, RankId, Trust
from indexer.status import IndexerCollector

BLOCK_SIZE = 4
LIFE_TOKENS = 1_000_000
E0 = "http://e0:8000"
R0 = RankId(InstanceId(E0), 0)

# One engine's publisher: a block every two milliseconds, and replay. Each life has its own prompt.
PUBLISHER = """
import sys, time
import msgspec, zmq

port, replay_port, life = (int(each) for each in sys.argv[1:])
context = zmq.Context()
live, router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
live.bind(f"tcp://127.0.0.1:{port}")
router.bind(f"tcp://127.0.0.1:{replay_port}")
ring = []
while True:
    seq = len(ring)
    tokens = [life * 1_000_000 + seq * 4 + each for each in range(4)]
    event = {
        "type": "BlockStored", "block_hashes": [life << 32 | seq + 1],
        "parent_block_hash": life << 32 | seq if seq else None,
        "token_ids": tokens, "block_size": 4,
    }
    ring.append(msgspec.msgpack.encode([time.time(), [event], 0]))
    live.send_multipart([b"", seq.to_bytes(8, "big"), ring[-1]])
    while router.poll(0):
        identity, _, first = router.recv_multipart()
        for number in range(int.from_bytes(first, "big"), len(ring)):
            router.send_multipart([identity, b"", b"", number.to_bytes(8, "big"), ring[number]])
        router.send_multipart([identity, b"", b"", b"\\xff" * 8, b""])
    time.sleep(0.002)
"""


def stored(*hashes: int, parent: int | None = None, first: int = 0) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": list(range(first * BLOCK_SIZE, (first + len(hashes)) * BLOCK_SIZE)),
        "block_size": BLOCK_SIZE,
    }


async def held(index: BlockIndex, life: int = 0, rank: RankId = R0) -> int:
    """Blocks that `rank` is credited with of the prompt of one life."""
    tokens = range(life * LIFE_TOKENS, life * LIFE_TOKENS + 10_000 * BLOCK_SIZE)
    match = (await index.match(Prompt(Namespace(model="tiny"), tokens))).get(rank)
    return match.tokens // BLOCK_SIZE if match else 0


@asynccontextmanager
async def process(publisher: Any, life: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """A publisher in a process of its own, killed at the end."""
    ports = (str(publisher.port), str(publisher.replay_port), str(life))
    running = await asyncio.create_subprocess_exec(sys.executable, "-c", PUBLISHER, *ports)
    try:
        yield running
    finally:
        running.kill()
        await running.wait()


async def test_killed_process_leaves_nothing_and_the_next_is_followed(
    publishing: Any, indexing: Any
) -> None:
    """Kill -9 under traffic, four times: only the living process counts, and all of it does."""
    async with publishing() as ports:
        pass  # only to learn ports that are free
    source = InstanceSource(url=E0, events=ports.events, replay=ports.replay, model="tiny", ranks=1)
    async with indexing(source) as (service, index):
        epoch = 0
        for life in range(1, 5):
            async with process(ports, life):
                async with asyncio.timeout(20):
                    # Far enough, some lives, to hide behind a number that only rises.
                    await service.until(
                        R0,
                        lambda now, epoch=epoch, life=life: (
                            now.epoch > epoch
                            and now.trust is Trust.EXACT
                            and (now.last_seq or 0) > 20 * life
                        ),
                    )
                before = service.rank_status(R0)
                epoch = before.epoch
                blocks = await held(index, life)
                assert before.last_seq < blocks
                assert await held(index, life - 1) == 0
                # It goes on publishing, and batches count a moment before their number does: as many
                # as one update held, since lookups have a connection of their own.
                async with asyncio.timeout(20):
                    await service.until(R0, lambda now, blocks=blocks: now.last_seq + 1 >= blocks)


async def test_streams_outlive_the_http_server(
    engine_http: Any, publishing: Any, indexing: Any, eventually: Any
) -> None:
    """An API server that restarts takes no cache with it."""
    async with publishing() as publisher, engine_http() as engine:
        port = int(engine.url.rpartition(":")[2])
        entry = {"endpoint": publisher.events.replace("127.0.0.1", "*")}
        engine.sources = {"0": {**entry, "replay_endpoint": publisher.replay}}
        rank = RankId(InstanceId(engine.url), 0)
        async with indexing(InstanceSource(url=engine.url)) as (service, index):
            await publisher.subscribed()
            publisher.publish(stored(1))
            before = await service.caught_up(rank, 0)
            engine.stop()
            await eventually(lambda: service.instances()[0].state == "unreachable")
            publisher.publish(stored(2, parent=1, first=1))
            status = await service.caught_up(rank, 1)
            assert (status.epoch, status.trust) == (before.epoch, Trust.EXACT)

            async with engine_http(port) as again:
                again.sources = engine.sources
                await eventually(lambda: service.instances()[0].state == "following")
                publisher.publish(stored(3, parent=2, first=2))
                status = await service.caught_up(rank, 2)

                assert (status.epoch, await held(index, rank=rank)) == (before.epoch, 3)


async def test_http_server_outlives_the_streams(
    engine_http: Any, publishing: Any, indexing: Any, eventually: Any
) -> None:
    """An engine core that comes back later than its API server is followed as a new life."""
    async with publishing() as publisher, engine_http() as engine:
        entry = {"endpoint": publisher.events.replace("127.0.0.1", "*")}
        engine.sources = {"0": {**entry, "replay_endpoint": publisher.replay}}
        rank = RankId(InstanceId(engine.url), 0)
        async with indexing(InstanceSource(url=engine.url)) as (service, index):
            await publisher.subscribed()
            publisher.publish(stored(1, 2, 3))
            before = await service.caught_up(rank, 0)
            publisher.stop()
            await eventually(lambda: not service.rank_status(rank).is_connected)
            asked = len(engine.keys_seen)
            await eventually(lambda: len(engine.keys_seen) > asked + 2)
            assert service.instances()[0].state == "following"
            assert service.rank_status(rank).counts.failures == 0

            await publisher.restart()
            publisher.publish(stored(1))
            status = await service.until(
                rank, lambda now: now.epoch > before.epoch and now.last_seq == 0
            )

            assert (status.trust, await held(index, rank=rank)) == (Trust.EXACT, 1)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_instances_that_come_and_go_leave_nothing(
    publishing: Any, indexing: Any, eventually: Callable[[Callable[[], object]], Awaitable[None]]
) -> None:
    """Fifty times: no socket, no task, no entry, no series is left."""
    async with publishing() as publisher, indexing() as (service, _):
        registry = CollectorRegistry()
        registry.register(IndexerCollector(service))
        publisher.publish(stored(1, 2))
        await eventually(lambda: service.is_ready)
        files, tasks = open_files(), len(asyncio.all_tasks())
        for number in range(50):
            url = f"http://e{number}:8000"
            source = InstanceSource(
                url=url,
                alias=f"gpu-{number}",
                events=publisher.events,
                replay=publisher.replay,
                model="tiny",
                ranks=1,
            )
            service.set_sources([source])
            await service.caught_up(RankId(source.instance, 0), 0)
            service.set_sources([])
            await eventually(lambda: not service.instances())
        await service.measure()

        assert service.index_size.entries == 0
        assert "gpu-" not in generate_latest(registry).decode()
        await eventually(lambda: len(asyncio.all_tasks()) <= tasks)
        # ZMQ closes sockets in a thread of its own, which it opens with the first of them.
        await eventually(lambda: open_files() <= files + 5)
