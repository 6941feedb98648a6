"""What the Redis benchmark writes: event streams, ranks that hold a prompt, a process that applies.

`python -m benchmarks.redis_workload URL RANKS TOKENS RATE` fills RANKS ranks, says so, and applies RATE
blocks/s to them once it reads a line, until its standard input ends.
"""

import asyncio
import random
import sys
import time
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Any

import msgspec
import uvloop

from indexer.config import RankSource
from indexer.core.events import BlockStored, EventBatch, decode_batch
from indexer.core.hashing import Namespace
from indexer.core.index import Prompt
from indexer.core.rank_blocks import RankBlocks
from indexer.core.types import EngineHash, InstanceId, RankId
from indexer.rank_keeper import RankKeeper
from indexer.redis_index.connection import RedisConnection
from indexer.redis_index.redis_index import RedisIndex
from indexer.redis_index.settings import RedisSettings
from indexer.turns import WRITING_TURN_S, Turns
from kvlb.event_loop import spare_startup_objects

MODEL = "model"
BLOCK_SIZE = 16
VOCABULARY = 150_000
STORE_BLOCKS = 64
ANSWERS = round(STORE_BLOCKS * 0.3 / 0.7)
"""One-hash stores that follow each long one."""
EVENTS_PER_FRAME = 8
KEPT_CONVERSATIONS = 8


def draw(seed: int) -> random.Random:
    """Chance that repeats."""
    return random.Random(seed)  # noqa: S311 - a workload, not a secret


def opened(url: str) -> RedisConnection:
    """A connection that waits for whatever is measured; nobody renews leases meanwhile."""
    times = {"write_timeout_s": 60.0, "read_timeout_s": 60.0, "lease_s": 3600.0}
    return RedisConnection(RedisSettings(url=url, **times))


def prompt_tokens(tokens: int) -> "array[int]":
    """What ranks hold and lookups ask for, as the balancer has it."""
    return array("I", draw(1).choices(range(VOCABULARY), k=tokens))


def prompt_of(token_ids: Sequence[int]) -> Prompt:
    """As a balancer asks for it."""
    return Prompt(Namespace(model=MODEL), token_ids)


def event_frames(conversations: int, seed: int = 3) -> tuple[list[bytes], int]:
    """Encoded frames and how many blocks they store. They end empty, so they can come again.

    70 % of blocks come in 64-hash stores, 30 % in one-hash stores that follow them; a one-hash
    removal (oldest conversation, tail first) comes with each store.
    """
    dice = draw(seed)
    held: list[list[int]] = []
    events: list[dict[str, Any]] = []
    for _ in range(conversations):
        chain = [dice.getrandbits(64) for _ in range(STORE_BLOCKS)]
        events.append(_stored(dice, chain, None))
        held.append(chain)
        events += _removed(held, KEPT_CONVERSATIONS)
        for _ in range(ANSWERS):
            block = dice.getrandbits(64)
            events.append(_stored(dice, [block], chain[-1]))
            chain.append(block)
            events += _removed(held, KEPT_CONVERSATIONS)
    frames = [
        msgspec.msgpack.encode([1.5, events[start : start + EVENTS_PER_FRAME], 0])
        for start in range(0, len(events), EVENTS_PER_FRAME)
    ]
    left = [block for chain in held for block in reversed(chain)]
    gone = {"type": "BlockRemoved", "block_hashes": left, "medium": "GPU", "group_idx": 0}
    frames.append(msgspec.msgpack.encode([1.5, [gone], 0]))
    return frames, conversations * (STORE_BLOCKS + ANSWERS)


def _stored(dice: random.Random, hashes: Sequence[int], parent: int | None) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": dice.choices(range(VOCABULARY), k=BLOCK_SIZE * len(hashes)),
        "block_size": BLOCK_SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * len(hashes),
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


def _removed(held: list[list[int]], kept: int) -> Iterator[dict[str, Any]]:
    if len(held) < kept:
        return
    gone = held[0].pop()
    if not held[0]:
        del held[0]
    yield {"type": "BlockRemoved", "block_hashes": [gone], "medium": "GPU", "group_idx": 0}


