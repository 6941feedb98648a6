"""One sample: a proxy under one load, its CPU, latencies, failures and memory."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from benchmarks.overhead.client import Times, call_many, open_burst, write_request
from benchmarks.overhead.engine import SHORT_PROMPT_TOKENS, long_prompts
from benchmarks.overhead.process import cpu_s, memory_bytes

CHUNKS = 64
BURST_CLIENTS = 512
BURST_CHUNKS = 16
BURST_INTERVAL_MS = 20
MANY_CLIENTS = 2000
MANY_CHUNKS = 16
MANY_INTERVAL_MS = 300
MANY_SPREAD_S = 2.0
IDLE_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One load that every proxy gets in turn."""

    clients: int
    calls: int
    interval_ms: int = 0
    """Between two chunks of a stream; 0: not streamed."""

    @property
    def is_stream(self) -> bool:
        return self.interval_ms > 0


REQUESTS = (
    Cell(clients=1, calls=300),
    Cell(clients=32, calls=3000),
    Cell(clients=256, calls=3000),
)
STREAMS = (
    Cell(clients=1, calls=4, interval_ms=2),
    Cell(clients=32, calls=64, interval_ms=10),
    Cell(clients=256, calls=512, interval_ms=20),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A proxy that runs."""

    name: str
    pid: int
    port: int
    is_full: bool
    takes_ids: bool = True
    idle_cpu_share: float = 0.0
    """CPU seconds per second without a request: following events, probing, timers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One proxy, one load, once."""

    name: str
    cell: Cell
    round_: int
    cpu_s: float
    elapsed_s: float
    times: Times
    memory_bytes: int

    @property
    def calls(self) -> int:
        return len(self.times.whole_s)

    @property
    def cpu_s_per_call(self) -> float:
        return self.cpu_s / max(1, self.calls)


@dataclass(slots=True, kw_only=True)
class Crowd:
    """Many connections at once, once per proxy."""

    idle_bytes: int = 0
    burst: Times = field(default_factory=Times)
    many: Times = field(default_factory=Times)
    many_bytes: int = 0


class Requests:
    """The bytes of every request, written once."""

    def __init__(self) -> None:
        self._short = [list(range(SHORT_PROMPT_TOKENS))]
        self._long = long_prompts()
        self._written: dict[tuple[bool, bool, int, int], list[bytes]] = {}

    def of(self, target: Target, *, chunks: int = 0, interval_ms: int = 0) -> Sequence[bytes]:
        """What `target` is asked for."""
        key = (target.is_full, target.takes_ids, chunks, interval_ms)
        if key not in self._written:
            prompts = self._long if target.is_full else self._short
            asked = prompts if target.takes_ids else [str(prompt) for prompt in prompts]
            self._written[key] = [
                write_request(prompt, chunks=chunks, interval_ms=interval_ms) for prompt in asked
            ]
        return self._written[key]


async def sample(target: Target, cell: Cell, round_: int, requests: Requests) -> Sample:
    """Put the load of `cell` on `target`."""
    loop = asyncio.get_running_loop()
    chunks = CHUNKS if cell.is_stream else 0
    stream_s = chunks * cell.interval_ms / 1e3
    seen = [0]
    # In the middle of the second round of streams everybody streams.
    timer = loop.call_later(
        1.75 * stream_s, lambda: seen.append(memory_bytes(target.pid) if cell.is_stream else 0)
    )
    before_s, started_s = cpu_s(target.pid), loop.time()
    times = await call_many(
        target.port,
        requests.of(target, chunks=chunks, interval_ms=cell.interval_ms),
        clients=cell.clients,
        calls=cell.calls,
        events=chunks,
        spread_s=stream_s,
    )
    elapsed_s = loop.time() - started_s
    used_s = cpu_s(target.pid) - before_s - target.idle_cpu_share * elapsed_s
    timer.cancel()
    return Sample(
        name=target.name,
        cell=cell,
        round_=round_,
        cpu_s=used_s,
        elapsed_s=elapsed_s,
        times=times,
        memory_bytes=max(seen),
    )


async def warm_up(target: Target, requests: Requests) -> None:
    """What a first request costs is not what the next ones cost."""
    for interval_ms in (0, 1):
        chunks = 4 if interval_ms else 0
        asked = requests.of(target, chunks=chunks, interval_ms=interval_ms)
        await call_many(target.port, asked, clients=32, calls=640, events=chunks)


async def idle_cpu_share(pid: int) -> float:
    """What the proxy uses without a request."""
    before_s = cpu_s(pid)
    await asyncio.sleep(IDLE_S)
    return (cpu_s(pid) - before_s) / IDLE_S


async def crowd(target: Target, requests: Requests) -> Crowd:
    """512 streaming connections opened at once; then 2,000 streams at a time."""
    seen = Crowd(idle_bytes=memory_bytes(target.pid))
    target = replace(target, is_full=False)
    asked = requests.of(target, chunks=BURST_CHUNKS, interval_ms=BURST_INTERVAL_MS)
    seen.burst = await open_burst(target.port, asked[0], clients=BURST_CLIENTS, events=BURST_CHUNKS)
    asked = requests.of(target, chunks=MANY_CHUNKS, interval_ms=MANY_INTERVAL_MS)

    def look() -> None:
        seen.many_bytes = memory_bytes(target.pid)

    timer = asyncio.get_running_loop().call_later(MANY_SPREAD_S + 1, look)
    seen.many = await call_many(
        target.port,
        asked,
        clients=MANY_CLIENTS,
        calls=MANY_CLIENTS,
        events=MANY_CHUNKS,
        spread_s=MANY_SPREAD_S,
    )
    timer.cancel()
    return seen
