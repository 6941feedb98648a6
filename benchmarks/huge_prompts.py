"""Small streams and /health beside prompts of 200,000 tokens: `python -m benchmarks.huge_prompts`.

kvlb serves 50 streams and `/health`, in turn without anything else and beside one huge prompt a second:
token ids, a text, a chat, each of another beginning. Asked from another process. Two mixed instances, then
one that prefills and one that decodes.

- *longest turn*: CPU of the event loop's thread in the longest of its callbacks, while nothing else of the
  process can answer. Other programs on the machine don't lengthen it.
- *health*, *gap*: what a client sees, of `/health` and between two pieces of a stream. They wait for cores
  that others use: compare quiet and beside within the run.

The loop is asyncio's own, which can be measured from within; kvlb's usual one runs the same callbacks.
`-v` names the longest turns.
"""

import asyncio
import json
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
from asyncio.events import Handle
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles

import msgspec

from benchmarks.overhead.client import Caller, CallFailedError, connected, write_request
from benchmarks.overhead.engine import MODEL, EngineAddress, run_engine
from benchmarks.overhead.proxies import free_port, wait_for

STREAMS, CHUNKS, INTERVAL_MS = 50, 40, 50
TOKENS = 200_000
WINDOW_S, ROUNDS = 6, 2
HEALTH_S = 0.02
QUIET = "quiet"
KINDS = ("token ids", "text", "chat")
FLEETS: Mapping[str, tuple[Sequence[Mapping[str, str]], Sequence[str]]] = {
    "mixed": (({}, {}), (QUIET, *KINDS)),
    "prefill/decode": (
        ({"role": "prefill", "connector": "example"}, {"role": "decode", "connector": "example"}),
        (QUIET, KINDS[0]),
    ),
}
"""What each instance is, and what is measured of them."""
NOTICED_S = 0.001
KEPT_TURNS = 40
TOKENIZER = Path(__file__).parent.parent / "tests/tokenizer"
Served = subprocess.Popen[bytes]
_HEALTH = b"GET /health HTTP/1.1\r\nhost: balancer.example\r\n\r\n"


@dataclass(slots=True)
class Seen:
    """What one kind of window showed, over all rounds."""

    health_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    turns: list[tuple[float, str]] = field(default_factory=list)
    cpu_s: float = 0.0
    huge: int = 0
    failed: Counter[str] = field(default_factory=Counter)


class Turns:
    """CPU of every callback of this process's loop; the longest are kept until they are asked for."""

    def __init__(self) -> None:
        self.longest: list[tuple[float, str]] = []

    def measure(self) -> None:
        """From now on, for good."""
        run = Handle._run  # noqa: SLF001 - the one place that every callback passes

        def measured(handle: Handle) -> None:
            started_s = time.thread_time()
            callback = handle._callback  # type: ignore[attr-defined]  # noqa: SLF001
            run(handle)
            took_s = time.thread_time() - started_s
            if took_s > NOTICED_S:
                self.longest.append((took_s, _named(callback)))

        Handle._run = measured  # type: ignore[method-assign]  # noqa: SLF001

    def take(self) -> bytes:
        """Those since the last time, as a line of JSON."""
        longest, self.longest = sorted(self.longest, reverse=True)[:KEPT_TURNS], []
        return json.dumps([longest, time.process_time()]).encode() + b"\n"


def _named(callback: object) -> str:
    """What it belongs to: of a task, the coroutine that it was in when it ended its turn."""
    task = getattr(callback, "__self__", callback)
    coroutine = getattr(task, "get_coro", lambda: None)()
    while inner := getattr(coroutine, "cr_await", None):
        if not hasattr(inner, "cr_code"):
            break
        coroutine = inner
    return getattr(coroutine or callback, "__qualname__", repr(callback))


def serve(config: Path) -> None:
    """Run kvlb and answer each line of standard input with its longest turns."""
    from kvlb.event_loop import spare_startup_objects  # noqa: PLC0415 - of this process only
    from kvlb.logs import configure_logs  # noqa: PLC0415
    from kvlb.running import run_kvlb  # noqa: PLC0415
    from kvlb.settings import Overrides, load_fleet  # noqa: PLC0415

    configure_logs()
    turns = Turns()
    turns.measure()

    async def run() -> None:
        stop = asyncio.Event()

        def answer() -> None:
            if os.read(0, 100):
                os.write(1, turns.take())
            else:
                stop.set()

        asyncio.get_running_loop().add_reader(0, answer)
        settings = load_fleet(config, Overrides(), os.environ)
        await run_kvlb(settings, stop=stop, on_listening=lambda _: spare_startup_objects())

    asyncio.run(run())


