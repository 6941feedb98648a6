"""Blocks in use on a rank."""

from hypothesis import given
from hypothesis import strategies as st

from balancer.core.load.active_blocks import ActiveBlocks
from indexer.core.types import BlockKey


def keys(*numbers: int) -> list[BlockKey]:
    return [BlockKey(number) for number in numbers]


def test_shared_blocks_count_once() -> None:
    """Two requests on one prefix hold it together."""
    active = ActiveBlocks()
    active.add(keys(1, 2, 3))
    active.add(keys(1, 2, 9))

    assert active.blocks == 4


def test_a_block_stays_until_its_last_user_goes() -> None:
    """Then nothing is left of it."""
    active = ActiveBlocks()
    active.add(keys(1, 2))
    active.add(keys(1))

    active.drop(keys(1, 2))
    assert active.blocks == 1

    active.drop(keys(1))
    assert active.blocks == 0


def test_a_run_begins_at_the_root() -> None:
    """And ends where nobody uses the next block."""
    active = ActiveBlocks()
    active.add(keys(1, 2, 3))

    assert active.run_blocks(keys(1, 2, 4, 5)) == 2
    assert active.run_blocks(keys(1, 2, 3)) == 3
    assert active.run_blocks(keys(7, 8)) == 0
    assert active.run_blocks([]) == 0


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20)), max_size=12),
    st.integers(0, 3),
    st.integers(0, 20),
)
def test_the_run_equals_a_walk(used: list[tuple[int, int]], asked_chain: int, asked: int) -> None:
    """Bisection finds what looking at every block would."""

    def chain(root: int, length: int) -> list[BlockKey]:
        # Chains share their first five blocks.
        return [BlockKey(each if each < 5 else 1000 * root + each) for each in range(length)]

    active = ActiveBlocks()
    for root, length in used:
        active.add(chain(root, length))
    wanted = chain(asked_chain, asked)
    held = {key for root, length in used for key in chain(root, length)}

    walked = next((n for n, key in enumerate(wanted) if key not in held), len(wanted))
    assert active.run_blocks(wanted) == walked
    assert active.blocks == len(held)
