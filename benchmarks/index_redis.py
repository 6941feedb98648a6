"""The index in Redis: what events, lookups and room cost, and how that grows with ranks and length.

Run `python -m benchmarks.index_redis`; `--quick` for a look, `--blocks 10000000` for nothing but
the long commands, at full size. It starts a `redis-server` of its own on a unix socket. "Plainer" is a
set of holders per block, walked block by block by one script. Redis and the
process that applies events get different cores; with `--share-cores` all take turns on all of them.
"""

import argparse
import asyncio
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter, process_time
from typing import IO

import uvloop

from benchmarks.interpreter import built
from benchmarks.redis_commands import measure_long_commands
from benchmarks.redis_workload import (
    BLOCK_SIZE,
    WrittenRank,
    draw,
    event_frames,
    opened,
    prompt_of,
    prompt_tokens,
)
from indexer.redis_index.connection import RedisConnection, Script
from indexer.redis_index.packing import PackedKeys
from indexer.redis_index.reader import RedisIndexReader
from indexer.redis_index.redis_index import RedisIndex
from indexer.turns import WRITING_TURN_S
from kvlb.event_loop import spare_startup_objects

RUNS = 3
"""Of events, the one of least CPU is told; of lookups, the one whose p99 is the middle one."""
RATE = 50_000
PAUSE_S = 0.001
"""Between two lookups: requests don't come back to back."""

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
    own_cores: bool = True
    """Redis and the process that applies events don't wait for each other's."""


QUICK = Scale(ranks=(1, 64), tokens=(1_000, 32_000), lookups=100, conversations=60, blocks=50_000)
FULL = Scale(
    ranks=(1, 16, 64, 256),
    tokens=(1_000, 32_000, 128_000),
    lookups=500,
    conversations=400,
    blocks=400_000,
)


@contextmanager
def redis_server(*, has_own_core: bool) -> Iterator[str]:
    """Address of a server that lives while the block runs, with a core that no writer uses."""
    with tempfile.TemporaryDirectory(prefix="kvlb-redis-") as folder:
        address = Path(folder) / "redis.sock"
        command = ["redis-server", "--port", "0", "--unixsocket", str(address), "--save", ""]
        lazy = ["--lazyfree-lazy-expire", "yes"]
        server = subprocess.Popen([*command, *lazy, "--dir", folder], stdout=subprocess.DEVNULL)
        try:
            if has_own_core:
                os.sched_setaffinity(server.pid, _cores()[:1])
            while not _listens(address):
                if server.poll() is not None:
                    raise SystemExit("redis-server ended before it listened")
                time.sleep(0.01)
            yield f"unix://{address}"
        finally:
            server.kill()
            server.wait()


def _cores() -> Sequence[int]:
    """Those that this process may use."""
    return sorted(os.sched_getaffinity(0))


