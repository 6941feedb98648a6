"""Public traces as calls. What each file is and where it is from: data/README.md.

Rules:

1. Equal block ids of a trace are equal prefixes; an id makes as many keys as engine blocks fit in.
   What an answer leaves in the cache is asked for by nobody, since traces don't say what it was.
2. Traces with times are sent at them, whatever became of earlier calls. A seed shifts sessions
   (rows, where a trace has none) by up to what its own clock leaves open.
3. Chats have text and no times. A fixed tokenizer of our own makes tokens of it. Each next call
   waits for the answer before it, which it repeats, and then for a tool.
4. More engines get more copies of a trace with sessions. A copy shares with the others what its
   sessions shared among each other (system prompt, tools), and nothing else.
"""

import gzip
import json
import random
import re
import zlib
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from indexer.core.hashing import Namespace
from indexer.core.index import Prompt
from indexer.core.types import BlockKey
from kvlb.bench.calls import MODEL, Call, KeyedPrompt

DATA = Path(__file__).parent / "data"
TOOL_S = 1.0
"""Mean pause between an answer and the next call of a chat."""
CHATS_PER_S = 1.0
_TOKEN = re.compile(r" ?[^\W_]{1,6}|\s+|[^\w\s]|_")
_ANSWER_BIT, _COPY_BIT = 24, 48
"""Keys of traces are small numbers: from these bits on there is room to tell answers and copies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One call of a trace at its own pace, before seeds and copies."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    keys: tuple[BlockKey, ...]
    """Of prompt and answer."""
    session: str | None = None
    after: int | None = None
    """Number of the row it waits for."""


class _TraceRow(msgspec.Struct, frozen=True):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]
    session: str | int | None = None


def read_ids(path: Path, *, trace_block: int, block_size: int, limit: int | None) -> list[Row]:
    """A trace of block ids in Mooncake's format."""
    decoder = msgspec.json.Decoder(_TraceRow)
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
        rows = [decoder.decode(line) for line, _ in zip(lines, range(limit or 10**9), strict=False)]
    return [
        Row(
            at_s=row.timestamp / 1000,
            prompt_tokens=row.input_length,
            output_tokens=max(1, row.output_length),
            keys=_keys(number, row, trace_block, block_size),
            session=None if row.session is None else str(row.session),
        )
        for number, row in enumerate(rows)
    ]


def _keys(number: int, row: _TraceRow, trace_block: int, block_size: int) -> tuple[BlockKey, ...]:
    parts = trace_block // block_size
    prompt_blocks = row.input_length // block_size
    prompt = [part for each in row.hash_ids for part in range(each * parts, (each + 1) * parts)]
    blocks = (row.input_length + row.output_length) // block_size
    answer = (number + 1) << _ANSWER_BIT
    keys = [*prompt[:prompt_blocks], *(answer + block for block in range(blocks - prompt_blocks))]
    return tuple(map(BlockKey, keys))


def read_chats(path: Path, *, block_size: int) -> list[Row]:
    """Chats of an agent: one row per request point."""
    namespace = Namespace(model=MODEL)
    rows: list[Row] = []
    with gzip.open(path) as lines:
        chats = [json.loads(line) for line in lines]
    for chat in chats:
        name, messages = chat["id"], chat["messages"]
        previous = None
        for point in chat["request_points"]:
            tokens = _tokens([*map(_render, messages[:point]), "<assistant>"])
            answer = _tokens([_render(messages[point]).removeprefix("<assistant>")])
            whole = Prompt(namespace, tokens + answer)
            rows.append(
                Row(
                    at_s=0.0,
                    prompt_tokens=len(tokens),
                    output_tokens=len(answer),
                    keys=tuple(whole.keys(block_size)),
                    session=name,
                    after=previous,
                )
            )
            previous = len(rows) - 1
    return rows


def _render(message: dict[str, Any]) -> str:
    calls = json.dumps(message["tool_calls"]) if message.get("tool_calls") else ""
    return f"<{message['role']}>{message['content'] or ''}{calls}<end>"


def _tokens(texts: Iterable[str]) -> "array[int]":
    # Part by part, so that a prompt's tokens begin with those of the prompt it continues.
    found = (piece for text in texts for piece in _TOKEN.findall(text))
    return array("I", (zlib.crc32(piece.encode()) % 100_000 for piece in found))


def copied(rows: Sequence[Row], copies: int) -> list[Row]:
    """`rows` several times, as sessions of other users of the same application."""
    sessions = Counter(key for _, key in {(row.session, key) for row in rows for key in row.keys})
    made: list[Row] = []
    for copy in range(copies):
        first, offset = len(made), copy << _COPY_BIT
        for row in rows:
            keys = [key if sessions[key] > 1 else BlockKey(key ^ offset) for key in row.keys]
            made.append(
                replace(
                    row,
                    keys=tuple(keys),
                    session=f"{row.session}/{copy}",
                    after=None if row.after is None else row.after + first,
                )
            )
    return made


def as_calls(
    rows: Sequence[Row], *, block_size: int, speed: float, shift_s: float, seed: int
) -> list[Call]:
    """Rows with times, at `speed` times their pace, each session shifted by `seed`."""
    chance = random.Random(seed)  # noqa: S311 - a benchmark's workload
    shifts_s: dict[object, float] = {}
    calls = []
    for number, row in enumerate(rows):
        key = number if row.session is None else row.session
        at_s = row.at_s + shifts_s.setdefault(key, chance.uniform(0.0, shift_s))
        calls.append(_call(row, at_s / speed, block_size))
    return sorted(calls, key=lambda call: call.at_s)


def as_sessions(rows: Sequence[Row], *, block_size: int, speed: float, seed: int) -> list[Call]:
    """Chats that begin at random times, `speed` times as many a second, in random order."""
    chance = random.Random(seed)  # noqa: S311 - a benchmark's workload
    names = list(dict.fromkeys(row.session for row in rows))
    chance.shuffle(names)
    begins_s, now_s = {}, 0.0
    for name in names:
        now_s += chance.expovariate(CHATS_PER_S)
        begins_s[name] = now_s
    return [
        _call(
            row,
            begins_s[row.session] / speed if row.after is None else chance.expovariate(1 / TOOL_S),
            block_size,
        )
        for row in rows
    ]


def _call(row: Row, at_s: float, block_size: int) -> Call:
    return Call(
        at_s=at_s,
        prompt=_prompt(row, block_size),
        keys=row.keys,
        output_tokens=row.output_tokens,
        session=row.session,
        after=row.after,
    )


@cache
def _prompt(row: Row, block_size: int) -> KeyedPrompt:
    """One per row: it is read only, and a table replays a row hundreds of times."""
    return KeyedPrompt(row.prompt_tokens, row.keys[: row.prompt_tokens // block_size], block_size)
