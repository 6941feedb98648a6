"""Events of KV-cache groups that the engine hasn't got: each costs only itself, or ends with a clear."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from indexer.core.types import InstanceId, RankId, Trust

Benching = Callable[..., AbstractAsyncContextManager[Any]]
Event = Callable[..., dict[str, Any]]
Tokens = Callable[..., list[int]]

R0 = RankId(InstanceId("http://e0:8000"), 0)
KIND = "full_attention"


@pytest.mark.parametrize("group", [-1, 64, 10**9], ids=["below-0", "above-63", "absurd"])
async def test_group_number_that_no_model_has_costs_only_its_event(
    benching: Benching, tokens: Tokens, stored: Event, group: int
) -> None:
    """Refused and counted, in a store and a removal; the rank keeps its credit, and tells of it."""
    async with benching() as bench:
        await bench.publish(
            stored(1, 2, group_idx=0, kv_cache_spec_kind=KIND),
            stored(9, first=50, group_idx=group, kv_cache_spec_kind=KIND),
            {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU", "group_idx": group},
        )

        assert await bench.overlap(tokens(40)) == 32
        status = bench.service.rank_status(R0)
        assert status.counts.rejected == {"impossible_group": 2}
        assert (status.trust, status.trust_reason) == (Trust.DEGRADED, "events_refused")

        await bench.publish({"type": "AllBlocksCleared"})
        await bench.service.until(R0, lambda now: now.trust is Trust.EXACT)


async def test_stray_group_is_forgotten_with_a_clear(
    benching: Benching, tokens: Tokens, stored: Event
) -> None:
    """It looks like any other: until then a hit needs its blocks, too, and soon that isn't exact."""
    async with benching() as bench:
        usual = stored(1, 2, group_idx=0, kv_cache_spec_kind=KIND)
        await bench.publish(usual, stored(9, first=50, group_idx=1, kv_cache_spec_kind=KIND))
        assert await bench.overlap(tokens(40)) == 0
        for _ in range(65):
            await bench.publish(usual)
        status = bench.service.rank_status(R0)
        assert (status.trust, status.trust_reason) == (Trust.DEGRADED, "unsupported_group")

        await bench.publish({"type": "AllBlocksCleared"})
        await bench.publish(usual)
        assert await bench.overlap(tokens(40)) == 32
        await bench.service.until(R0, lambda now: now.trust is Trust.EXACT)


async def test_rank_that_refuses_every_store_is_not_exact(
    benching: Benching, tokens: Tokens, stored: Event
) -> None:
    """Nothing is known of its cache; a clear, and the first store that is taken, end that."""
    async with benching() as bench:
        await bench.publish(stored(1, 2, group_idx=0, kv_cache_spec_kind="chunked_local_attention"))
        status = bench.service.rank_status(R0)
        assert (status.trust, status.trust_reason) == (Trust.DEGRADED, "unsupported_group")

        await bench.publish({"type": "AllBlocksCleared"}, stored(1, 2))
        assert await bench.overlap(tokens(40)) == 32
        await bench.service.until(R0, lambda now: now.trust is Trust.EXACT)
