"""Physical blocks: who uses them, what they hold, in which order they go."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.core.blocks import BlockPool
from simulator.core.types import AllBlocksCleared, BlockRemoved


def hold(pool: BlockPool, *hashes: bytes) -> list[int]:
    """Fill as many blocks with these contents and give them back, first content first."""
    taken = pool.take(len(hashes))
    pool.register(taken, hashes)
    pool.release(taken)
    return taken


def test_block_zero_is_never_handed_out() -> None:
    """A pool of n blocks has n - 1 to give."""
    pool = BlockPool(4)

    assert pool.take(3) == [1, 2, 3]
    assert pool.free_blocks == 0


def test_equal_contents_are_two_blocks_and_go_one_by_one() -> None:
    """Each copy that is taken is announced as removed while the other is still found (F04)."""
    pool = BlockPool(3)
    first, second = hold(pool, b"same", b"same")

    assert pool.find(b"same") == first
    assert pool.take(1) == [first]
    assert pool.take_events() == [BlockRemoved(b"same")]
    assert pool.find(b"same") == second
    pool.take(1)
    assert pool.take_events() == [BlockRemoved(b"same")]
    assert pool.find(b"same") is None


def test_a_used_block_is_never_taken() -> None:
    """Touching a free block takes it out of the queue until its last user leaves."""
    pool = BlockPool(3)
    first, second = hold(pool, b"1", b"2")

    pool.touch([first])
    pool.touch([first])
    pool.release([first])

    assert not pool.is_free(first)
    assert pool.take(1) == [second]
    pool.release([first])
    assert pool.is_free(first)
    assert pool.used_blocks == 1


@pytest.mark.parametrize(
    ("reuses_empty_first", "expected"),
    [
        pytest.param(True, [3, 1, 2], id="newer-releases"),
        pytest.param(False, [1, 2, 3], id="older-releases"),
    ],
)
def test_blocks_without_content_go_first_in_newer_releases(
    reuses_empty_first: bool, expected: list[int]
) -> None:
    """What nobody could look up is reused before cached blocks are."""
    pool = BlockPool(4, reuses_empty_first=reuses_empty_first)
    taken = pool.take(3)
    pool.register(taken[:2], [b"1", b"2"])
    pool.release(taken)

    assert pool.take(3) == expected


def test_reset_forgets_contents_and_says_so() -> None:
    """A reset clears everything at once, without removing block by block."""
    pool = BlockPool(3)
    hold(pool, b"1")

    assert pool.reset()
    assert pool.find(b"1") is None
    pool.take(2)
    assert pool.take_events() == [AllBlocksCleared()]


def test_reset_fails_while_a_block_is_in_use() -> None:
    """A failed reset changes and announces nothing."""
    pool = BlockPool(3)
    taken = pool.take(1)
    pool.register(taken, [b"1"])

    assert not pool.reset()
    assert pool.find(b"1") == taken[0]
    assert pool.take_events() == []


@given(st.lists(st.binary(min_size=1, max_size=1), max_size=40))
def test_announced_removals_never_exceed_what_was_held(contents: list[bytes]) -> None:
    """Registrations minus removals is the number of copies that can still be found, per content."""
    pool = BlockPool(6)
    registered: dict[bytes, int] = {}
    removed: dict[bytes, int] = {}
    for content in contents:
        block = pool.take(1)
        pool.register(block, [content])
        pool.release(block)
        registered[content] = registered.get(content, 0) + 1
        for event in pool.take_events():
            assert isinstance(event, BlockRemoved)
            removed[event.hash] = removed.get(event.hash, 0) + 1

    for content, count in registered.items():
        assert (pool.find(content) is not None) == (count > removed.get(content, 0))
