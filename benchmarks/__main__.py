"""Runs benchmarks and writes RESULTS.md: `python -m benchmarks`, or `make bench`.

Without names it runs all; with names (`python -m benchmarks overhead`) those, and the sections of the
others stay as they are. Each one runs in a process of its own, so that none warms up or fragments
another's memory.
"""

import argparse
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

RESULTS = Path(__file__).parent / "RESULTS.md"
HEAD = (
    "# Results\n\nWritten by `make bench`; do not edit. Machines are shared and noisy: trust ratios "
    "more than times."
)


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One module of this package, and what its table answers."""

    module: str
    title: str
    method: str
    only_if_named: bool = False
    """It takes too long to be run with the others."""


BENCHMARKS = (
    Benchmark(
        "index",
        "Index",
        "Events applied from encoded frames (70 % of blocks in stores of 64, 30 % in stores of one, "
        "one removal a store), in CPU time, best of several runs. Memory: resident growth of a "
        "fresh process, copies, parents and all tables included. Hash tables double, so it is told "
        "on average over a doubling, where all are just full, and where all have just grown at once, "
        "as they do only if every rank holds as much; and there once more after every block has been "
        "replaced twice, when tables of that many entries have stretched furthest. A match as a client sees it: a process that "
        "asks over a socket, one request at a time about a millisecond apart, and waits; and its CPU, "
        "hashing the prompt's tokens included in both, which come as the array that the balancer has of them "
        "(packing a list of 32,768 ints takes 0.13 ms more). Three passes over all cells, and of each cell the "
        "pass whose p99 is the middle one: a slow match is not one that met a batch of events, a garbage collection, a page fault "
        "or a switch of processes (each was looked for), they come in runs, when others use the machine. The naive layout is "
        "`benchmarks/naive_index.py`, in the same run.",
    ),
    Benchmark(
        "index_redis",
        "Index in Redis",
        "Events from encoded frames through the indexer's own writer, the run of least CPU of three; lookups as who asks waits for them, "
        "hashing the prompt's tokens (an array, as the balancer has them) included, one at a time a millisecond apart, alone and while another process "
        "applies 50,000 blocks/s to the same ranks, of three runs the one whose p99 is the middle one; commands that touch a whole rank. CPU where it can be told: "
        "of two cores Redis has one and the writer the other, who asks runs on either (`--share-cores`: all share all, and one lookup "
        "in a hundred waits 3 to 5 ms until Redis gets a core). The ratio is one of Redis's time. With 10 million blocks: "
        "`python -m benchmarks.index_redis --blocks 10000000`, which isn't part of `make bench`.",
    ),
    Benchmark(
        "micro_plan",
        "Plan",
        "One decision (cost of every candidate, prefill or not) on loads as they are mid-flight.",
    ),
    Benchmark(
        "tokens",
        "Tokens",
        "From a chat's messages to ids: shown to its template, rendered, cut, looked up, and the new pieces tokenised. "
        "CPU time of all threads, best of several runs. The next turn has two new messages of about 450 tokens each. The "
        "tokenizer is small (4,096 tokens); with a large one the first reading takes longer, what is known costs the same.",
    ),
    Benchmark(
        "micro_request",
        "Deciding",
        "What lies between a body that was read and the leg on its way, and what the leg's end books, stage by stage "
        "(docs/decisions/0012-bookings-are-chains.md tells what was tried): two mixed instances with events, eight "
        "requests in flight, in one process and without sockets.",
    ),
    Benchmark(
        "decision",
        "Deciding, by ranks and prompts",
        "From a prompt's packed tokens to the booked leg, policy kvlb, index in memory: hashed, looked up in tables "
        "that real events have filled, every rank's cost, chosen, booked. Each rank holds a random part of every conversation "
        "and knows its capacity; four legs per rank are in flight. No prompt is decided twice: each is the beginning of a "
        "conversation, and tokens of its own from there on. The target is a p99 below 2 ms for 32,768 tokens and 64 ranks.",
    ),
    Benchmark(
        "overhead.parts",
        "What a proxied request is made of",
        "A request that isn't streamed, over two instances (16 token ids by round robin; 4,000, half of them cached on one, by the full policy), from the bytes of its "
        "client's connection to those of its answer, with engines and clients in the same process: no system "
        "call is in it, nor what follows events. What a setting leaves out is what it costs, in the company of the rest: "
        "each part finds the processor's caches full of the others, so deciding takes twice what it takes alone "
        "(above). docs/decisions/0010-server-protocol.md has the account, and what was tried.",
    ),
    Benchmark(
        "overhead",
        "Proxied requests",
        "Every proxy in turn, in front of the same two engines that answer at once (or stream a chunk "
        "at an interval), over loopback. CPU: of the proxy's whole process tree, user and system, by "
        "its CPU clock. Memory: proportional set size. Added: a percentile less that of the engine "
        "asked directly. Plain rows: prompts of 16 token ids; kv_aware and kvlb's own policy: 64 "
        "different prompts of 4,000 token ids, of which each engine holds half of every second, "
        "while 1,000 blocks/s are stored and removed on each engine, with events followed by every "
        "kvlb. kvlb writes its log line, metrics and decision log for each request; the others log "
        "nothing. Of figures from a shared machine, the ratios carry over.",
    ),
    Benchmark(
        "huge_prompts",
        "Beside huge prompts",
        "Small streams and /health, in turn alone and beside one prompt of 200,000 tokens a second, each of another "
        "beginning, to engines that answer at once. Longest turns: CPU of the event loop's thread in one callback, while "
        "nothing else is answered. Texts are tokenised in a thread of their own, without the interpreter's lock: that is most of "
        "what they cost, and no turn. Health and gaps as another process sees them: they wait for cores, too, so "
        "compare them with the quiet row.",
    ),
    Benchmark(
        "peers",
        "Routing beside other routers",
        "Real time, over HTTP and ZMQ, four simulated engines with limited caches: docs/peers.md. Seconds; "
        "means over valid repetitions, then kvlb's less each of the others', paired by repetition, "
        "with 95 % intervals.",
        only_if_named=True,
    ),
)


def run(benchmark: Benchmark) -> str:
    """What the benchmark prints. Raises CalledProcessError if it fails."""
    command = [sys.executable, "-m", f"benchmarks.{benchmark.module}"]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def sections(text: str) -> dict[str, str]:
    """Of an earlier RESULTS.md: what stands under each title."""
    found = {}
    for part in text.split("\n## ")[1:]:
        title, _, rest = part.partition("\n")
        found[title] = rest.strip()
    return found


def main() -> None:
    """Run those named, or all, and write the file."""
    names = [each.module for each in BENCHMARKS]
    options = argparse.ArgumentParser(prog="python -m benchmarks")
    options.add_argument("name", nargs="*", help=", ".join(names))
    wanted = options.parse_args().name or [
        each.module for each in BENCHMARKS if not each.only_if_named
    ]
    if unknown := set(wanted) - set(names):
        options.error(f"unknown: {', '.join(unknown)}; there are {', '.join(names)}")
    earlier = sections(RESULTS.read_text()) if RESULTS.exists() else {}
    parts = [HEAD]
    for benchmark in BENCHMARKS:
        if benchmark.module not in wanted:
            if benchmark.title in earlier:
                parts.append(f"## {benchmark.title}\n\n{earlier[benchmark.title]}")
            continue
        print(f"{benchmark.title} ...", file=sys.stderr, flush=True)
        parts.append(
            f"## {benchmark.title}\n\n{benchmark.method}\n\n"
            f"Again: `python -m benchmarks {benchmark.module}`. {_machine()}\n\n{run(benchmark)}"
        )
    RESULTS.write_text("\n\n".join(parts) + "\n")
    print(f"written to {RESULTS}", file=sys.stderr)


def _machine() -> str:
    return (
        f"{datetime.now(UTC):%Y-%m-%d}, {platform.system()} {platform.machine()}, "
        f"{os.cpu_count()} cores, Python {platform.python_version()}."
    )


if __name__ == "__main__":
    main()