def huge_request(kind: str, number: int) -> bytes:
    """A request like no other from its beginning on."""
    draw = random.Random(number)  # noqa: S311 - a workload, not a secret
    if kind == "token ids":
        ids = [draw.randrange(4, 4000) for _ in range(TOKENS)]
        return write_request(ids)
    words = [f"w{draw.randrange(1000)}" for _ in range(TOKENS // 4)]
    text = f"{number} " + " ".join(words)
    if kind == "text":
        return write_request(text)
    request = write_request("")
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 16}
    raw = json.dumps(body).encode()
    head = request.partition(b"\r\n\r\n")[0].replace(b"/v1/completions", b"/v1/chat/completions")
    lines = [each for each in head.split(b"\r\n") if not each.startswith(b"content-length")]
    return b"\r\n".join([*lines, b"content-length: %d" % len(raw), b"", raw])


class StreamReader(Caller):
    """A stream that notes when its pieces came."""

    def __init__(self) -> None:
        super().__init__()
        self.came_s: list[float] = []

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self.came_s.append(time.perf_counter())


async def stream(port: int, seen: Seen, until_s: float) -> None:
    """Streams one after the other on one connection."""
    loop = asyncio.get_running_loop()
    _, reader = await loop.create_connection(StreamReader, "127.0.0.1", port)
    request = write_request([1, 2, 3, 4], chunks=CHUNKS, interval_ms=INTERVAL_MS)
    while time.perf_counter() < until_s:
        reader.came_s.clear()
        try:
            await reader.call(request, CHUNKS)
        except (CallFailedError, TimeoutError) as error:
            seen.failed[str(error) or "timeout"] += 1
            break
        pairs = zip(reader.came_s, reader.came_s[1:], strict=False)
        seen.gaps_s += [later - earlier for earlier, later in pairs]
    reader.close()


async def ask_health(port: int, seen: Seen, until_s: float) -> None:
    """Again and again, on one connection."""
    async with connected(port, 1) as (caller,):
        while time.perf_counter() < until_s:
            started_s = time.perf_counter()
            await caller.call(_HEALTH, 0)
            seen.health_s.append(time.perf_counter() - started_s)
            await asyncio.sleep(HEALTH_S)


async def ask_huge(port: int, seen: Seen, until_s: float, requests: Iterator[bytes]) -> None:
    """One a second, whether or not the one before it is done."""

    async def call(request: bytes) -> None:
        async with connected(port, 1) as (caller,):
            try:
                await caller.call(request, 0)
            except (CallFailedError, TimeoutError) as error:
                seen.failed[str(error) or "timeout"] += 1

    async with asyncio.TaskGroup() as group:
        while time.perf_counter() < until_s:
            group.create_task(call(next(requests)))
            seen.huge += 1
            await asyncio.sleep(1)


async def watch(port: int, seen: Seen, requests: Iterator[bytes] | None) -> None:
    """One window."""
    until_s = time.perf_counter() + WINDOW_S
    async with asyncio.TaskGroup() as group:
        for number in range(STREAMS):
            group.create_task(stream(port, seen, until_s))
            await asyncio.sleep(INTERVAL_MS / 1e3 / STREAMS * (1 + number % 2))
        group.create_task(ask_health(port, seen, until_s))
        if requests is not None:
            group.create_task(ask_huge(port, seen, until_s, requests))


@contextmanager
def serving(instances: Sequence[Mapping[str, str]]) -> Iterator[tuple[int, Served]]:
    """Kvlb in a process of its own, and its port."""
    port = free_port()
    settings = {
        "port": port,
        "instances": list(instances),
        "tokens": {"models": {MODEL: str(TOKENIZER)}},
    }
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "kvlb.yaml"
        config.write_bytes(msgspec.yaml.encode(settings))
        command = [sys.executable, "-m", "benchmarks.huge_prompts", "serve", str(config)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as process:
            try:
                wait_for(port, "/ready", lambda: process.poll() is not None)
                yield port, process
            finally:
                process.terminate()


def turns_of(process: Served) -> tuple[list[tuple[float, str]], float]:
    """The longest since the last time, and CPU seconds of the process so far."""
    assert process.stdin is not None  # noqa: S101 - for the types
    assert process.stdout is not None  # noqa: S101
    process.stdin.write(b"\n")
    process.stdin.flush()
    while not (line := process.stdout.readline()).startswith(b"[["):
        pass  # log lines
    longest, cpu_s = json.loads(line)
    return [tuple(each) for each in longest], cpu_s


@contextmanager
def two_engines() -> Iterator[Sequence[EngineAddress]]:
    """Each a process of its own."""
    engines = [
        EngineAddress(http=free_port(), events=free_port(), replay=free_port(), number=number)
        for number in range(2)
    ]
    processes = [multiprocessing.Process(target=run_engine, args=(each,)) for each in engines]
    for process in processes:
        process.start()
    try:
        for each in engines:
            wait_for(each.http, "/health")
        yield engines
    finally:
        for process in processes:
            process.terminate()


def main() -> None:
    """Measure, and print a table."""
    if sys.argv[1:2] == ["serve"]:
        serve(Path(sys.argv[2]))
        return
    rows: list[str] = []
    details: list[str] = []
    with two_engines() as engines:
        for fleet, (parts, kinds) in FLEETS.items():
            urls = [each.url for each in engines]
            instances = [{"url": url, **part} for url, part in zip(urls, parts, strict=True)]
            with serving(instances) as (port, kvlb):
                found = measure(port, kvlb, kinds)
            rows += [row(fleet, kind, seen, found[QUIET]) for kind, seen in found.items()]
            details += [
                f"{fleet}, {kind}: {took_s * 1e3:.1f} ms {what}"
                for kind, seen in found.items()
                for took_s, what in sorted(seen.turns, reverse=True)[:8]
            ]
    print(f"{STREAMS} streams, a piece every {INTERVAL_MS} ms; prompts of {TOKENS:,} tokens.\n")
    print(
        "| fleet | beside | longest turns (ms of CPU) | kvlb's CPU per prompt (ms) "
        "| health p50, p99, most (ms) | gap p50, p99, most (ms) | failed |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    print("\n".join(rows))
    if "-v" in sys.argv:
        print("\n".join(["", *details]))


def measure(port: int, kvlb: Served, kinds: Sequence[str]) -> Mapping[str, Seen]:
    """Every kind in turn, several times."""
    found = {kind: Seen() for kind in kinds}
    asyncio.run(watch(port, Seen(), None))  # until engines, rates and imports are known
    for round_number in range(ROUNDS):
        for number, (kind, seen) in enumerate(found.items()):
            base = (round_number * len(found) + number) * 1000
            asked = range(base, base + WINDOW_S + 2)
            requests = None if kind == QUIET else [huge_request(kind, each) for each in asked]
            _, before_s = turns_of(kvlb)
            asyncio.run(watch(port, seen, requests and iter(requests)))
            longest, after_s = turns_of(kvlb)
            seen.turns += longest
            seen.cpu_s += after_s - before_s
    return found


def row(fleet: str, kind: str, seen: Seen, quiet: Seen) -> str:
    """One line of the table."""
    longest = sorted(seen.turns, reverse=True)[:3]
    turns = ", ".join(f"{took_s * 1e3:.0f}" for took_s, _ in longest)
    extra = f"{(seen.cpu_s - quiet.cpu_s) / seen.huge * 1e3:.0f}" if seen.huge else ""
    health, gap = _spread(seen.health_s), _spread(seen.gaps_s)
    failed = ", ".join(f"{times} {why}" for why, times in seen.failed.items()) or "0"
    return f"| {fleet} | {kind} | {turns} | {extra} | {health} | {gap} | {failed} |"


def _spread(times_s: list[float]) -> str:
    cuts = quantiles(times_s, n=100)
    return ", ".join(f"{each * 1e3:.1f}" for each in (cuts[49], cuts[98], max(times_s)))


if __name__ == "__main__":
    main()
