"""The index in memory: events applied, bytes per block and holder, matches while events come in.

Run `python -m benchmarks.index`; `--only matches --ranks 64 --tokens 32768` for a part of it. Events
are measured in CPU time, in turn with the layout one would write first (`benchmarks.naive_index`);
memory is the growth of a fresh process; a match is timed by a client in another process, from
asking to having the answer. Garbage is collected as `kvlb up` has it collected.
"""

import argparse
import asyncio
import gc
import platform
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import count, islice
from multiprocessing import get_context
from pathlib import Path
from resource import getpagesize

import uvloop

from benchmarks.index_workload import (
    CONVERSATION_BLOCKS,
    Fleet,
    conversation_removals,
    conversations,
    draw_from,
    encoded_stream,
    prompt_frames,
    prompt_of,
    prompt_tokens,
)
from benchmarks.interpreter import built
from benchmarks.naive_index import NaiveIndex
from benchmarks.waiting_client import waiting_client
from indexer.turns import TURN_S, Turns
from kvlb.event_loop import spare_startup_objects

RUNS = 9
PASSES = 3
"""Over all matches, one after the other. Others on a shared machine come in spells of milliseconds to
minutes, and each makes what it meets half as slow again: of a cell's passes the middle one is told."""
STREAM_BLOCKS = 40_000
BLOCKS_PER_S = 50_000
BURST_S = 0.001
"""Events of several engines come together, with nothing to do in between."""
CELL_S = 2.0
PAUSE_S = 0.001
"""Between two matches, about: requests don't come back to back."""
RANKS = (1, 16, 64, 256)
PROMPTS = (1_024, 32_768, 131_072)
FLEETS = ((1, 1, 17), (4, 4, 16), (16, 16, 15), (16, 4, 15), (64, 4, 13), (256, 4, 11))
"""Ranks, holders of each block, and the size of each rank's hash tables as a power of 2."""
FULL, GROWN, AVERAGE = 0.97, 1.03, 0.69
"""Of what a table of that size takes: the cheapest fill; one that has just made it grow; and the one
(ln 2) that costs what tables cost on average while they fill from one growth to the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Of one number of ranks and one length of prompt."""

    p50_ms: float
    p99_ms: float
    """As a client sees it."""
    cpu_p50_ms: float
    cpu_p99_ms: float
    """Of the match alone."""
    blocks_per_s: float


def cpu_s(work: Callable[[], object]) -> float:
    """CPU seconds of the whole process."""
    start = time.process_time()
    work()
    return time.process_time() - start


# Events.


def measure_events() -> Iterator[str]:
    """One row per wire format."""
    maps, blocks = encoded_stream(as_maps=True, blocks=STREAM_BLOCKS)
    arrays, _ = encoded_stream(as_maps=False, blocks=STREAM_BLOCKS)
    maps_s = arrays_s = naive_s = float("inf")
    for _ in range(RUNS):
        maps_s = min(maps_s, cpu_s(lambda: asyncio.run(_apply(maps))))
        arrays_s = min(arrays_s, cpu_s(lambda: asyncio.run(_apply(arrays))))
        naive_s = min(naive_s, cpu_s(lambda: _apply_naive(maps)))
    for what, taken_s in (
        ("ours, maps (since 0.24)", maps_s),
        ("ours, arrays (up to 0.23)", arrays_s),
        ("naive layout, maps", naive_s),
    ):
        rate, each_us = blocks / taken_s, taken_s / blocks * 1e6
        yield f"| {what} | {rate:,.0f} | {each_us:.2f} | {naive_s / taken_s:.2f} x |"


async def _apply(frames: Sequence[bytes]) -> None:
    fleet = Fleet(1)
    for frame in frames:
        await fleet.write(fleet.ranks[0], frame)
    if fleet.ranks[0].counts:
        raise AssertionError(f"the stream should be clean: {fleet.ranks[0].counts}")


def _apply_naive(frames: Sequence[bytes]) -> None:
    index = NaiveIndex()
    for frame in frames:
        index.apply(0, frame)


# Memory.


def measure_memory() -> Iterator[str]:
    """One row per fleet, each in processes of its own."""
    for ranks, holders, power in FLEETS:
        blocks = [round(filling * 2**power * 2 / 3) for filling in (AVERAGE, FULL, GROWN)]
        found = [bytes_per_holding(ranks, holders, each) for each in blocks]
        found.append(bytes_per_holding(ranks, holders, blocks[-1], lives=3))
        naive = bytes_per_holding(ranks, holders, blocks[0], is_naive=True)
        shown = " | ".join(f"{each:.0f}" for each in found)
        yield f"| {ranks} | {holders} | {shown} | {naive / found[0]:.1f} x |"


