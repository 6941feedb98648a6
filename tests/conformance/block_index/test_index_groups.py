"""Groups of hybrid models in every index backend: all agree on one end."""

from collections.abc import Awaitable, Callable, Sequence

import pytest

from indexer.core.hashing import Namespace
from indexer.core.index import BlockIndex, BlocksHeld, GroupKind, GroupSpec, Prompt, RankUpdate
from indexer.core.types import BlockKey, InstanceId, RankId, Tier

Keys = Callable[..., Sequence[BlockKey]]
PromptOf = Callable[..., Prompt]
Update = Callable[..., RankUpdate]
Held = Callable[..., BlocksHeld]
Overlap = Callable[..., Awaitable[dict[RankId, int]]]

SIZE = 4
E0, E1, E2 = (RankId(InstanceId(f"http://engine-{each}:8000"), 0) for each in range(3))
FULL = GroupSpec(group=0, kind=GroupKind.FULL, block_size=SIZE)
TOKENS = list(range(1000, 1041))
"""Ten blocks of four and one token more, so that all ten may be cached."""


KEYS = Prompt(Namespace(model="tiny"), TOKENS).keys(SIZE)


def window(tokens: int, *, group: int = 1, size: int = SIZE) -> GroupSpec:
    return GroupSpec(group=group, kind=GroupKind.WINDOW, block_size=size, window_tokens=tokens)


def some(*blocks: int) -> list[BlockKey]:
    return [KEYS[block] for block in blocks]


@pytest.mark.parametrize(
    ("full_blocks", "window_blocks", "end_blocks"),
    [
        pytest.param(6, (4, 5), 6, id="window-at-the-end"),
        pytest.param(6, (3, 4), 5, id="window-one-block-earlier"),
        pytest.param(6, (5,), 0, id="half-a-window"),
        pytest.param(6, (), 0, id="no-window"),
        pytest.param(6, (0, 4), 1, id="short-end-needs-all-blocks"),
        pytest.param(6, (0, 1, 3, 5), 2, id="holes"),
        pytest.param(6, (4, 5, 6, 7), 6, id="window-goes-on-beyond"),
        pytest.param(6, (5, 6, 7), 0, id="window-begins-too-late"),
        pytest.param(0, (0, 1, 2), 0, id="nothing-full"),
        pytest.param(1, (0,), 1, id="one-block"),
    ],
)
async def test_window_must_hold_the_blocks_before_the_end(
    index: BlockIndex,
    full_blocks: int,
    window_blocks: tuple[int, ...],
    end_blocks: int,
    update: Update,
    held: Held,
    overlap: Overlap,
) -> None:
    """A window of 9 tokens needs two blocks of four, or all where the end is shorter."""
    await index.apply(
        update(E0, FULL, window(9), held(KEYS[:full_blocks]), held(some(*window_blocks), group=1))
    )

    assert await overlap(index) == {E0: end_blocks * SIZE}


async def test_window_blocks_may_lie_on_any_tier(
    index: BlockIndex, update: Update, held: Held, overlap: Overlap
) -> None:
    """An offloaded block is as good."""
    await index.apply(
        update(
            E0,
            FULL,
            window(9),
            held(KEYS[:6]),
            held(some(5), group=1),
            held(some(4), Tier.CPU, group=1),
        )
    )

    assert await overlap(index) == {E0: 24}


async def test_every_group_must_agree_on_one_end(
    index: BlockIndex, update: Update, held: Held, overlap: Overlap
) -> None:
    """One group's hole moves the end down, where another's may be."""
    state = GroupSpec(group=2, kind=GroupKind.STATE, block_size=SIZE)
    await index.apply(
        update(
            E0,
            FULL,
            window(9),
            state,
            held(KEYS[:8]),
            held(some(1, 2, 5, 6, 7), group=1),
            held(some(2, 4, 5), group=2),
        )
    )

    # State allows 6, 5 and 3; the window, 8, 7 and 3.
    assert await overlap(index) == {E0: 12}


async def test_state_is_needed_at_the_end_only(
    index: BlockIndex, update: Update, held: Held, overlap: Overlap
) -> None:
    """A mamba checkpoint in the middle is where the hit ends."""
    state = GroupSpec(group=1, kind=GroupKind.STATE, block_size=SIZE)
    await index.apply(update(E0, FULL, state, held(KEYS[:9]), held(some(5), group=1)))

    assert await overlap(index) == {E0: 24}


async def test_window_of_unknown_width_limits_nothing(
    index: BlockIndex, update: Update, held: Held, overlap: Overlap
) -> None:
    """Full attention alone is then the upper bound."""
    unknown = GroupSpec(group=1, kind=GroupKind.WINDOW, block_size=SIZE)
    await index.apply(update(E0, FULL, unknown, held(KEYS[:5])))

    assert await overlap(index) == {E0: 20}


async def test_window_alone_gives_no_credit(
    index: BlockIndex, update: Update, held: Held, overlap: Overlap
) -> None:
    """Without a full group nothing is known about a prefix."""
    await index.apply(update(E0, window(9), held(KEYS[:5], group=1)))

    assert await overlap(index) == {E0: 0}


async def test_full_groups_all_bound_the_hit(
    index: BlockIndex, prompt: PromptOf, update: Update, held: Held
) -> None:
    """The shortest of them decides; tiers are those of the first."""
    other = GroupSpec(group=4, kind=GroupKind.FULL, block_size=SIZE)
    await index.apply(
        update(E0, other, FULL, held(KEYS[:6]), held(KEYS[:4], group=4), held(KEYS[4:6], Tier.CPU))
    )

    assert (await index.match(prompt()))[E0].tokens_by_tier == {Tier.GPU: 16}


@pytest.mark.parametrize(
    ("full_blocks", "coarse_blocks", "tokens"),
    [
        pytest.param(9, (0, 1), 24, id="last-multiple-of-both"),
        pytest.param(5, (0, 1), 12, id="full-ends-between"),
        pytest.param(9, (0,), 12, id="coarse-ends-earlier"),
        pytest.param(2, (0, 1), 0, id="no-common-end"),
        pytest.param(9, (1,), 24, id="one-coarse-block-is-the-window"),
        pytest.param(9, (), 0, id="none"),
    ],
)
async def test_groups_of_different_block_sizes_agree_on_common_multiples(
    index: BlockIndex,
    full_blocks: int,
    coarse_blocks: tuple[int, ...],
    tokens: int,
    keys_of: Keys,
    update: Update,
    held: Held,
    overlap: Overlap,
) -> None:
    """Blocks of 4 and of 12: ends at 12 and 24 tokens."""
    coarse = keys_of(size=12)
    await index.apply(
        update(
            E0,
            FULL,
            window(5, size=12),
            held(KEYS[:full_blocks]),
            held([coarse[at] for at in coarse_blocks], group=1),
        )
    )

    assert await overlap(index) == {E0: tokens}


async def test_hole_in_a_fine_window_moves_the_end_to_a_common_multiple(
    index: BlockIndex, keys_of: Keys, update: Update, held: Held, overlap: Overlap
) -> None:
    """Blocks of 4 (full) and 2 (window of four blocks): an end is a multiple of 4."""
    fine = keys_of(size=2)
    await index.apply(
        update(
            E0,
            FULL,
            window(9, size=2),
            held(KEYS[:5]),
            held([*fine[:7], *fine[8:10]], group=1),
        )
    )

    # Block 7 of the window (tokens 14 and 15) is missing: 20 and 16 fail, 12 holds.
    assert await overlap(index) == {E0: 12}
