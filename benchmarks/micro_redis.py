"""Costs of the index in Redis, beside the index in memory in the same run.

Run `python -m benchmarks.micro_redis`. It starts a `redis-server` of its own on a unix socket. A
ratio is to the index in memory: that is what to compare between machines.
"""

import asyncio
import platform
import random
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from benchmarks.index_workload import BLOCK_SIZE, MODEL, VOCABULARY, encoded_stream
from indexer.core.events import decode_batch
from indexer.core.hashing import Namespace
from indexer.core.index import BlockIndex, BlocksHeld, GroupKind, GroupSpec, Prompt, RankUpdate
from indexer.core.rank_blocks import RankBlocks
from indexer.core.types import InstanceId, RankId, Tier, Trust
from indexer.memory_index import MemoryIndex
from indexer.redis_index.connection import RedisConnection
from indexer.redis_index.redis_index import RedisIndex
from indexer.redis_index.settings import RedisSettings

RANKS = 64
LOOKUPS = 400
CLIENTS = 8
ENGINE = InstanceId("http://engine:8000")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table."""

    what: str
    unit: str
    redis: float
    memory: float

    def render(self) -> str:
        ratio = self.redis / self.memory
        return (
            f"| {self.what} | {self.redis:,.2f} | {self.memory:,.2f} | {self.unit} | {ratio:.2f} |"
        )


@contextmanager
def redis_server() -> Iterator[str]:
    """Address of a server that lives while the block runs."""
    with tempfile.TemporaryDirectory(prefix="kvlb-redis-") as folder:
        address = Path(folder) / "redis.sock"
        command = ["redis-server", "--port", "0", "--unixsocket", str(address), "--save", ""]
        server = subprocess.Popen([*command, "--dir", folder], stdout=subprocess.DEVNULL)
        deadline_s = time.monotonic() + 10
        while not address.exists() and time.monotonic() < deadline_s:
            time.sleep(0.01)
        try:
            yield f"unix://{address}"
        finally:
            server.kill()
            server.wait()


async def seconds(work: Callable[[], Awaitable[object]]) -> float:
    """How long it took."""
    start = perf_counter()
    await work()
    return perf_counter() - start


def percentile(times: Sequence[float], share: float) -> float:
    """The value below which this share of them lies."""
    return sorted(times)[min(len(times) - 1, int(share * len(times)))]


def update(rank: int, *changes: GroupSpec | BlocksHeld, seq: int = 0) -> RankUpdate:
    """Of one rank of the engine."""
    return RankUpdate(rank=RankId(ENGINE, rank), model=MODEL, epoch=1, seq=seq, changes=changes)


async def fill(index: BlockIndex, prompt: Prompt, tiers: Sequence[Tier]) -> None:
    """Ranks that hold between none and all of the prompt."""
    draw = random.Random(2)  # noqa: S311 - a workload, not a secret
    keys = prompt.keys(BLOCK_SIZE)
    for rank in range(RANKS):
        held = keys[: draw.randrange(len(keys) + 1)]
        spec = GroupSpec(group=0, kind=GroupKind.FULL, block_size=BLOCK_SIZE)
        await index.apply(update(rank, spec, *(BlocksHeld(0, tier, held) for tier in tiers)))


async def measure_match(
    indexes: Sequence[BlockIndex], tokens: int, tiers: Sequence[Tier]
) -> list[Row]:
    """One caller at a time: what a lookup adds to a request."""
    draw = random.Random(1)  # noqa: S311 - a workload, not a secret
    token_ids = draw.choices(range(VOCABULARY), k=tokens)
    prompt = Prompt(Namespace(model=MODEL), token_ids)
    measured = []
    for index in indexes:
        await fill(index, prompt, tiers)
        await index.match(prompt)
        measured.append([await seconds(lambda: index.match(prompt)) for _ in range(LOOKUPS)])  # noqa: B023 - awaited here
    redis, memory = measured
    where = "+".join(tiers)
    return [
        Row(
            what=f"match of {tokens:,} tokens, {RANKS} ranks, {where}, {name}",
            unit="ms",
            redis=percentile(redis, share) * 1e3,
            memory=percentile(memory, share) * 1e3,
        )
        for name, share in (("p50", 0.5), ("p99", 0.99))
    ]


async def measure_lookups(indexes: Sequence[BlockIndex], tokens: int) -> Row:
    """Several callers at once, in one process: what one balancer gets out of it."""
    draw = random.Random(1)  # noqa: S311 - a workload, not a secret
    prompt = Prompt(Namespace(model=MODEL), draw.choices(range(VOCABULARY), k=tokens))

    async def ask(index: BlockIndex) -> None:
        for _ in range(LOOKUPS // CLIENTS):
            await index.match(prompt)

    async def ask_all(index: BlockIndex) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(ask(index))

    rates = []
    for index in indexes:
        await fill(index, prompt, (Tier.GPU,))
        await ask_all(index)
        rates.append(LOOKUPS / await seconds(lambda: ask_all(index)))  # noqa: B023 - awaited here
    return Row(
        what=f"lookups of {tokens:,} tokens, {RANKS} ranks, {CLIENTS} at once",
        unit="1/s",
        redis=rates[0],
        memory=rates[1],
    )


async def measure_writes(indexes: Sequence[BlockIndex], *, keeps_rows: bool) -> Row:
    """From encoded frames to the index; with rows, so that the indexer can be restarted."""
    frames, blocks = encoded_stream(as_maps=True, blocks=20_000)

    async def write(index: BlockIndex) -> None:
        tables = RankBlocks(rank=RankId(ENGINE, 1000), model=MODEL, epoch=1, keeps_rows=keeps_rows)
        for seq, frame in enumerate(frames):
            await index.apply(tables.apply(seq, decode_batch(frame)))
        await index.retire(tables.rank)

    rates = []
    for index in indexes:
        rates.append(blocks / min([await seconds(lambda: write(index)) for _ in range(3)]))  # noqa: B023, PERF401 - awaited here
    return Row(
        what=f"events applied{' with rows' if keeps_rows else ''}, {len(frames)} batches",
        unit="blocks/s",
        redis=rates[0],
        memory=rates[1],
    )


async def measure_bulk(index: RedisIndex) -> str:
    """Room and speed of a big rank, written anew from its tables."""
    frames, blocks = encoded_stream(as_maps=True, blocks=20_000)
    tables = RankBlocks(rank=RankId(ENGINE, 2000), model="bulk", epoch=1, keeps_rows=True)
    for seq, frame in enumerate(frames):
        tables.apply(seq, decode_batch(frame))
    took_s = await seconds(
        lambda: index.rewrite("bulk", Trust.EXACT, tables.snapshot(len(frames), 0))
    )
    restored_s = await seconds(lambda: index.restore(tables.rank, "bulk"))
    held = tables.held_blocks
    return (
        f"A rank of {held:,} blocks (of {blocks:,} stored) written anew: {held / took_s:,.0f} "
        f"blocks/s; read back: {held / restored_s:,.0f} blocks/s."
    )


async def measure() -> None:
    """Everything, and print it."""
    with redis_server() as url:
        index = RedisIndex(RedisConnection(RedisSettings(url=url)))
        indexes = (index, MemoryIndex())
        rows = [
            *await measure_match(indexes, 32_000, (Tier.GPU,)),
            *await measure_match(indexes, 100_000, (Tier.GPU,)),
            *await measure_match(indexes, 32_000, (Tier.GPU, Tier.CPU)),
        ]
        for rank in range(RANKS):
            for each in indexes:
                await each.retire(RankId(ENGINE, rank))
        rows += [
            await measure_lookups(indexes, 4_000),
            await measure_lookups(indexes, 32_000),
            await measure_writes(indexes, keeps_rows=False),
            await measure_writes(indexes, keeps_rows=True),
        ]
        bulk = await measure_bulk(index)
        await index.aclose()
    print(f"Python {platform.python_version()}, {platform.machine()}, redis-server over a socket\n")
    print("| what | redis | memory | unit | ratio |")
    print("| --- | --- | --- | --- | --- |")
    for row in rows:
        print(row.render())
    print(f"\n{bulk}")


def main() -> None:
    """Measure everything and print the table."""
    asyncio.run(measure())


if __name__ == "__main__":
    main()