def bytes_per_holding(
    ranks: int, holders: int, per_rank: int, *, lives: int = 1, is_naive: bool = False
) -> float:
    """Growth of a process per (block, holder) if each rank holds `per_rank` blocks.

    With more `lives` than one all of them have been replaced, one conversation after the other.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_grow, ranks, holders, per_rank, lives, is_naive).result()


def _grow(ranks: int, holders: int, per_rank: int, lives: int, is_naive: bool) -> float:
    spare_startup_objects()
    fleet, naive = Fleet(ranks), NaiveIndex() if is_naive else None
    kept = per_rank * ranks // holders // CONVERSATION_BLOCKS
    gc.collect()
    before = _resident_bytes()
    frames = conversations(kept * lives * CONVERSATION_BLOCKS)
    asyncio.run(_fill(fleet, naive, holders, islice(frames, kept)))
    asyncio.run(_replace(fleet, holders, frames, kept))
    gc.collect()
    return (_resident_bytes() - before) / (kept * holders * CONVERSATION_BLOCKS)


async def _fill(
    fleet: Fleet, naive: NaiveIndex | None, holders: int, frames: Iterator[bytes]
) -> None:
    """Conversations, each held by `holders` ranks in turn."""
    ranks = len(fleet.ranks)
    for number, frame in enumerate(frames):
        for at in range(holders):
            rank = (number * holders + at) % ranks
            if naive is None:
                await fleet.write(fleet.ranks[rank], frame)
            else:
                naive.apply(rank, frame)


async def _replace(fleet: Fleet, holders: int, frames: Iterator[bytes], kept: int) -> None:
    """Each as it comes replaces the oldest one, tail first, on its ranks."""
    gone = conversation_removals()
    for number, frame in enumerate(frames):
        removal = next(gone)
        for at in range(holders):
            rank = fleet.ranks[(number % kept * holders + at) % len(fleet.ranks)]
            await fleet.write(rank, removal)
            await fleet.write(rank, frame)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * getpagesize()


# Matches.


def measure_matches(ranks: Sequence[int], tokens: Sequence[int]) -> Iterator[str]:
    """One row per number of ranks and length of prompt."""
    stream = encoded_stream(as_maps=True, blocks=STREAM_BLOCKS)
    cells = [(each, length) for each in ranks for length in tokens]
    passes = [
        {cell: uvloop.run(_measure_matches(*cell, stream)) for cell in cells} for _ in range(PASSES)
    ]
    for cell in cells:
        found = sorted((each[cell] for each in passes), key=lambda latency: latency.p99_ms)
        told = found[PASSES // 2]
        naive = _naive_s(*cell) * 1e3 / told.cpu_p50_ms
        yield (
            f"| {cell[0]} | {cell[1]:,} | {told.p50_ms:.2f} | {told.p99_ms:.2f} "
            f"| {' '.join(f'{each.p99_ms:.2f}' for each in found)} "
            f"| {told.cpu_p50_ms:.2f} | {told.cpu_p99_ms:.2f} "
            f"| {told.blocks_per_s:,.0f} | {naive:.1f} x |"
        )


async def _measure_matches(ranks: int, tokens: int, stream: tuple[Sequence[bytes], int]) -> Latency:
    fleet = Fleet(ranks)
    for number, frame in _held(ranks, tokens):
        await fleet.write(fleet.ranks[number], frame)
    gc.collect()
    async with asyncio.TaskGroup() as group:
        pace = Pace(fleet, *stream)
        writing = group.create_task(pace.run())
        waited, cpu = await _answer(fleet, prompt_tokens(tokens, seed=tokens))
        blocks_per_s = pace.blocks_per_s
        writing.cancel()
    return Latency(
        p50_ms=quantile(waited, 0.5) * 1e3,
        p99_ms=quantile(waited, 0.99) * 1e3,
        cpu_p50_ms=quantile(cpu, 0.5) * 1e3,
        cpu_p99_ms=quantile(cpu, 0.99) * 1e3,
        blocks_per_s=blocks_per_s,
    )


def _held(ranks: int, tokens: int) -> Iterator[tuple[int, bytes]]:
    """Frames by rank: each holds between nothing and all of the prompt."""
    token_ids, draw = prompt_tokens(tokens, seed=tokens), draw_from(5)
    for number in range(ranks):
        held = token_ids[: draw.randrange(tokens + 1)]
        for frame in prompt_frames(held, seed=tokens):
            yield number, frame


def _naive_s(ranks: int, tokens: int) -> float:
    naive = NaiveIndex()
    for number, frame in _held(ranks, tokens):
        naive.apply(number, frame)
    token_ids = prompt_tokens(tokens, seed=tokens)
    return min(cpu_s(lambda: naive.depths(token_ids, ranks)) for _ in range(2))


async def _answer(fleet: Fleet, token_ids: Sequence[int]) -> tuple[list[float], list[float]]:
    """Seconds that a client waited for each match, and CPU seconds of the match alone."""
    cpu: list[float] = []
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    loop = asyncio.get_running_loop()

    async def serve() -> None:
        while await loop.sock_recv(ours, 1):
            start_s = time.thread_time()
            await fleet.index.match(prompt_of(token_ids))
            cpu.append(time.thread_time() - start_s)
            await loop.sock_sendall(ours, b"!")

    with ours, theirs:
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(serve())
            async with waiting_client(theirs.fileno(), PAUSE_S, "?") as waited:
                await asyncio.sleep(CELL_S)
            serving.cancel()
    return waited, cpu


class Pace:
    """Applies events at a steady rate, to one more rank, whose epochs end with the stream."""

    def __init__(self, fleet: Fleet, frames: Sequence[bytes], blocks: int) -> None:
        self._fleet = fleet
        self._frames = frames
        self._blocks_per_frame = blocks / len(frames)
        self._blocks = 0.0
        self._start_s = self._turn_began_s = time.perf_counter()
        self._turns = Turns()

    @property
    def blocks_per_s(self) -> float:
        return self._blocks / (time.perf_counter() - self._start_s)

    async def run(self) -> None:
        """Until cancelled."""
        for epoch in count(1):
            rank = self._fleet.new_rank(len(self._fleet.ranks), epoch)
            for frame in self._frames:
                await self._wait_for_turn()
                await self._fleet.write(rank, frame)
                self._blocks += self._blocks_per_frame
            rank.close()
            await self._fleet.index.retire(rank.rank)

    async def _wait_for_turn(self) -> None:
        ahead_s = self._blocks / BLOCKS_PER_S - (time.perf_counter() - self._start_s)
        if ahead_s > 0:
            await asyncio.sleep(max(ahead_s, BURST_S))
            self._turn_began_s = time.perf_counter()
        elif time.perf_counter() - self._turn_began_s > TURN_S:
            await self._turns.pass_on()
            self._turn_began_s = time.perf_counter()


def quantile(samples: Sequence[float], share: float) -> float:
    """The sample that `share` of all are below."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def main() -> None:
    """Measure everything, or what is asked for, and print the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=("events", "memory", "matches"), help="one table")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="of matches")
    parser.add_argument("--tokens", type=int, nargs="+", default=PROMPTS, help="of matches")
    options = parser.parse_args()
    print(f"Python {platform.python_version()}, {platform.machine()}, {built()}.")
    spare_startup_objects()
    if options.only in {None, "events"}:
        _print_table(
            "Events applied, decoding included, into one rank",
            "frames of | blocks/s of CPU | µs per block | naive layout",
            measure_events(),
        )
    if options.only in {None, "memory"}:
        _print_table(
            "Memory, copies, parents and all tables included",
            "ranks | holders | bytes per (block, holder), on average | when tables are full "
            "| when all have just grown | there, once all blocks were replaced twice "
            "| naive layout takes",
            measure_memory(),
        )
    if options.only in {None, "matches"}:
        _print_table(
            f"A match while {BLOCKS_PER_S:,} blocks/s of events are applied on the same loop",
            f"ranks | prompt tokens | p50 ms | p99 ms | p99 of {PASSES} passes | CPU p50 ms "
            "| CPU p99 ms | blocks/s applied | naive layout takes",
            measure_matches(options.ranks, options.tokens),
        )


def _print_table(title: str, columns: str, rows: Iterable[str]) -> None:
    print(f"\n{title}:\n\n| {columns} |")
    print(f"|{' ---: |' * len(columns.split('|'))}")
    for row in rows:
        print(row, flush=True)


if __name__ == "__main__":
    main()
