"""Costs of the index: block keys, a lookup against 64 ranks, events applied.

Run `python -m benchmarks.micro_index`. Each row is the best and the median of several runs; the
ratio is to a plainer way of doing the same, measured in the same run, which is what to compare
between machines.
"""

import asyncio
import platform
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import msgspec

from indexer.core.events import BlockRemoved, BlockStored, decode_batch
from indexer.core.hashing import Namespace, block_keys, pack_tokens, root_key
from indexer.core.index import BlocksHeld, GroupKind, GroupSpec, Prompt, RankUpdate
from indexer.core.rank_blocks import RankBlocks
from indexer.core.types import BlockKey, InstanceId, RankId, Tier
from indexer.memory_index import MemoryIndex

PROMPT_TOKENS = 100_000
BLOCK_SIZE = 16
RANKS = 64
RUNS = 15
STORE_BLOCKS = 64
EVENTS_PER_FRAME = 8
STREAM_BLOCKS = 20_000
MODEL = "bench"
VOCABULARY = 150_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table."""

    what: str
    unit: str
    best: float
    middle: float
    plain: float
    """The plainer way, in the same unit, best of its runs."""
    plain_what: str
    is_rate: bool = False

    @property
    def ratio(self) -> float:
        """How many times better than the plainer way."""
        return self.best / self.plain if self.is_rate else self.plain / self.best

    def render(self) -> str:
        digits = 0 if self.is_rate else 2
        return (
            f"| {self.what} | {self.best:,.{digits}f} | {self.middle:,.{digits}f} | {self.unit} "
            f"| {self.plain:,.{digits}f} | {self.ratio:.1f} x | {self.plain_what} |"
        )


def _draw(seed: int) -> random.Random:
    return random.Random(seed)  # noqa: S311 - a workload, not a secret


def measure_s(work: Callable[[], object], runs: int = RUNS) -> list[float]:
    """Seconds of each run, fastest first."""
    times = []
    for _ in range(runs):
        start = perf_counter()
        work()
        times.append(perf_counter() - start)
    return sorted(times)


def measure_keys() -> Iterator[Row]:
    """Block keys of one long prompt, from packed tokens and from a list."""
    token_ids = _draw(1).choices(range(VOCABULARY), k=PROMPT_TOKENS)
    packed = pack_tokens(token_ids)
    root = root_key(Namespace(model=MODEL))
    plain = measure_s(lambda: _plain_keys(root, token_ids))
    for what, work in (
        ("keys of 100,000 tokens, packed", lambda: block_keys(root, packed, BLOCK_SIZE)),
        (
            "keys of 100,000 tokens, list",
            lambda: block_keys(root, pack_tokens(token_ids), BLOCK_SIZE),
        ),
    ):
        times = measure_s(work)
        yield Row(
            what=what,
            unit="ms",
            best=times[0] * 1e3,
            middle=median(times) * 1e3,
            plain=plain[0] * 1e3,
            plain_what="a tuple of the parent and 16 tokens hashed per block",
        )


def _plain_keys(root: BlockKey, token_ids: Sequence[int]) -> list[int]:
    key: int = root
    keys = []
    for start in range(0, len(token_ids) - BLOCK_SIZE + 1, BLOCK_SIZE):
        key = hash((key, *token_ids[start : start + BLOCK_SIZE]))
        keys.append(key)
    return keys


def measure_match() -> Row:
    """One long prompt against ranks that hold between none and all of it."""
    draw = _draw(2)
    prompt = Prompt(Namespace(model=MODEL), draw.choices(range(VOCABULARY), k=PROMPT_TOKENS))
    keys = prompt.keys(BLOCK_SIZE)
    holdings = [keys[: draw.randrange(len(keys) + 1)] for _ in range(RANKS)]
    index = MemoryIndex()
    asyncio.run(_fill(index, holdings))
    loop = asyncio.new_event_loop()
    times = measure_s(lambda: loop.run_until_complete(index.match(prompt)), runs=4 * RUNS)
    loop.close()
    sets = [set(held) for held in holdings]
    plain = measure_s(lambda: [_plain_depth(keys, held) for held in sets])
    return Row(
        what="match of 100,000 tokens against 64 ranks",
        unit="ms",
        best=times[0] * 1e3,
        middle=median(times) * 1e3,
        plain=plain[0] * 1e3,
        plain_what="each rank walked block by block",
    )


async def _fill(index: MemoryIndex, holdings: Sequence[Sequence[BlockKey]]) -> None:
    for rank, held in enumerate(holdings):
        update = RankUpdate(
            rank=RankId(InstanceId("http://engine:8000"), rank),
            model=MODEL,
            epoch=1,
            seq=0,
            changes=[
                GroupSpec(group=0, kind=GroupKind.FULL, block_size=BLOCK_SIZE),
                BlocksHeld(0, Tier.GPU, held),
            ],
        )
        await index.apply(update)


def _plain_depth(keys: Sequence[BlockKey], held: set[BlockKey]) -> int:
    for depth, key in enumerate(keys):
        if key not in held:
            return depth
    return len(keys)


def measure_events(*, as_maps: bool) -> Row:
    """Events from encoded frames through decoder, rank and index."""
    frames, blocks = encoded_stream(as_maps=as_maps)
    times = measure_s(lambda: asyncio.run(_apply(frames)))
    plain = measure_s(lambda: _plain_apply(frames), runs=3)
    return Row(
        what=f"events applied ({'maps' if as_maps else 'arrays'})",
        unit="blocks/s",
        best=blocks / times[0],
        middle=blocks / median(times),
        plain=blocks / plain[0],
        plain_what="decoded untyped into a set of engine hashes: no keys, no reachability",
        is_rate=True,
    )


async def _apply(frames: Sequence[bytes]) -> None:
    index = MemoryIndex()
    blocks = RankBlocks(rank=RankId(InstanceId("http://engine:8000"), 0), model=MODEL, epoch=1)
    for seq, frame in enumerate(frames):
        await index.apply(blocks.apply(seq, decode_batch(frame)))
    if blocks.counts:
        raise AssertionError(f"the stream should be clean: {blocks.counts}")


def _plain_apply(frames: Sequence[bytes]) -> set[int]:
    held: set[int] = set()
    for frame in frames:
        for event in decode_batch(frame).events:
            if isinstance(event, BlockStored):
                held.update(event.hashes)
            elif isinstance(event, BlockRemoved):
                held.difference_update(event.hashes)
    return held


def encoded_stream(*, as_maps: bool) -> tuple[list[bytes], int]:
    """Encode conversations, and say how many blocks they store.

    70 % of blocks come in 64-hash stores, 30 % in one-hash stores that follow them; a one-hash
    removal (oldest conversation, tail first) comes with each store.
    """
    draw = _draw(3)
    conversations: list[list[int]] = []
    events: list[dict[str, Any]] = []
    blocks = 0
    while blocks < STREAM_BLOCKS:
        chain = [draw.getrandbits(64) for _ in range(STORE_BLOCKS)]
        events.append(_stored(draw, chain, None))
        conversations.append(chain)
        events += _removed(conversations)
        answers = round(STORE_BLOCKS * 0.3 / 0.7)
        for _ in range(answers):
            block = draw.getrandbits(64)
            events.append(_stored(draw, [block], chain[-1]))
            chain.append(block)
            events += _removed(conversations)
        blocks += STORE_BLOCKS + answers
    sent = events if as_maps else [list(event.values()) for event in events]
    return [
        msgspec.msgpack.encode([1.5, sent[start : start + EVENTS_PER_FRAME], 0])
        for start in range(0, len(sent), EVENTS_PER_FRAME)
    ], blocks


def _stored(draw: random.Random, hashes: Sequence[int], parent: int | None) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": draw.choices(range(VOCABULARY), k=BLOCK_SIZE * len(hashes)),
        "block_size": BLOCK_SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * len(hashes),
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


def _removed(conversations: list[list[int]]) -> list[dict[str, Any]]:
    if len(conversations) < 8:
        return []
    oldest = conversations[0]
    gone = oldest.pop()
    if not oldest:
        del conversations[0]
    return [
        {"type": "BlockRemoved", "block_hashes": [gone], "medium": "GPU", "group_idx": 0},
    ]


def main() -> None:
    """Measure everything and print the table."""
    rows = [
        *measure_keys(),
        measure_match(),
        measure_events(as_maps=True),
        measure_events(as_maps=False),
    ]
    print(f"Python {platform.python_version()}, {platform.machine()}\n")
    print("| what | best | median | unit | plainer way | ratio | which is |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        print(row.render())


if __name__ == "__main__":
    main()
