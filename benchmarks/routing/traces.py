"""Workloads: public traces as prompts with arrival times.

Rules:

1. Every block id is a fixed list of pseudo-random tokens, so equal ids are equal prefixes at any
   engine block size that divides the trace's.
2. A seed shifts sessions (rows, where a trace has none) in time, by up to what the trace's own
   clock leaves open; order within a session stays.
3. A speed divides all times; lengths are never changed.
"""

import gzip
import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import msgspec

from indexer.core.hashing import Namespace
from indexer.core.index import Prompt
from kvlb.bench.traces import DATA
from simulator.core.types import TokenArray

MODEL = "m"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One file and what its rows don't tell."""

    file: str
    block_tokens: int
    shift_s: float
    """How far a seed may move a session or row."""


TRACES = {
    "weka": Trace(file="weka_agentic_flat_small.jsonl.gz", block_tokens=64, shift_s=30.0),
    # Its clock ticks every three seconds.
    "arxiv": Trace(file="mooncake_arxiv_first1000.jsonl.gz", block_tokens=512, shift_s=3.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request of a workload."""

    at_s: float
    token_ids: TokenArray
    prompt: Prompt
    """The same tokens as the index sees them."""
    output_tokens: int


class _Row(msgspec.Struct, frozen=True):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]
    session: str | int | None = None


def load_calls(name: str, *, speed: float, seed: int, limit: int | None = None) -> list[Call]:
    """The first `limit` calls of a trace at `speed` times its pace, shifted by `seed`."""
    trace = TRACES[name]
    chance = random.Random(seed)  # noqa: S311 - a benchmark's workload
    shifts_s: dict[object, float] = {}
    calls = []
    for number, (row, tokens, prompt) in enumerate(_rows(name)[:limit]):
        key = number if row.session is None else row.session
        shift_s = shifts_s.setdefault(key, chance.uniform(0.0, trace.shift_s))
        at_s = (row.timestamp / 1000 + shift_s) / speed
        calls.append(
            Call(at_s=at_s, token_ids=tokens, prompt=prompt, output_tokens=row.output_length)
        )
    return sorted(calls, key=lambda call: call.at_s)


@cache
def _rows(name: str) -> Sequence[tuple[_Row, TokenArray, Prompt]]:
    """Rows with their tokens, made once: they cost more than a replay."""
    trace = TRACES[name]
    decoder = msgspec.json.Decoder(_Row)
    with gzip.open(DATA / trace.file) as lines:
        rows = [decoder.decode(line) for line in lines]
    namespace = Namespace(model=MODEL)
    made = []
    for row in rows:
        tokens = array("I")
        for block in row.hash_ids:
            tokens.extend(_block(block, trace.block_tokens))
        tokens = tokens[: row.input_length]
        made.append((row, tokens, Prompt(namespace, tokens)))
    return made


@cache
def _block(number: int, tokens: int) -> TokenArray:
    chance = random.Random(number)  # noqa: S311 - tokens of a block
    return array("I", (chance.randrange(1000, 100_000) for _ in range(tokens)))
