"""The index in Redis: what events, lookups and room cost, and how that grows with ranks and length.

Run `python -m benchmarks.index_redis`; `--quick` for a look, `--blocks 10000000` for the long
commands at full size. It starts a `redis-server` of its own on a unix socket. "Plainer" is a
set of holders per block, walked block by block by one script.
"""

import argparse
import asyncio
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter, process_time
from typing import IO, Any

import uvloop

from benchmarks.redis_workload import (
    BLOCK_SIZE,
    TURN_S,
    WrittenRank,
    draw,
    event_frames,
    make_prompt,
)
from indexer.core.block_rows import GroupRows
from indexer.core.index import AllDropped, BlocksHeld, GroupKind, GroupSpec, Prompt, RankUpdate
from indexer.core.types import BlockKey, InstanceId, RankId, Tier, Trust
from indexer.redis_index.connection import RedisConnection, Script
from indexer.redis_index.packing import PackedKeys
from indexer.redis_index.reader import RedisIndexReader
from indexer.redis_index.redis_index import RedisIndex
from indexer.redis_index.settings import RedisSettings

RATE = 50_000
PART_BLOCKS = 1024
"""As the indexer writes a rank anew."""

PLAINER = Script(
    """
    local alive, count, ended = nil, 0, {}
    for at = 1, #KEYS do
      local holders = redis.call('SMEMBERS', KEYS[at])
      local still = {}
      for _, rank in ipairs(holders) do
        if not alive or alive[rank] then still[rank] = true end
      end
      for rank in pairs(alive or {}) do if not still[rank] then ended[rank] = at - 1 end end
      alive = still
      if not next(alive) then break end
    end
    return #KEYS
    """,
    writes=False,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is measured."""

    ranks: Sequence[int]
    tokens: Sequence[int]
    lookups: int
    conversations: int
    blocks: int
    """For long commands."""


QUICK = Scale(ranks=(1, 64), tokens=(1_000, 32_000), lookups=100, conversations=60, blocks=50_000)
FULL = Scale(
    ranks=(1, 16, 64, 256),
    tokens=(1_000, 32_000, 128_000),
    lookups=500,
    conversations=400,
    blocks=400_000,
)


@contextmanager
def redis_server() -> Iterator[str]:
    """Address of a server that lives while the block runs."""
    with tempfile.TemporaryDirectory(prefix="kvlb-redis-") as folder:
        address = Path(folder) / "redis.sock"
        command = ["redis-server", "--port", "0", "--unixsocket", str(address), "--save", ""]
        lazy = ["--lazyfree-lazy-expire", "yes"]
        server = subprocess.Popen([*command, *lazy, "--dir", folder], stdout=subprocess.DEVNULL)
        try:
            while not address.exists():  # it says nothing when it listens
                if server.poll() is not None:
                    raise SystemExit("redis-server ended before it listened")
                time.sleep(0.01)
            yield f"unix://{address}"
        finally:
            server.kill()
            server.wait()


@contextmanager
def applying(url: str, ranks: int, tokens: int) -> Iterator[IO[str]]:
    """A process that has filled the ranks; write a line to it and it applies events to them."""
    command = [sys.executable, "-m", "benchmarks.redis_workload", url]
    asked = [*command, str(ranks), str(tokens), str(RATE)]
    process = subprocess.Popen(asked, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None  # noqa: S101 - for the types
    assert process.stdout is not None  # noqa: S101
    try:
        process.stdout.readline()
        yield process.stdin
    finally:
        process.communicate()


def percentile(times: Sequence[float], share: float) -> float:
    """The value below which this share of them lies."""
    return sorted(times)[min(len(times) - 1, int(share * len(times)))]


async def information(connection: RedisConnection, section: str) -> dict[str, str]:
    """One section of INFO."""
    text: bytes = await connection.ask("INFO", section)
    lines = [line.split(":", 1) for line in text.decode().splitlines() if ":" in line]
    return {name: value for name, value in lines}  # noqa: C416 - lists of two, for the types


async def redis_cpu_s(connection: RedisConnection) -> float:
    """CPU of the server so far."""
    cpu = await information(connection, "cpu")
    return float(cpu["used_cpu_user"]) + float(cpu["used_cpu_sys"])


async def used_bytes(connection: RedisConnection) -> int:
    """Memory of the server now."""
    return int((await information(connection, "memory"))["used_memory"])


def opened(url: str) -> RedisConnection:
    """A connection that waits for whatever is measured."""
    return RedisConnection(RedisSettings(url=url, write_timeout_s=60, read_timeout_s=60))


async def measure_events(url: str, scale: Scale) -> Iterator[str]:
    """From encoded frames into Redis: CPU of the indexer and of Redis per block."""
    lines = [
        "| ranks | blocks/s per core of the indexer | Redis's CPU | bytes per (block, holder) |"
    ]
    lines += ["| ---: | ---: | ---: | ---: |"]
    for count in scale.ranks:
        connection = opened(url)
        await connection.ask("FLUSHALL")
        index = RedisIndex(connection)
        ranks = [WrittenRank(index, number) for number in range(count)]
        frames, blocks = event_frames(max(9, scale.conversations // count))
        frames = frames[:-1]  # what is left at the end is what room is measured by
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(rank.keeper.run()) for rank in ranks]
            for rank in ranks:
                await rank.open()
            empty_bytes, server_s = await used_bytes(connection), await redis_cpu_s(connection)
            began_s = process_time()
            await _feed(ranks, frames)
            took_s = process_time() - began_s
            server_s = await redis_cpu_s(connection) - server_s
            room = await used_bytes(connection) - empty_bytes
            for task in tasks:
                task.cancel()
        held = sum(rank.blocks.held_blocks for rank in ranks)
        await connection.aclose()
        total = blocks * count
        lines.append(
            f"| {count} | {total / took_s:,.0f} | {server_s / total * 1e6:.2f} us/block | "
            f"{room / held:.0f} |"
        )
    return iter(lines)


async def _feed(ranks: Sequence[WrittenRank], frames: Sequence[bytes]) -> None:
    """Each frame to every rank; a turn as long as the indexer's own."""
    until_s = perf_counter() + TURN_S
    for frame in frames:
        for rank in ranks:
            await rank.take_in(frame)
            if perf_counter() > until_s:
                await asyncio.sleep(0)
                until_s = perf_counter() + TURN_S
    for rank in ranks:
        await rank.is_written()


async def measure_lookups(url: str, scale: Scale) -> Iterator[str]:
    """One caller at a time, without and with events being applied by another process."""
    lines = [
        (
            f"| ranks | tokens | p50 ms | p99 ms | p50 at {RATE:,} blocks/s | p99 | Redis's CPU ms | "
            "lookups/s of one Redis | plainer ms | ratio |"
        ),
        "| ---: " * 10 + "|",
    ]
    for count in scale.ranks:
        for tokens in scale.tokens:
            connection = opened(url)
            await connection.ask("FLUSHALL")
            reader, prompt = RedisIndexReader(connection), make_prompt(tokens)
            with applying(url, count, tokens) as commands:
                plainer_ms = await _plainer_ms(connection, count, tokens)
                idle, server_ms = await _lookups(connection, reader, prompt, scale.lookups)
                commands.write("\n")
                commands.flush()
                await asyncio.sleep(0.5)
                busy, _ = await _lookups(connection, reader, prompt, scale.lookups)
            await connection.aclose()
            figures = [percentile(times, share) for times in (idle, busy) for share in (0.5, 0.99)]
            lines.append(
                f"| {count} | {tokens:,} | "
                + " | ".join(f"{each:.2f}" for each in figures)
                + f" | {server_ms:.3f} | {1e3 / server_ms:,.0f} | {plainer_ms:.2f} | "
                f"{plainer_ms / figures[0]:.1f} x |"
            )
    return iter(lines)


async def _lookups(
    connection: RedisConnection, reader: RedisIndexReader, prompt: Prompt, count: int
) -> tuple[list[float], float]:
    """Milliseconds of each, and Redis's own per lookup."""
    await reader.match(prompt)
    server_s = await redis_cpu_s(connection)
    times = []
    for _ in range(count):
        began_s = perf_counter()
        await reader.match(prompt)
        times.append((perf_counter() - began_s) * 1e3)
    return times, (await redis_cpu_s(connection) - server_s) / count * 1e3


async def _plainer_ms(connection: RedisConnection, ranks: int, tokens: int) -> float:
    """A set of holders per block: the same holdings, the same question. The best of five."""
    dice = draw(2)
    depths = [dice.randrange(tokens // BLOCK_SIZE + 1) for _ in range(ranks)]
    keys = [f"plain:{key}" for key in make_prompt(tokens).keys(BLOCK_SIZE)]
    for at, key in enumerate(keys):
        if holders := [rank for rank, depth in enumerate(depths) if depth > at]:
            await connection.ask("SADD", key, *holders)
    packed, times = PackedKeys(keys), []
    for _ in range(5):
        began_s = perf_counter()
        await connection.run(PLAINER, packed, [], timeout_s=60)
        times.append((perf_counter() - began_s) * 1e3)
    await connection.run(
        Script("return redis.call('UNLINK', unpack(KEYS))", writes=True),
        PackedKeys(keys[:7000]),
        [],
        timeout_s=60,
    )
    return min(times)


async def measure_long_commands(url: str, scale: Scale) -> Iterator[str]:
    """Whatever touches a whole rank, while another client looks how long Redis answers nobody."""
    connection = opened(url)
    await connection.ask("FLUSHALL")
    index = RedisIndex(connection)
    count = 16
    ranks = [RankId(InstanceId("http://big:8000"), number) for number in range(count)]
    size = scale.blocks // count
    for rank in ranks:
        await index.apply(_update(rank, FULL_GROUP))
        for number, start in enumerate(range(0, size, PART_BLOCKS), start=1):
            await index.apply(_part(rank, start, min(PART_BLOCKS, size - start), number))
    await connection.ask("CONFIG", "SET", "slowlog-log-slower-than", "0")
    await connection.ask("CONFIG", "SET", "slowlog-max-len", "100000")
    lines = [f"{count} ranks of {size:,} blocks each.", ""]
    lines += ["| what | longest command ms | longest wait of another client ms |"]
    lines += ["| --- | ---: | ---: |"]

    async def expire() -> None:
        keys = index.keys_of(ranks[3])
        await connection.run(EXPIRE, PackedKeys(keys), [], timeout_s=60)
        await asyncio.sleep(0.3)

    works: Sequence[tuple[str, Callable[[], Any]]] = (
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


def _part(rank: RankId, start: int, count: int, seq: int) -> RankUpdate:
    numbers = range(start + rank.rank * 2**40, start + rank.rank * 2**40 + count)
    keys = [BlockKey(number * 0x9E3779B97F4A7C15 % 2**64) for number in numbers]
    plain = [each for number, key in zip(numbers, keys, strict=True) for each in (number, key, key)]
    rows = [GroupRows(0, [], [], plain)]
    return _update(rank, BlocksHeld(0, Tier.GPU, keys), seq=seq, rows=rows)


async def _rewrite(index: RedisIndex, rank: RankId, size: int) -> None:
    parts = [_update(rank, FULL_GROUP, seq=7)]
    parts += [
        _part(rank, start, min(PART_BLOCKS, size - start), 7)
        for start in range(0, size, PART_BLOCKS)
    ]
    await index.rewrite("big", Trust.EXACT, parts)


async def _restart(url: str, rank: RankId) -> None:
    connection = opened(url)
    await RedisIndex(connection).restore(rank, "big")
    await connection.aclose()


async def _watched(url: str, work: Callable[[], Any]) -> float:
    """Longest that a PING took meanwhile, in ms."""
    longest = 0.0
    connection = opened(url)
    await connection.ping()

    async def watch() -> None:
        nonlocal longest
        while True:
            began_s = perf_counter()
            await connection.ping()
            longest = max(longest, (perf_counter() - began_s) * 1e3)
            await asyncio.sleep(0.0005)

    async with asyncio.TaskGroup() as group:
        watching = group.create_task(watch())
        await work()
        await asyncio.sleep(0.05)
        watching.cancel()
    await connection.aclose()
    return longest


async def measure(scale: Scale) -> None:
    """Everything, and print it."""
    with redis_server() as url:
        connection = opened(url)
        version = (await information(connection, "server"))["redis_version"]
        await connection.aclose()
        print(f"Redis {version} over a unix socket, Python {platform.python_version()}.\n")
        for title, section in (
            ("Events applied, with rows for a restart", measure_events),
            ("Lookups", measure_lookups),
            ("Commands that touch a whole rank", measure_long_commands),
        ):
            print(f"### {title}\n", flush=True)
            for line in await section(url, scale):
                print(line)
            print()


def main() -> None:
    """Measure everything and print the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="a look, not a measurement")
    parser.add_argument("--blocks", type=int, help="for commands that touch a whole rank")
    options = parser.parse_args()
    scale = QUICK if options.quick else FULL
    if options.blocks:
        scale = replace(scale, blocks=options.blocks)
    uvloop.run(measure(scale))  # as every command of kvlb


if __name__ == "__main__":
    main()
