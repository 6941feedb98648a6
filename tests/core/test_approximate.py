"""What a rank without events is guessed to hold."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from balancer.core.load.approximate import ApproximateBlocks
from indexer.core.types import BlockKey

KEYS = [BlockKey(number) for number in range(1, 9)]
OTHERS = [KEYS[0], *(BlockKey(number) for number in range(101, 105))]


def test_blocks_of_a_leg_are_guessed_from_any_start() -> None:
    """Up to the first that no leg left there."""
    blocks = ApproximateBlocks(100)
    blocks.add(KEYS[:5], 1.0)

    assert blocks.run_blocks(KEYS, 0) == 5
    assert blocks.run_blocks(KEYS, 3) == 2
    assert blocks.run_blocks(KEYS, 6) == 0
    assert blocks.run_blocks(OTHERS, 0) == 1


def test_guesses_end_unless_they_are_used() -> None:
    """A prompt that shares a root keeps it."""
    blocks = ApproximateBlocks(100)
    blocks.add(KEYS[:5], 1.0)
    blocks.add(OTHERS, 5.0)

    blocks.purge(3.0)

    assert (blocks.run_blocks(KEYS, 0), blocks.run_blocks(OTHERS, 0)) == (1, 5)


def test_what_was_used_longest_ago_goes_first_and_of_a_prompt_its_tail() -> None:
    """As engines evict."""
    blocks = ApproximateBlocks(7)
    blocks.add(KEYS[:5], 1.0)
    blocks.add(OTHERS[:4], 2.0)

    assert blocks.run_blocks(KEYS, 0) == 4
    assert blocks.run_blocks(OTHERS, 0) == 4


def test_missing_block_takes_along_what_was_used_before_it() -> None:
    """Engines evict the oldest first: what is older than an evicted block is gone, too."""
    blocks = ApproximateBlocks(100)
    blocks.add([BlockKey(500), BlockKey(501)], 1.0)
    blocks.add(KEYS, 2.0)
    blocks.add(OTHERS, 3.0)

    blocks.on_missing(KEYS[4], asked_s=9.0)

    assert blocks.run_blocks([BlockKey(500)], 0) == 0
    assert blocks.run_blocks(KEYS, 0) == 4
    assert blocks.run_blocks(OTHERS, 0) == 5


def test_use_since_then_says_nothing_of_what_was_missing() -> None:
    """A sibling has left the block there meanwhile. Nor does a block nobody guessed."""
    blocks = ApproximateBlocks(100)
    blocks.add(KEYS, 2.0)

    blocks.on_missing(KEYS[0], asked_s=1.0)
    blocks.on_missing(BlockKey(77), asked_s=9.0)

    assert blocks.run_blocks(KEYS, 0) == len(KEYS)


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 8), st.booleans()), min_size=1, max_size=20
    )
)
def test_guesses_stay_bounded_and_of_every_prompt_a_beginning(
    legs: Sequence[tuple[int, int, bool]],
) -> None:
    """Law: whatever is added and found missing, a prompt's guessed blocks are its first ones."""
    prompts = [[BlockKey(1), *(BlockKey(100 * each + n) for n in range(7))] for each in (1, 2, 3)]
    blocks = ApproximateBlocks(10)
    for now_s, (which, length, is_missing) in enumerate(legs, start=1):
        keys = prompts[which][:length]
        if is_missing:
            blocks.on_missing(keys[-1], float(now_s))
        else:
            blocks.add(keys, float(now_s))
        assert len(blocks) <= 10
        for each in prompts:
            run = blocks.run_blocks(each, 0)
            assert all(blocks.run_blocks([key], 0) == 0 for key in each[run:])
