"""`python -m benchmarks.overhead [--quick]`: every proxy in turn, and the tables on stdout.

`make bench-overhead` writes them into RESULTS.md. Loopback only; five minutes, `--quick` one and a
half.
"""

import argparse
import asyncio
import multiprocessing
import os
import platform
import resource
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import uvloop

from benchmarks.interpreter import built
from benchmarks.overhead import proxies
from benchmarks.overhead.engine import EngineAddress, run_engine
from benchmarks.overhead.measure import (
    REQUESTS,
    STREAMS,
    Crowd,
    Requests,
    Sample,
    Target,
    crowd,
    idle_cpu_share,
    sample,
    warm_up,
)
from benchmarks.overhead.report import Results, render

ROUNDS, QUICK_ROUNDS = 3, 1
ENGINES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Everything of one run."""

    samples: Sequence[Sample]
    crowds: dict[str, Crowd]
    targets: Sequence[Target]


def main() -> None:
    """Measure and print."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started is stopped
    options = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__)
    options.add_argument("--quick", action="store_true", help="one round, no crowds")
    options.add_argument("--only", default="", help="of the proxies, those whose name holds this")
    chosen = options.parse_args()
    _allow_many_files()
    missing = {each.name: why for each in proxies.PROXIES if (why := each.missing())}
    wanted = [each for each in proxies.PROXIES if each.name not in missing]
    wanted = [each for each in wanted if chosen.only in each.name]
    with ExitStack() as stack:
        engines = stack.enter_context(_engines())
        targets = [
            Target(name=proxies.DIRECT, pid=os.getpid(), port=engines[0].http, is_full=False)
        ]
        for proxy in list(wanted):
            port = proxies.free_port()
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "run"
            try:
                pid = stack.enter_context(proxies.started(proxy, directory, port, engines))
            except RuntimeError as error:
                missing[proxy.name] = f"{error}: {_last_line(directory / 'log')}"
                continue
            targets.append(
                Target(
                    name=proxy.name,
                    pid=pid,
                    port=port,
                    is_full=proxy.is_full,
                    takes_ids=proxy.takes_ids,
                )
            )
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            rounds = QUICK_ROUNDS if chosen.quick else ROUNDS
            measured = runner.run(_measure(targets, rounds, with_crowds=not chosen.quick))
    print(render(Results(measured.samples), measured.crowds, missing, _notes(rounds, measured)))


async def _measure(targets: Sequence[Target], rounds: int, *, with_crowds: bool) -> Measured:
    requests = Requests()
    for target in targets:
        await warm_up(target, requests)
    targets = [
        replace(each, idle_cpu_share=await idle_cpu_share(each.pid))
        if each.name != proxies.DIRECT
        else each
        for each in targets
    ]
    samples = []
    for round_ in range(rounds):
        for cell in (*REQUESTS, *STREAMS):
            print(f"round {round_ + 1}, {cell} ...", file=sys.stderr, flush=True)
            samples += [await sample(target, cell, round_, requests) for target in targets]
    crowds = {}
    for target in targets[1:] if with_crowds else ():
        print(f"crowds, {target.name} ...", file=sys.stderr, flush=True)
        crowds[target.name] = await crowd(target, requests)
    return Measured(samples=samples, crowds=crowds, targets=targets)


@contextmanager
def _engines() -> Iterator[list[EngineAddress]]:
    """Instant engines, each in a process of its own."""
    addresses = [
        EngineAddress(
            http=proxies.free_port(),
            events=proxies.free_port(),
            replay=proxies.free_port(),
            number=number,
        )
        for number in range(ENGINES)
    ]
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=run_engine, args=(each,)) for each in addresses]
    for process in processes:
        process.start()
    try:
        for each in addresses:
            proxies.wait_for(each.http, "/health")
        yield addresses
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _allow_many_files() -> None:
    """Engines and proxies inherit it."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1][:200] if lines else "it wrote nothing"


def _notes(rounds: int, measured: Measured) -> list[str]:
    idle = ", ".join(
        f"{each.name} {each.idle_cpu_share * 1e3:.1f}" for each in measured.targets[1:]
    )
    machine = (
        f"{datetime.now(UTC):%Y-%m-%d}, {platform.system()} {platform.machine()}, {os.cpu_count()} "
        f"cores shared by load, engines and proxies, Python {platform.python_version()}, "
        f"{built()}"
    )
    return [
        f"{machine}; {rounds} round(s), every proxy in turn in each.",
        f"CPU without a request, ms per second, taken off every figure: {idle}.",
    ]


if __name__ == "__main__":
    main()
