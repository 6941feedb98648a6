"""How long Redis is busy with one command, where a command touches a whole rank.

Part of `python -m benchmarks.index_redis`.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

from msgspec import structs

from benchmarks.redis_workload import BLOCK_SIZE, opened
from benchmarks.waiting_client import waiting_client
from indexer.core.block_rows import GroupRows
from indexer.core.index import AllDropped, BlocksHeld, GroupKind, GroupSpec, RankUpdate
from indexer.core.types import BlockKey, InstanceId, RankId, Tier, Trust
from indexer.rank_keeper import PART_BLOCKS
from indexer.redis_index.connection import Script
from indexer.redis_index.packing import PackedKeys
from indexer.redis_index.redis_index import RedisIndex

WATCH_S = 0.0005
STORED_BLOCKS = 512
"""Rather more than the longest update of an indexer has."""


async def measure_long_commands(url: str, blocks: int) -> Iterator[str]:
    """Whatever touches a whole rank, while another client looks how long Redis answers nobody."""
    connection = opened(url)
    await connection.ask("FLUSHALL")
    index = RedisIndex(connection)
    count = 16
    ranks = [RankId(InstanceId("http://big:8000"), number) for number in range(count)]
    size = blocks // count
    await connection.ask("CONFIG", "SET", "slowlog-log-slower-than", "0")
    await connection.ask("CONFIG", "SET", "slowlog-max-len", "100000")
    lines = [f"{count} ranks of {size:,} blocks each.", ""]
    lines += ["| what | longest command ms | longest wait of another client ms |"]
    lines += ["| --- | ---: | ---: |"]

    async def fill() -> None:
        for rank in ranks:
            await index.apply(_update(rank, FULL_GROUP))
            for number, part in enumerate(_parts(rank, size, STORED_BLOCKS), start=1):
                await index.apply(structs.replace(part, seq=number))

    async def expire() -> None:
        keys = index.keys_of(ranks[3])
        await connection.run(EXPIRE, PackedKeys(keys), [], timeout_s=60)
        await asyncio.sleep(0.3)

    works: Sequence[tuple[str, Callable[[], Any]]] = (
        ("all of them stored", fill),
        ("a rank removed", lambda: index.retire(ranks[0])),
        ("a new epoch", lambda: index.apply(_update(ranks[1], epoch=2))),
        ("a cache cleared", lambda: index.apply(_update(ranks[2], AllDropped(), seq=10**6))),
        ("a lease that ends", expire),
        ("a rank written anew", lambda: _rewrite(index, ranks[4], size)),
        ("an indexer that starts", lambda: _restart(url, ranks[5])),
    )
    for what, work in works:
        await connection.ask("SLOWLOG", "RESET")
        longest_wait_ms = await _watched(url, work)
        log = await connection.ask("SLOWLOG", "GET", 100_000)
        slowest = max((entry[2] for entry in log if entry[3][0] != b"SLOWLOG"), default=0) / 1e3
        lines.append(f"| {what} | {slowest:.2f} | {longest_wait_ms:.2f} |")
    await connection.aclose()
    return iter(lines)


EXPIRE = Script("for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, 1) end", writes=True)
FULL_GROUP = GroupSpec(group=0, kind=GroupKind.FULL, block_size=BLOCK_SIZE)


def _update(
    rank: RankId, *changes: Any, epoch: int = 1, seq: int = 0, rows: Any = ()
) -> RankUpdate:
    return RankUpdate(rank=rank, model="big", epoch=epoch, seq=seq, changes=changes, rows=rows)


def _parts(rank: RankId, size: int, blocks: int) -> Iterator[RankUpdate]:
    """All it holds, in updates of so many blocks."""
    for start in range(0, size, blocks):
        yield _part(rank, start, min(blocks, size - start))


def _part(rank: RankId, start: int, count: int) -> RankUpdate:
    numbers = range(start + rank.rank * 2**40, start + rank.rank * 2**40 + count)
    keys = [BlockKey(number * 0x9E3779B97F4A7C15 % 2**64) for number in numbers]
    plain = [each for number, key in zip(numbers, keys, strict=True) for each in (number, key, key)]
    rows = [GroupRows(0, [], [], plain)]
    return _update(rank, BlocksHeld(0, Tier.GPU, keys), seq=7, rows=rows)


async def _rewrite(index: RedisIndex, rank: RankId, size: int) -> None:
    parts = chain([_update(rank, FULL_GROUP, seq=7)], _parts(rank, size, PART_BLOCKS))
    await index.rewrite("big", Trust.EXACT, parts)


async def _restart(url: str, rank: RankId) -> None:
    connection = opened(url)
    await RedisIndex(connection).restore(rank, "big")
    await connection.aclose()


async def _watched(url: str, work: Callable[[], Any]) -> float:
    """Longest that a PING of another process took meanwhile, in ms."""
    async with waiting_client(url.removeprefix("unix://"), WATCH_S, "PING\r\n") as waited:
        await work()
        await asyncio.sleep(0.05)
    return max(waited) * 1e3
