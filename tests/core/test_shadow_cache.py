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


def test_withdrawn_promises_leave_all_as_it_was() -> None:
    """What would have left for them is back, in its order, and so is the room."""
    shadow = cache(10)
    shadow.computed(shadow.use(keys(0, 4), BLOCK, 1.0))
    shadow.computed(shadow.use(keys(100, 4), BLOCK, 2.0))
    first = shadow.use(keys(200, 6), BLOCK, 3.0)
    second = shadow.use(keys(300, 4), BLOCK, 4.0)
    in_flight = shadow.oldest_s(10.0)
    shadow.withdraw(first)
    one_left = shadow.oldest_s(10.0)
    shadow.withdraw(second)

    assert (in_flight, one_left) == (7.0, 9.0)
    assert shadow.free_tokens == 2 * BLOCK
    shadow.computed(shadow.use(keys(400, 6), BLOCK, 5.0))
    assert shadow.oldest_s(10.0) == 8.0


def test_promise_of_two_stays_until_both_withdraw() -> None:
    """Once one of them is computed it is there, whatever comes of the other."""
    shadow = cache(10)
    first, second = (shadow.use(keys(0, 4), BLOCK, at_s) for at_s in (1.0, 2.0))
    shadow.withdraw(first)
    one_left = shadow.free_tokens
    shadow.withdraw(second)
    none_left = shadow.free_tokens
    first, second = (shadow.use(keys(0, 4), BLOCK, at_s) for at_s in (3.0, 4.0))
    shadow.computed(first)
    shadow.withdraw(second)

    assert (one_left, none_left) == (6 * BLOCK, 10 * BLOCK)
    assert shadow.free_tokens == 6 * BLOCK


def test_promises_of_before_a_restart_are_void() -> None:
    """Neither takes their end anything from those made since."""
    shadow = cache(10)
    old, older = (shadow.use(keys(0, 4), BLOCK, at_s) for at_s in (1.0, 1.5))
    shadow.clear()
    new = shadow.use(keys(0, 4), BLOCK, 2.0)
    shadow.computed(older)
    shadow.withdraw(old)

    assert shadow.free_tokens == 6 * BLOCK
    shadow.withdraw(new)
    assert shadow.free_tokens == 10 * BLOCK


def test_what_no_promise_can_bring_back_is_let_go() -> None:
    """A full cache stays one: what left for computed blocks is gone."""
    shadow = cache(4)
    shadow.computed(shadow.use(keys(0, 4), BLOCK, 1.0))
    shadow.computed(shadow.use(keys(100, 2), BLOCK, 2.0))
    late = shadow.use(keys(200, 1), BLOCK, 3.0)
    shadow.withdraw(late)

    assert shadow.oldest_s(10.0) == 9.0
    assert shadow.free_tokens == 0
    shadow.capacity_tokens = 8 * BLOCK
    shadow.use((), BLOCK, 4.0)
    assert shadow.free_tokens == 4 * BLOCK
