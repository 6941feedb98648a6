"""Ranks and groups whose blocks differ, from encoded events over ZMQ to the routing decision."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec
import pytest

from indexer.config import InstanceSource
from indexer.core.types import InstanceId, RankId, Trust

Benching = Callable[..., AbstractAsyncContextManager[Any]]
Event = Callable[..., dict[str, Any]]
Tokens = Callable[..., list[int]]
MakeBench = Callable[..., Any]

E0, E1 = "http://e0:8000", "http://e1:8000"
R0, R1 = RankId(InstanceId(E0), 0), RankId(InstanceId(E1), 0)

FULL: dict[str, Any] = {"kv_cache_spec_kind": "full_attention"}


@pytest.mark.parametrize(("first", "second"), [(32, 16), (768, 16), (48, 32), (1, 128)])
async def test_each_rank_has_its_own_block_size(
    benching: Benching, first: int, second: int, tokens: Tokens, stored: Event
) -> None:
    """F13, F14: sizes come from events, also such as don't divide each other."""
    length = 2304
    async with benching() as bench:
        await bench.publish(stored(*range(1, length // first + 1), size=first))
        prompt = tokens(length + 1)
        assert await bench.overlap(prompt) == length

        await bench.publish(stored(*range(1, 2 * (length // second) + 1), size=second), on=1)

        assert await bench.overlap(prompt) == length
        assert await bench.overlap(prompt, R1) == length
        assert (await bench.ask(tokens(2 * length)))[0] == R1


async def test_block_size_that_changes_within_a_group_is_refused(
    benching: Benching, tokens: Tokens, stored: Event
) -> None:
    """One group has one size; the event that says otherwise costs itself and is shown."""
    async with benching() as bench:
        await bench.publish(stored(1, 2), stored(7, size=32, first=4))

        assert await bench.overlap(tokens(40)) == 32
        assert bench.trust() is Trust.DEGRADED


async def test_hybrid_groups_agree_on_a_hit(
    benching: Benching, tokens: Tokens, stored: Event, removed: Event
) -> None:
    """Full attention reaches further than the window and the state: they decide."""
    window: dict[str, Any] = {
        "group_idx": 1,
        "kv_cache_spec_kind": "sliding_window",
        "kv_cache_spec_sliding_window": 33,
    }
    mamba: dict[str, Any] = {"group_idx": 2, "kv_cache_spec_kind": "mamba"}
    masked: dict[str, Any] = {"token_ids": tokens(128), "parent_block_hash": None}
    async with benching() as bench:
        # Sparse retention: of eight blocks the window keeps four, the states only checkpoints.
        await bench.publish(
            stored(3, 4, 7, 8, **{**window, **masked}),
            stored(4, 8, **{**mamba, **masked}),
            stored(*range(1, 9), group_idx=0, **FULL),
        )
        assert await bench.overlap(tokens(129)) == 128
        assert await bench.overlap(tokens(113)) == 64

        await bench.publish(removed(8, group_idx=2))
        assert await bench.overlap(tokens(129)) == 64

        await bench.publish(removed(3, group_idx=1))
        assert await bench.overlap(tokens(129)) == 0
        assert bench.trust() is Trust.EXACT


async def test_global_ranks_are_addressed_by_their_local_index(
    publishing: Any, indexing: Any, make_bench: MakeBench, tokens: Tokens, stored: Event
) -> None:
    """The second node of a data-parallel group: events say 4 and 5, its header wants 0 and 1."""
    async with publishing() as first, publishing() as second, publishing() as other:
        rank4, rank5 = (RankId(InstanceId(E0), number) for number in (4, 5))
        sources = [
            InstanceSource(
                url=E0,
                events=_at(first.events, -4),
                replay=_at(first.replay, -4),
                model="tiny",
                ranks=1,
                rank_base=4,
            ),
        ]
        async with indexing(*sources) as (service, index):
            await first.subscribed()
            await service.until(rank4, lambda now: now.trust is Trust.EXACT)
            payload = msgspec.msgpack.encode([2000.0, [stored(1, 2)], 4])
            first.publish_payload(payload)
            status = await service.caught_up(rank4, 0)
            assert status.counts.wrong_rank == 0

            bench = make_bench((first, second, other), service, index, ranks=2)
            chosen, candidates = await bench.ask(tokens(40))

        assert chosen == rank4
        assert candidates[rank5].overlap_tokens == 0
        instance = candidates[rank4].instance
        assert [instance.rank_header(each) for each in (4, 5)] == ["0", "1"]


def _at(endpoint: str, ports: int) -> str:
    """Rank r is found r ports after the configured one."""
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + ports}"
