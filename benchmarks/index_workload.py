"""What the index is measured with: encoded frames, and a fleet that holds parts of prompts."""

import random
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from indexer.core.block_tree import BlockTree
from indexer.core.events import decode_batch
from indexer.core.hashing import Namespace
from indexer.core.index import Prompt
from indexer.core.rank_blocks import RankBlocks
from indexer.core.types import InstanceId, RankId
from indexer.memory_index import MemoryIndex

MODEL = "bench"
BLOCK_SIZE = 16
VOCABULARY = 150_000
STORE_BLOCKS = 64
ANSWER_BLOCKS = 28
"""Blocks that follow a long store one by one: 30 % of all."""
CONVERSATION_BLOCKS = STORE_BLOCKS + ANSWER_BLOCKS
EVENTS_PER_FRAME = 8
OPEN_CONVERSATIONS = 8
"""Whole conversations that stay before the oldest begins to be removed."""


def draw_from(seed: int) -> random.Random:
    """The same at every run."""
    return random.Random(seed)  # noqa: S311 - a workload, not a secret


def rank_id(number: int) -> RankId:
    """All ranks are of one instance."""
    return RankId(InstanceId("http://engine:8000"), number)


def encoded_stream(*, as_maps: bool, blocks: int) -> tuple[list[bytes], int]:
    """Encode conversations, and say how many blocks they store.

    70 % of blocks come in 64-hash stores, 30 % in one-hash stores that follow them; a one-hash
    removal (oldest conversation, tail first) comes with each store.
    """
    draw = draw_from(3)
    conversations: list[list[int]] = []
    events: list[dict[str, Any]] = []
    stored = 0
    while stored < blocks:
        chain = [draw.getrandbits(64) for _ in range(STORE_BLOCKS)]
        events.append(stored_event(chain, None, _tokens(draw, STORE_BLOCKS)))
        conversations.append(chain)
        events += _removed(conversations)
        for _ in range(ANSWER_BLOCKS):
            block = draw.getrandbits(64)
            events.append(stored_event([block], chain[-1], _tokens(draw, 1)))
            chain.append(block)
            events += _removed(conversations)
        stored += CONVERSATION_BLOCKS
    sent = events if as_maps else [list(event.values()) for event in events]
    return [
        msgspec.msgpack.encode([1.5, sent[start : start + EVENTS_PER_FRAME], 0])
        for start in range(0, len(sent), EVENTS_PER_FRAME)
    ], stored


def stored_event(
    hashes: Sequence[int], parent: int | None, token_ids: Sequence[int]
) -> dict[str, Any]:
    """One BlockStored as engines send it since 0.24."""
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": list(token_ids),
        "block_size": BLOCK_SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * len(hashes),
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


def _tokens(draw: random.Random, blocks: int) -> list[int]:
    return draw.choices(range(VOCABULARY), k=BLOCK_SIZE * blocks)


def _removed(conversations: list[list[int]]) -> list[dict[str, Any]]:
    if len(conversations) < OPEN_CONVERSATIONS:
        return []
    oldest = conversations[0]
    gone = oldest.pop()
    if not oldest:
        del conversations[0]
    return _removal([gone])


def _removal(hashes: list[int]) -> list[dict[str, Any]]:
    return [{"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU", "group_idx": 0}]


class Fleet:
    """Ranks that share a tree, and the index that they write to."""

    def __init__(self, ranks: int) -> None:
        self.index = MemoryIndex()
        self.tree = BlockTree(is_read=self.index.reads_tables)
        self.ranks = [self.new_rank(number) for number in range(ranks)]

    def new_rank(self, number: int, epoch: int = 1) -> RankBlocks:
        return RankBlocks(rank=rank_id(number), model=MODEL, epoch=epoch, tree=self.tree)

    async def write(self, rank: RankBlocks, frame: bytes) -> None:
        await self.index.apply(rank.apply(0, decode_batch(frame)))


def prompt_frames(token_ids: Sequence[int], seed: int) -> Iterator[bytes]:
    """A prompt as it is stored; equal seeds give equal hashes, as engines of one configuration."""
    draw = draw_from(seed)
    hashes = [draw.getrandbits(64) for _ in range(len(token_ids) // BLOCK_SIZE)]
    for start in range(0, len(hashes), STORE_BLOCKS):
        part = hashes[start : start + STORE_BLOCKS]
        parent = hashes[start - 1] if start else None
        tokens = token_ids[start * BLOCK_SIZE : (start + len(part)) * BLOCK_SIZE]
        yield msgspec.msgpack.encode([1.5, [stored_event(part, parent, tokens)], 0])


def conversations(blocks: int) -> Iterator[bytes]:
    """Frames, each a conversation: a long store, then what follows it block by block."""
    draw = draw_from(4)
    for _ in range(blocks // CONVERSATION_BLOCKS):
        chain = [draw.getrandbits(64) for _ in range(CONVERSATION_BLOCKS)]
        events = [stored_event(chain[:STORE_BLOCKS], None, _tokens(draw, STORE_BLOCKS))]
        events += [
            stored_event([chain[at]], chain[at - 1], _tokens(draw, 1))
            for at in range(STORE_BLOCKS, CONVERSATION_BLOCKS)
        ]
        yield msgspec.msgpack.encode([1.5, events, 0])


def conversation_removals() -> Iterator[bytes]:
    """Frames that remove those of `conversations`, one after the other, each from its end."""
    draw = draw_from(4)
    while True:
        chain = [draw.getrandbits(64) for _ in range(CONVERSATION_BLOCKS)]
        _tokens(draw, CONVERSATION_BLOCKS)  # so that the next hashes are those of the next one
        yield msgspec.msgpack.encode([1.5, _removal(chain[::-1]), 0])


def prompt_tokens(tokens: int, seed: int) -> "array[int]":
    """A prompt of its own for each seed, as the balancer has it once it has read or rendered one."""
    return array("I", draw_from(seed).choices(range(VOCABULARY), k=tokens))


def prompt_of(token_ids: Sequence[int]) -> Prompt:
    """As a request brings it: not hashed yet."""
    return Prompt(Namespace(model=MODEL), token_ids)
