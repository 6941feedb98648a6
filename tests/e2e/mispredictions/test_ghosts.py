"""Blocks that an engine, or the index, has not: the first that are found out take the others along."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from indexer.core.events import BlockStored
from indexer.core.types import EngineHash, InstanceId, RankId
from indexer.service import IndexerService
from simulator.core import types as engine_events
from simulator.core.generation import seed_answer
from simulator.core.live_request import LiveRequest

Composed = Callable[..., AbstractAsyncContextManager[Any]]
MakeTokens = Callable[[int, int], list[int]]
BLOCK = 16
GHOSTS = 1000
MOST_REQUESTS = 20


def true_hashes(token_ids: Sequence[int]) -> list[bytes]:
    """As the simulated engine would name these blocks."""
    request = engine_events.EngineRequest(
        request_id="x", prompt_token_ids=token_ids, sampler=seed_answer(token_ids, 0), max_tokens=1
    )
    live = LiveRequest(request)
    live.extend_hashes(len(token_ids) // BLOCK, BLOCK, b"vllm-none-hash")
    return live.hashes


def announced(token_ids: Sequence[int]) -> engine_events.BlockStored:
    """An event by which an engine lies: it has no such blocks."""
    hashes = tuple(true_hashes(token_ids))
    return engine_events.BlockStored(
        hashes=hashes,
        parent=None,
        token_ids=list(token_ids),
        block_size=BLOCK,
        extra_keys=(None,) * len(hashes),
    )


async def plant(indexer: IndexerService, url: str, chains: Sequence[Sequence[int]]) -> None:
    """Corrupt the running indexer's tables of one rank, and with them the index."""
    rank = RankId(InstanceId(url), 0)
    writer = indexer._instances[rank.instance].ranks[rank][0]._writer
    hashes = [
        [EngineHash(int.from_bytes(each[-8:], "big")) for each in true_hashes(chain)]
        for chain in chains
    ]
    events: list[Any] = [
        BlockStored(held, None, list(chain), BLOCK)
        for held, chain in zip(hashes, chains, strict=True)
    ]
    await writer.keeper.prune(writer.blocks, lambda: events)  # it takes in whatever it is given


async def test_ghosts_under_one_root_go_with_the_first_that_is_found_out(
    composed: Composed, tokens: MakeTokens
) -> None:
    """The engine announced 1,000 blocks that it never had; 1,000 true ones keep their credit."""
    root = tokens(500, 40)
    branches = [[*root, *tokens(600 + number, 30)] for number in range(32)]
    async with composed() as kvlb:
        kvlb.engines[0].engine.ranks[0].publisher.publish([announced(each) for each in branches])
        await kvlb.fill_truly()
        assert await kvlb.overlap(branches[-1]) == 70

        asked = 0
        for number in range(MOST_REQUESTS):
            await kvlb.ask(branches[number])
            asked += 1
            if await kvlb.overlap(branches[-1]) <= 40:
                break

        async def is_harmless() -> object:
            return await kvlb.overlap(branches[-1]) <= 40

        await kvlb.until(is_harmless)
        assert asked <= MOST_REQUESTS
        assert await kvlb.has_true_blocks()
        assert await kvlb.metric("kvlb_mispredictions_total", instance="m0", cause="ghost") >= 1
        assert await kvlb.metric("kvlb_pruned_blocks_total", instance="m0") >= GHOSTS - 30 * asked
        assert await kvlb.metric("kvlb_predictions_total", outcome="over") >= 1


@pytest.mark.parametrize("composed", ["memory", "redis"], indirect=True)
async def test_scattered_ghosts_of_the_index_go_with_a_rebuild(
    composed: Composed, tokens: MakeTokens
) -> None:
    """What only our tables have, in chains of their own: a few are found out, and all is told anew."""
    chains = [tokens(700 + number, 10) for number in range(100)]
    async with composed() as kvlb:
        assert kvlb.indexer is not None
        await plant(kvlb.indexer, kvlb.engines[0].url, chains)
        await kvlb.fill_truly()
        assert await kvlb.overlap(chains[-1]) == 10
        await kvlb.agree()

        for number in range(MOST_REQUESTS):
            await kvlb.ask(chains[number])
            if await kvlb.overlap(chains[-1]) == 0:
                break

        await kvlb.until(lambda: kvlb.lacks(chains[-1], "m0"))
        assert await kvlb.metric("kvlb_epochs_total", instance="m0", reason="rebuilt") == 1
        assert await kvlb.metric("kvlb_mispredictions_total", cause="ghost") >= 5

        async def is_whole_again() -> object:
            return await kvlb.has_true_blocks() and await kvlb.trust() == "exact"

        await kvlb.until(is_whole_again)


async def test_evictions_that_are_told_late_are_no_ghosts(
    composed: Composed, tokens: MakeTokens
) -> None:
    """A small cache under concurrent traffic: events explain what was wrong, nothing is pruned."""

    async def converse(kvlb: Any, first: int) -> None:
        for number in range(12):
            await kvlb.ask(tokens((first + number * 3) % 7, 60))

    async with composed("1", num_blocks=300) as kvlb:
        async with asyncio.TaskGroup() as group:
            for first in range(4):
                group.create_task(converse(kvlb, first))
        await kvlb.until(lambda: kvlb.is_counted("evicted_since"))

        causes = ("ghost", "unseen", "recompute_untold", "index_differs")
        counted = {
            cause: await kvlb.metric("kvlb_mispredictions_total", cause=cause) for cause in causes
        }
        assert counted == dict.fromkeys(causes, 0)
        assert await kvlb.metric("kvlb_pruned_blocks_total") == 0
        assert await kvlb.trust() == "exact"
