"""What a rank is about to evict, told from what was sent there."""

import pytest

from balancer.core.load import shadow_cache
from balancer.core.load.shadow_cache import ShadowCache
from indexer.core.types import BlockKey

BLOCK = 512
"""Every block is sampled."""


def keys(first: int, blocks: int) -> list[BlockKey]:
    return [BlockKey(number) for number in range(first, first + blocks)]


def cache(blocks: int) -> ShadowCache:
    made = ShadowCache()
    made.capacity_tokens = blocks * BLOCK
    return made


def test_an_empty_cache_has_room_and_evicts_nothing() -> None:
    """All of it, as far as its size is known."""
    assert cache(10).free_tokens == 10 * BLOCK
    assert cache(10).oldest_s(5.0) == 0
    assert ShadowCache().free_tokens == 0


def test_prompts_and_answers_take_room() -> None:
    """A block that is used again takes no more of it."""
    shadow = cache(10)
    shadow.use(keys(0, 4), BLOCK, 1.0)
    shadow.use(keys(0, 5), BLOCK, 2.0)
    shadow.answer(300, 3.0)
    shadow.answer(300, 4.0)

    assert shadow.free_tokens == (10 - 5 - 1) * BLOCK


def test_what_was_used_longest_ago_leaves_first() -> None:
    """And what leaves next is as old as its last use."""
    shadow = cache(10)
    shadow.use(keys(0, 4), BLOCK, 1.0)
    shadow.use(keys(100, 4), BLOCK, 2.0)
    shadow.use(keys(0, 4), BLOCK, 3.0)
    shadow.use(keys(200, 4), BLOCK, 4.0)

    assert shadow.free_tokens == 0
    assert shadow.oldest_s(10.0) == 8.0
    shadow.use(keys(300, 2), BLOCK, 5.0)
    assert shadow.oldest_s(10.0) == 7.0


def test_it_shrinks_once_its_size_is_known() -> None:
    """Until then it is bounded by itself."""
    shadow = ShadowCache()
    shadow.use(keys(0, 20), BLOCK, 1.0)
    shadow.use(keys(20, 20), BLOCK, 2.0)
    shadow.capacity_tokens = 20 * BLOCK
    shadow.use((), BLOCK, 3.0)

    assert shadow.oldest_s(10.0) == 8.0


def test_it_is_bounded_where_no_size_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of the balancer, not of the engine."""
    monkeypatch.setattr(shadow_cache, "MAX_SAMPLES", 10)
    shadow = ShadowCache()
    shadow.use(keys(0, 10), BLOCK, 1.0)
    shadow.use(keys(10, 10), BLOCK, 2.0)

    assert shadow.oldest_s(10.0) == 8.0


def test_a_restart_leaves_nothing() -> None:
    """All of the room is free again."""
    shadow = cache(10)
    shadow.use(keys(0, 4), BLOCK, 1.0)
    shadow.clear()

    assert shadow.free_tokens == 10 * BLOCK