def _listens(address: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as trial:
        return trial.connect_ex(str(address)) == 0


@contextmanager
def applying(url: str, ranks: int, tokens: int, *, has_own_core: bool) -> Iterator[IO[str]]:
    """A process that has filled the ranks; write a line to it and it applies events to them."""
    command = [sys.executable, "-m", "benchmarks.redis_workload", url]
    asked = [*command, str(ranks), str(tokens), str(RATE)]
    process = subprocess.Popen(asked, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    if has_own_core:  # not Redis's
        os.sched_setaffinity(process.pid, _cores()[1:] or _cores())
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


async def measure_events(url: str, scale: Scale) -> Iterator[str]:
    """From encoded frames into Redis: CPU of the indexer and of Redis per block."""
    lines = [
        "| ranks | blocks/s per core of the indexer | Redis's CPU | bytes per (block, holder) |"
    ]
    lines += ["| ---: | ---: | ---: | ---: |"]
    for count in scale.ranks:
        frames, blocks = event_frames(max(9, scale.conversations // count))
        # What is left at the end is what room is measured by.
        runs = [await _applied(url, count, frames[:-1]) for _ in range(RUNS)]
        took_s, server_s, room = min(runs)
        total = blocks * count
        lines.append(
            f"| {count} | {total / took_s:,.0f} | {server_s / total * 1e6:.2f} us/block | "
            f"{room:.0f} |"
        )
    return iter(lines)


async def _applied(url: str, count: int, frames: Sequence[bytes]) -> tuple[float, float, float]:
    """CPU seconds of the indexer and of Redis, and bytes per (block, holder)."""
    connection = opened(url)
    await connection.ask("FLUSHALL")
    index = RedisIndex(connection)
    ranks = [WrittenRank(index, number) for number in range(count)]
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
    return took_s, server_s, room / held


async def _feed(ranks: Sequence[WrittenRank], frames: Sequence[bytes]) -> None:
    """Each frame to every rank; a turn as long as the indexer's own."""
    until_s = perf_counter() + WRITING_TURN_S
    for frame in frames:
        for rank in ranks:
            await rank.take_in(frame)
            if perf_counter() > until_s:
                await asyncio.sleep(0)
                until_s = perf_counter() + WRITING_TURN_S
    for rank in ranks:
        await rank.is_written()


async def measure_lookups(url: str, scale: Scale) -> Iterator[str]:
    """One caller at a time, as it waits, without and with events being applied by another process."""
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
            reader, token_ids = RedisIndexReader(connection), prompt_tokens(tokens)
            with applying(url, count, tokens, has_own_core=scale.own_cores) as commands:
                plainer_ms = await _plainer_ms(connection, count, tokens)
                server_ms = await _server_ms(connection, reader, token_ids, scale.lookups // 2)
                idle = await _lookups(reader, token_ids, scale.lookups)
                commands.write("\n")
                commands.flush()
                await asyncio.sleep(0.5)
                busy = await _lookups(reader, token_ids, scale.lookups)
            await connection.aclose()
            figures = [percentile(times, share) for times in (idle, busy) for share in (0.5, 0.99)]
            lines.append(
                f"| {count} | {tokens:,} | "
                + " | ".join(f"{each:.2f}" for each in figures)
                + f" | {server_ms:.3f} | {1e3 / server_ms:,.0f} | {plainer_ms:.2f} | "
                f"{plainer_ms / server_ms:.1f} x |"
            )
    return iter(lines)


async def _lookups(
    reader: RedisIndexReader, token_ids: Sequence[int], count: int
) -> Sequence[float]:
    """Milliseconds of each, hashing the prompt included, in the middle one of some runs."""
    runs = [await _looked_up(reader, token_ids, count) for _ in range(RUNS)]
    return sorted(runs, key=lambda times: percentile(times, 0.99))[RUNS // 2]


async def _looked_up(
    reader: RedisIndexReader, token_ids: Sequence[int], count: int
) -> Sequence[float]:
    times = []
    for _ in range(count):
        await asyncio.sleep(PAUSE_S)
        began_s = perf_counter()
        await reader.match(prompt_of(token_ids))
        times.append((perf_counter() - began_s) * 1e3)
    return times


async def _server_ms(
    connection: RedisConnection, reader: RedisIndexReader, token_ids: Sequence[int], count: int
) -> float:
    """CPU milliseconds of Redis per lookup when it does nothing else."""
    prompt = prompt_of(token_ids)
    await reader.match(prompt)
    server_s = await redis_cpu_s(connection)
    for _ in range(count):
        await reader.match(prompt)
    return (await redis_cpu_s(connection) - server_s) / count * 1e3


async def _plainer_ms(connection: RedisConnection, ranks: int, tokens: int) -> float:
    """A set of holders per block: the same holdings, the same question. The best of five."""
    dice = draw(2)
    depths = [dice.randrange(tokens // BLOCK_SIZE + 1) for _ in range(ranks)]
    keys = [f"plain:{key}" for key in prompt_of(prompt_tokens(tokens)).keys(BLOCK_SIZE)]
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


Section = tuple[str, Callable[[str, Scale], Awaitable[Iterator[str]]]]
LONG_COMMANDS: Section = (
    "Commands that touch a whole rank",
    lambda url, scale: measure_long_commands(url, scale.blocks),
)
EVENTS: Section = ("Events applied, with rows for a restart", measure_events)
LOOKUPS: Section = ("Lookups", measure_lookups)
ALL: Sequence[Section] = (EVENTS, LOOKUPS, LONG_COMMANDS)


async def measure(scale: Scale, sections: Sequence[Section]) -> None:
    """Print what they find."""
    with redis_server(has_own_core=scale.own_cores) as url:
        connection = opened(url)
        version = (await information(connection, "server"))["redis_version"]
        await connection.aclose()
        print(
            f"Redis {version} over a unix socket, Python {platform.python_version()}, {built()}.\n"
        )
        for title, section in sections:
            print(f"### {title}\n", flush=True)
            for line in await section(url, scale):
                print(line)
            print()


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="a look, not a measurement")
    parser.add_argument("--blocks", type=int, help="nothing but the last section, with so many")
    parser.add_argument("--only", choices=("events", "lookups"), help="one section")
    parser.add_argument("--share-cores", action="store_true", help="Redis and the writer")
    options = parser.parse_args()
    scale, sections = QUICK if options.quick else FULL, ALL
    if options.blocks:
        scale, sections = replace(scale, blocks=options.blocks), [LONG_COMMANDS]
    if options.only:
        sections = [EVENTS if options.only == "events" else LOOKUPS]
    spare_startup_objects()
    # As every command of kvlb.
    uvloop.run(measure(replace(scale, own_cores=not options.share_cores), sections))


if __name__ == "__main__":
    main()
