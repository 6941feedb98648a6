"""Runs every benchmark and writes RESULTS.md: `python -m benchmarks`, or `make bench`.

Each one runs in a process of its own, so that none warms up or fragments another's memory.
"""

import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

RESULTS = Path(__file__).parent / "RESULTS.md"


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One module of this package, and what its table answers."""

    module: str
    title: str
    method: str


BENCHMARKS = (
    Benchmark(
        "index",
        "Index",
        "Events applied from encoded frames (70 % of blocks in stores of 64, 30 % in stores of one, "
        "one removal a store), in CPU time, best of several runs. Memory: resident growth of a "
        "fresh process, copies, parents and all tables included, where each rank's hash tables are "
        "just full and where they have just grown. A match: from the turn of the event loop that "
        "the request is due to the answer, hashing the prompt included, while events come in. The "
        "naive layout is `benchmarks/naive_index.py`, in the same run.",
    ),
    Benchmark(
        "index_redis",
        "Index in Redis",
        "Events from encoded frames through the indexer's own writer; lookups alone, and while another process "
        "applies 50,000 blocks/s to the same ranks; commands that touch a whole rank. CPU where it can be told: "
        "Redis, the writer and the reader share the machine.",
    ),
    Benchmark(
        "micro_plan",
        "Plan",
        "One decision (cost of every candidate, prefill or not) on loads as they are mid-flight.",
    ),
    Benchmark(
        "overhead",
        "Proxied requests",
        "CPU of the proxy's whole process tree, from /proc, in front of an engine that answers at "
        "once; nginx, where it is installed, in the same run. The ratio is what carries over to "
        "another machine.",
    ),
)


def run(benchmark: Benchmark) -> str:
    """What the benchmark prints. Raises CalledProcessError if it fails."""
    command = [sys.executable, "-m", f"benchmarks.{benchmark.module}"]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def main() -> None:
    """Run all, write the file."""
    parts = [
        (
            "# Results\n\nWritten by `make bench`; do not edit. Machines are shared and noisy: trust ratios "
            f"more than times.\n\n{datetime.now(UTC):%Y-%m-%d}, {platform.system()} {platform.machine()}, "
            f"{os.cpu_count()} cores, Python {platform.python_version()}."
        )
    ]
    for benchmark in BENCHMARKS:
        print(f"{benchmark.title} ...", file=sys.stderr, flush=True)
        parts.append(
            f"## {benchmark.title}\n\n{benchmark.method}\n\nAgain: `python -m benchmarks.{benchmark.module}`\n\n"
            + run(benchmark)
        )
    RESULTS.write_text("\n\n".join(parts) + "\n")
    print(f"written to {RESULTS}", file=sys.stderr)


if __name__ == "__main__":
    main()