class WrittenRank:
    """One rank with its tables, as the indexer has it."""

    def __init__(self, index: RedisIndex, number: int, epoch: int = 1) -> None:
        self.id = RankId(InstanceId("http://engine:8000"), number)
        self.faults: Counter[str] = Counter()
        self.blocks = RankBlocks(rank=self.id, model=MODEL, epoch=epoch, keeps_rows=True)
        source = RankSource(rank=self.id, alias="engine", model=MODEL, events="", replay=None)
        self.keeper = RankKeeper(
            index=index,
            journal=index,
            source=source,
            faults=self.faults,
            on_progress=lambda: None,
            turns=Turns(),
        )
        self._seq = 0

    async def open(self) -> None:
        await self.keeper.open(self.blocks)

    async def take_in(self, frame: bytes) -> None:
        """One message of its engine."""
        await self.keeper.apply(self.blocks, self._seq, decode_batch(frame), frame)
        self._seq += 1

    async def hold(self, token_ids: Sequence[int], blocks: int) -> None:
        """Store the first blocks of a prompt, in steps as an engine does."""
        parent = None
        for start in range(0, blocks, 512):
            count = min(512, blocks - start)
            hashes = [EngineHash(2**63 + start + each) for each in range(count)]
            tokens = list(token_ids[start * BLOCK_SIZE : (start + count) * BLOCK_SIZE])
            event = BlockStored(hashes, parent, tokens, BLOCK_SIZE, kind="full_attention")
            batch = EventBatch(1.0, 0, [event])
            await self.keeper.apply(self.blocks, self._seq, batch, bytes(64 * count))
            self._seq += 1
            parent = hashes[-1]

    async def is_written(self) -> None:
        """Wait until the index has all of it."""
        while True:
            if not self.keeper.has_unwritten:
                break
            await asyncio.sleep(0)
        if self.faults:
            raise AssertionError(f"Redis should take everything: {self.faults}")


async def fill(ranks: Sequence[WrittenRank], tokens: int) -> None:
    """Ranks that hold between none and all of the prompt."""
    dice, token_ids = draw(2), prompt_tokens(tokens)
    for rank in ranks:
        await rank.open()
        await rank.hold(token_ids, dice.randrange(tokens // BLOCK_SIZE + 1))
    for rank in ranks:
        await rank.is_written()


async def apply_at(ranks: Sequence[WrittenRank], blocks_per_s: float) -> None:
    """Feed all ranks in turn at this rate until cancelled."""
    frames, blocks = event_frames(60)
    per_frame = blocks / len(frames)
    feeds = cycle([(rank, iter(cycle(frames))) for rank in ranks])
    began_s, fed = time.monotonic(), 0.0
    while True:
        until_s = time.monotonic() + WRITING_TURN_S
        while fed < (time.monotonic() - began_s) * blocks_per_s and time.monotonic() < until_s:
            rank, feed = next(feeds)
            await rank.take_in(next(feed))
            fed += per_frame
        await asyncio.sleep(WRITING_TURN_S)


async def _serve(url: str, count: int, tokens: int, blocks_per_s: float) -> None:
    index = RedisIndex(RedisConnection(RedisSettings(url=url)))
    ranks = [WrittenRank(index, number) for number in range(count)]
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(rank.keeper.run()) for rank in ranks]
        await fill(ranks, tokens)
        print("filled", flush=True)
        if await loop.run_in_executor(None, sys.stdin.readline):
            tasks.append(group.create_task(apply_at(ranks, blocks_per_s)))
            await loop.run_in_executor(None, sys.stdin.readline)
        for task in tasks:
            task.cancel()
    await index.aclose()


if __name__ == "__main__":
    _url, _ranks, _tokens, _rate = sys.argv[1:]
    spare_startup_objects()
    uvloop.run(_serve(_url, int(_ranks), int(_tokens), float(_rate)))
