"""Blocks on several tiers: each counts once, at its fastest."""

from collections.abc import Callable

import pytest

from indexer.core.hashing import Namespace
from indexer.core.index import (
    BlockIndex,
    BlocksDropped,
    BlocksHeld,
    GroupKind,
    GroupSpec,
    Prompt,
    RankUpdate,
)
from indexer.core.types import InstanceId, RankId, Tier

PromptOf = Callable[..., Prompt]
Update = Callable[..., RankUpdate]
Held = Callable[..., BlocksHeld]
Dropped = Callable[..., BlocksDropped]

SIZE = 4
E0, E1, E2 = (RankId(InstanceId(f"http://engine-{each}:8000"), 0) for each in range(3))
FULL = GroupSpec(group=0, kind=GroupKind.FULL, block_size=SIZE)
TOKENS = list(range(1000, 1041))
"""Ten blocks of four and one token more, so that all ten may be cached."""


KEYS = Prompt(Namespace(model="tiny"), TOKENS).keys(SIZE)


async def test_block_counts_at_its_fastest_tier(
    index: BlockIndex, prompt: PromptOf, update: Update, held: Held
) -> None:
    """Tiers together reach further than each alone, and each block counts once."""
    await index.apply(
        update(
            E0,
            FULL,
            held([*KEYS[:2], KEYS[4]]),
            held(KEYS[1:4], Tier.CPU),
            held(KEYS[:6], Tier.STORAGE),
        )
    )

    assert (await index.match(prompt()))[E0].tokens_by_tier == {
        Tier.GPU: 12,
        Tier.CPU: 8,
        Tier.STORAGE: 4,
    }


async def test_tier_that_gives_nothing_is_left_out(
    index: BlockIndex, prompt: PromptOf, update: Update, held: Held
) -> None:
    """Held beyond the match, or held faster elsewhere."""
    await index.apply(
        update(E0, FULL, held(KEYS[:3]), held(KEYS[:2], Tier.CPU), held([7], Tier.STORAGE))
    )

    assert (await index.match(prompt()))[E0].tokens_by_tier == {Tier.GPU: 12}


async def test_dropping_a_tier_leaves_the_others(
    index: BlockIndex, prompt: PromptOf, update: Update, held: Held, dropped: Dropped
) -> None:
    """The block is slower now, not gone."""
    await index.apply(update(E0, FULL, held(KEYS[:2]), held(KEYS[:2], Tier.CPU)))

    await index.apply(update(E0, dropped(KEYS[:2])))
    assert (await index.match(prompt()))[E0].tokens_by_tier == {Tier.CPU: 8}


LONG = Prompt(Namespace(model="tiny"), range(4_001))
LONG_KEYS = LONG.keys(SIZE)


@pytest.mark.parametrize(
    ("gpu", "cpu", "expected"),
    [
        pytest.param((0, 700), (0, 1000), (700, 300, 0), id="evicted-tail"),
        pytest.param((0, 700), (700, 1000), (700, 300, 0), id="moved-tail"),
        pytest.param((0, 1000), (0, 1000), (1000, 0, 0), id="copied"),
        pytest.param((900, 1000), (0, 1000), (100, 900, 0), id="loaded-tail"),
        pytest.param((0, 1), (0, 1000), (1, 999, 0), id="first-block"),
        pytest.param((0, 999), (0, 1000), (999, 1, 0), id="all-but-the-last"),
        pytest.param((100, 200), (0, 300), (100, 200, 700), id="three-tiers"),
        pytest.param((0, 60), (0, 64), (60, 4, 0), id="counted"),
        pytest.param((0, 60), (0, 65), (60, 5, 0), id="sampled"),
    ],
)
async def test_split_of_a_long_match_is_exact_where_tiers_hold_runs(
    index: BlockIndex,
    gpu: tuple[int, int],
    cpu: tuple[int, int],
    expected: tuple[int, int, int],
    update: Update,
    held: Held,
) -> None:
    """Long ones are sampled, and where two samples differ the change is searched for."""
    changes = [held(LONG_KEYS[slice(*gpu)]), held(LONG_KEYS[slice(*cpu)], Tier.CPU)]
    if expected[2]:
        changes.append(held(LONG_KEYS, Tier.STORAGE))
    await index.apply(update(E0, FULL, *changes))

    by_tier = (await index.match(LONG))[E0].tokens_by_tier
    assert tuple(by_tier.get(tier, 0) // SIZE for tier in Tier) == expected


async def test_long_match_over_scattered_tiers_is_exact_in_sum(
    index: BlockIndex, update: Update, held: Held
) -> None:
    """Every other block on another tier: the split is a sample, the overlap is not."""
    await index.apply(update(E0, FULL, held(LONG_KEYS[:777:2]), held(LONG_KEYS[1:777:2], Tier.CPU)))

    match = (await index.match(LONG))[E0]
    assert match.tokens == 777 * SIZE
    assert set(match.tokens_by_tier) == {Tier.GPU, Tier.CPU}
