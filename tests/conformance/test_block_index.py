"""What every index backend answers: the contract of `indexer.core.index`, test by test."""

import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.core.events import BlockRemoved, BlockStored, EventBatch
from indexer.core.hashing import Namespace, block_keys, pack_tokens, root_key
from indexer.core.index import (
    AllDropped,
    BlockIndex,
    BlocksDropped,
    BlocksHeld,
    Change,
    GroupKind,
    GroupSpec,
    PrefixMatch,
    Prompt,
    RankUpdate,
    StaleEpochError,
)
from indexer.core.rank_blocks import RankBlocks
from indexer.core.types import BlockKey, EngineHash, InstanceId, RankId, Tier, Trust

CloseIndex = Callable[[BlockIndex], Awaitable[None]]

SIZE = 4
E0, E1, E2 = (RankId(InstanceId(f"http://engine-{each}:8000"), 0) for each in range(3))
FULL = GroupSpec(group=0, kind=GroupKind.FULL, block_size=SIZE)
TOKENS = list(range(1000, 1041))
"""Ten blocks of four and one token more, so that all ten may be cached."""


def keys_of(
    tokens: Sequence[int] = TOKENS, *, size: int = SIZE, **namespace: Any
) -> Sequence[BlockKey]:
    root = root_key(Namespace(**{"model": "tiny", **namespace}))
    return block_keys(root, pack_tokens(tokens), size)


def prompt(tokens: Sequence[int] = TOKENS, **namespace: Any) -> Prompt:
    return Prompt(Namespace(**{"model": "tiny", **namespace}), tokens)


def update(rank: RankId, *changes: Change, epoch: int = 1, model: str = "tiny") -> RankUpdate:
    return RankUpdate(rank=rank, model=model, epoch=epoch, seq=0, changes=changes)


def held(blocks: Sequence[BlockKey], tier: Tier = Tier.GPU, group: int = 0) -> BlocksHeld:
    return BlocksHeld(group, tier, blocks)


def dropped(blocks: Sequence[BlockKey], tier: Tier = Tier.GPU, group: int = 0) -> BlocksDropped:
    return BlocksDropped(group, tier, blocks)


async def overlap(index: BlockIndex, of: Prompt | None = None) -> dict[RankId, int]:
    """Tokens per rank."""
    return {rank: match.tokens for rank, match in (await index.match(of or prompt())).items()}


KEYS = keys_of()


async def test_empty_index_knows_no_rank(index: BlockIndex) -> None:
    """Nothing raises; nobody is in the answer."""
    assert await index.match(prompt()) == {}
    assert (await index.size()).entries == 0


async def test_match_is_the_leading_run_of_held_blocks(index: BlockIndex) -> None:
    """All facts of a match at once."""
    await index.apply(update(E0, FULL, held(KEYS[:3])))

    assert await index.match(prompt()) == {
        E0: PrefixMatch(tokens_by_tier={Tier.GPU: 12}, block_size=SIZE, trust=Trust.EXACT, epoch=1)
    }


@pytest.mark.parametrize("blocks", range(11))
async def test_every_depth_is_found(index: BlockIndex, blocks: int) -> None:
    """From nothing to the whole prompt."""
    await index.apply(update(E0, FULL, held(KEYS[:blocks])))

    assert await overlap(index) == {E0: blocks * SIZE}


async def test_last_token_is_never_credited(index: BlockIndex) -> None:
    """A prompt of ten whole blocks gets nine: the engine computes the last token anew."""
    await index.apply(update(E0, FULL, held(KEYS)))

    assert await overlap(index, prompt(TOKENS[:40])) == {E0: 36}
    assert await overlap(index, prompt(TOKENS[:4])) == {E0: 0}
    assert await overlap(index, prompt(TOKENS[:5])) == {E0: 4}


async def test_credit_stops_before_what_is_not_text(index: BlockIndex) -> None:
    """Tokens after an image are never credited."""
    await index.apply(update(E0, FULL, held(KEYS)))

    of = Prompt(Namespace(model="tiny"), TOKENS, creditable_tokens=11)
    assert await overlap(index, of) == {E0: 8}


async def test_f18_overlap_is_the_unbroken_run(index: BlockIndex) -> None:
    """F18: E0 holds blocks 0, 2, 3 of four, E1 0 and 1, E2 1 to 3: overlaps 1, 2, 0."""
    for rank, blocks in ((E0, (0, 2, 3)), (E1, (0, 1)), (E2, (1, 2, 3))):
        engine = RankBlocks(rank=rank, model="tiny", epoch=1)
        stored = BlockStored([EngineHash(at) for at in range(4)], None, TOKENS[:16], SIZE)
        removed = BlockRemoved([EngineHash(at) for at in range(4) if at not in blocks])
        await index.apply(engine.apply(0, EventBatch(1.0, 0, [stored, removed])))

    assert await overlap(index) == {E0: 4, E1: 8, E2: 0}


async def test_rank_that_holds_nothing_is_present(index: BlockIndex) -> None:
    """Its block size is known, so it is a candidate with an overlap of nothing."""
    await index.apply(update(E0, FULL))

    assert (await index.match(prompt()))[E0] == PrefixMatch(
        tokens_by_tier={}, block_size=SIZE, trust=Trust.EXACT, epoch=1
    )


async def test_rank_that_stored_nothing_yet_is_present(index: BlockIndex) -> None:
    """Its trust and epoch are known before its block size. A trust alone names no rank."""
    await index.apply(update(E0, epoch=3))
    await index.set_trust(E0, Trust.DEGRADED)
    await index.set_trust(E1, Trust.DEGRADED)

    assert await index.match(prompt()) == {
        E0: PrefixMatch(tokens_by_tier={}, block_size=None, trust=Trust.DEGRADED, epoch=3)
    }


async def test_ranks_of_one_instance_are_apart(index: BlockIndex) -> None:
    """Each data-parallel rank is a cache of its own."""
    other = RankId(E0.instance, 1)
    await index.apply(update(E0, FULL, held(KEYS[:2])))
    await index.apply(update(other, FULL, held(KEYS[:5])))

    assert await overlap(index) == {E0: 8, other: 20}


# Changes


async def test_dropped_blocks_give_no_credit(index: BlockIndex) -> None:
    """The tail goes first."""
    await index.apply(update(E0, FULL, held(KEYS[:5])))

    await index.apply(update(E0, dropped(KEYS[3:5])))
    assert await overlap(index) == {E0: 12}


async def test_changes_apply_in_order(index: BlockIndex) -> None:
    """One update may empty the rank and fill it again."""
    await index.apply(update(E0, FULL, held(KEYS[:5])))

    await index.apply(update(E0, AllDropped(), held(KEYS[:2]), dropped(KEYS[1:2])))
    assert await overlap(index) == {E0: 4}


async def test_repeated_changes_change_nothing(index: BlockIndex) -> None:
    """Adding what is held and dropping what is absent."""
    await index.apply(update(E0, FULL, held(KEYS[:2]), held(KEYS[:2]), FULL))
    await index.apply(update(E0, dropped(KEYS[5:6]), dropped(KEYS[5:6])))

    assert await overlap(index) == {E0: 8}
    assert (await index.size()).entries == 2


async def test_all_dropped_spares_other_ranks(index: BlockIndex) -> None:
    """A reset is one rank's."""
    await index.apply(update(E0, FULL, held(KEYS[:3]), held(KEYS[:3], Tier.CPU)))
    await index.apply(update(E1, FULL, held(KEYS[:3])))

    await index.apply(update(E0, AllDropped()))
    assert await overlap(index) == {E0: 0, E1: 12}
    assert (await index.size()).entries_by_rank == {E0: 0, E1: 3}


async def test_group_described_anew_is_empty(index: BlockIndex) -> None:
    """Another block size makes every key of before meaningless."""
    await index.apply(update(E0, FULL, held(KEYS[:3])))

    coarse = keys_of(size=8)
    spec = GroupSpec(group=0, kind=GroupKind.FULL, block_size=8)
    await index.apply(update(E0, spec))
    assert await overlap(index) == {E0: 0}
    await index.apply(update(E0, held(coarse[:2])))
    assert await overlap(index) == {E0: 16}
    assert (await index.size()).entries == 2


# Tiers


async def test_block_counts_at_its_fastest_tier(index: BlockIndex) -> None:
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


async def test_tier_that_gives_nothing_is_left_out(index: BlockIndex) -> None:
    """Held beyond the match, or held faster elsewhere."""
    await index.apply(
        update(E0, FULL, held(KEYS[:3]), held(KEYS[:2], Tier.CPU), held([7], Tier.STORAGE))  # type: ignore[list-item]
    )

    assert (await index.match(prompt()))[E0].tokens_by_tier == {Tier.GPU: 12}


async def test_dropping_a_tier_leaves_the_others(index: BlockIndex) -> None:
    """The block is slower now, not gone."""
    await index.apply(update(E0, FULL, held(KEYS[:2]), held(KEYS[:2], Tier.CPU)))

    await index.apply(update(E0, dropped(KEYS[:2])))
    assert (await index.match(prompt()))[E0].tokens_by_tier == {Tier.CPU: 8}


LONG = prompt(range(4_001))
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
) -> None:
    """Long ones are sampled, and where two samples differ the change is searched for."""
    changes = [held(LONG_KEYS[slice(*gpu)]), held(LONG_KEYS[slice(*cpu)], Tier.CPU)]
    if expected[2]:
        changes.append(held(LONG_KEYS, Tier.STORAGE))
    await index.apply(update(E0, FULL, *changes))

    by_tier = (await index.match(LONG))[E0].tokens_by_tier
    assert tuple(by_tier.get(tier, 0) // SIZE for tier in Tier) == expected


async def test_long_match_over_scattered_tiers_is_exact_in_sum(index: BlockIndex) -> None:
    """Every other block on another tier: the split is a sample, the overlap is not."""
    await index.apply(update(E0, FULL, held(LONG_KEYS[:777:2]), held(LONG_KEYS[1:777:2], Tier.CPU)))

    match = (await index.match(LONG))[E0]
    assert match.tokens == 777 * SIZE
    assert set(match.tokens_by_tier) == {Tier.GPU, Tier.CPU}


# Models, namespaces, block sizes


async def test_models_are_apart(index: BlockIndex) -> None:
    """A rank of another model is not in the answer at all."""
    await index.apply(update(E0, FULL, held(KEYS[:2])))
    await index.apply(update(E1, FULL, held(keys_of(model="big")[:3]), model="big"))

    assert await overlap(index) == {E0: 8}
    assert await overlap(index, prompt(model="big")) == {E1: 12}
    assert await overlap(index, prompt(model="none")) == {}


@pytest.mark.parametrize("namespace", [{"lora": "sql"}, {"cache_salt": "tenant"}])
async def test_namespaces_are_apart(index: BlockIndex, namespace: dict[str, Any]) -> None:
    """Adapters and salts share ranks but never blocks."""
    await index.apply(update(E0, FULL, held(keys_of(**namespace)[:3])))

    assert await overlap(index, prompt(**namespace)) == {E0: 12}
    assert await overlap(index) == {E0: 0}


async def test_each_rank_keeps_its_block_size(index: BlockIndex) -> None:
    """Several block sizes live in one model; the overlap is in tokens."""
    fine = GroupSpec(group=0, kind=GroupKind.FULL, block_size=2)
    await index.apply(update(E0, FULL, held(KEYS[:3])))
    await index.apply(update(E1, fine, held(keys_of(size=2)[:9])))

    matches = await index.match(prompt())
    assert {rank: (match.block_size, match.tokens) for rank, match in matches.items()} == {
        E0: (4, 12),
        E1: (2, 18),
    }


# Trust, epochs, retirement


async def test_trust_is_told_with_the_match_and_outlives_epochs(index: BlockIndex) -> None:
    """EXACT until set; then as set, until set again."""
    await index.apply(update(E0, FULL))
    await index.set_trust(E0, Trust.DEGRADED)
    await index.apply(update(E0, FULL, epoch=2))
    assert (await index.match(prompt()))[E0].trust is Trust.DEGRADED

    await index.set_trust(E0, Trust.EXACT)
    assert (await index.match(prompt()))[E0].trust is Trust.EXACT


async def test_new_epoch_empties_the_rank_at_once(index: BlockIndex) -> None:
    """Its group must be described again; other ranks don't notice."""
    await index.apply(update(E0, FULL, held(KEYS[:3])))
    await index.apply(update(E1, FULL, held(KEYS[:3])))

    await index.apply(update(E0, epoch=2))
    assert await overlap(index) == {E0: 0, E1: 12}
    assert (await index.size()).entries_by_rank == {E0: 0, E1: 3}
    await index.apply(update(E0, FULL, held(KEYS[:1]), epoch=2))
    assert await overlap(index) == {E0: 4, E1: 12}


async def test_epoch_is_told_with_the_match(index: BlockIndex) -> None:
    """From the first update of the new life on, though it holds nothing yet."""
    await index.apply(update(E0, FULL, held(KEYS[:3]), epoch=4))
    before = (await index.match(prompt()))[E0].epoch
    await index.apply(update(E0, epoch=7))

    assert (before, (await index.match(prompt()))[E0].epoch) == (4, 7)


async def test_stale_epoch_is_refused_and_changes_nothing(index: BlockIndex) -> None:
    """A late writer of an ended life."""
    await index.apply(update(E0, FULL, held(KEYS[:1]), epoch=2))

    with pytest.raises(StaleEpochError):
        await index.apply(update(E0, FULL, held(KEYS[:5]), epoch=1))
    assert await overlap(index) == {E0: 4}


async def test_new_epoch_may_serve_another_model(index: BlockIndex) -> None:
    """The new owner of an address does not inherit blocks."""
    await index.apply(update(E0, FULL, held(KEYS[:3])))

    await index.apply(update(E0, FULL, epoch=2, model="big"))
    assert await overlap(index) == {}
    assert await overlap(index, prompt(model="big")) == {E0: 0}


async def test_retired_rank_is_gone(index: BlockIndex) -> None:
    """With its blocks and its trust; an unknown one is ignored."""
    await index.apply(update(E0, FULL, held(KEYS[:3])))
    await index.apply(update(E1, FULL, held(KEYS[:2])))
    await index.set_trust(E0, Trust.DEGRADED)

    await index.retire(E0)
    await index.retire(E2)
    assert await overlap(index) == {E1: 8}
    assert (await index.size()).entries_by_rank == {E1: 2}


async def test_retired_rank_may_return(index: BlockIndex) -> None:
    """As a new one, whatever its epoch."""
    await index.apply(update(E0, FULL, held(KEYS[:3]), epoch=5))
    await index.set_trust(E0, Trust.DEGRADED)
    await index.retire(E0)

    await index.apply(update(E0, FULL, held(KEYS[:1])))
    assert await index.match(prompt()) == {
        E0: PrefixMatch(tokens_by_tier={Tier.GPU: 4}, block_size=SIZE, trust=Trust.EXACT, epoch=1)
    }


async def test_size_counts_every_tier_and_group(index: BlockIndex) -> None:
    """Keys x holders."""
    other = GroupSpec(group=1, kind=GroupKind.STATE, block_size=SIZE)
    await index.apply(
        update(E0, FULL, other, held(KEYS[:3]), held(KEYS[:2], Tier.CPU), held(KEYS[:1], group=1))
    )
    await index.apply(update(E1, FULL, held(KEYS[:3])))

    size = await index.size()
    assert (size.entries, size.entries_by_rank) == (9, {E0: 6, E1: 3})


# Hybrid models


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
    index: BlockIndex, full_blocks: int, window_blocks: tuple[int, ...], end_blocks: int
) -> None:
    """A window of 9 tokens needs two blocks of four, or all where the end is shorter."""
    await index.apply(
        update(E0, FULL, window(9), held(KEYS[:full_blocks]), held(some(*window_blocks), group=1))
    )

    assert await overlap(index) == {E0: end_blocks * SIZE}


async def test_window_blocks_may_lie_on_any_tier(index: BlockIndex) -> None:
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


async def test_every_group_must_agree_on_one_end(index: BlockIndex) -> None:
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


async def test_state_is_needed_at_the_end_only(index: BlockIndex) -> None:
    """A mamba checkpoint in the middle is where the hit ends."""
    state = GroupSpec(group=1, kind=GroupKind.STATE, block_size=SIZE)
    await index.apply(update(E0, FULL, state, held(KEYS[:9]), held(some(5), group=1)))

    assert await overlap(index) == {E0: 24}


async def test_window_of_unknown_width_limits_nothing(index: BlockIndex) -> None:
    """Full attention alone is then the upper bound."""
    unknown = GroupSpec(group=1, kind=GroupKind.WINDOW, block_size=SIZE)
    await index.apply(update(E0, FULL, unknown, held(KEYS[:5])))

    assert await overlap(index) == {E0: 20}


async def test_window_alone_gives_no_credit(index: BlockIndex) -> None:
    """Without a full group nothing is known about a prefix."""
    await index.apply(update(E0, window(9), held(KEYS[:5], group=1)))

    assert await overlap(index) == {E0: 0}


async def test_full_groups_all_bound_the_hit(index: BlockIndex) -> None:
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
    index: BlockIndex, full_blocks: int, coarse_blocks: tuple[int, ...], tokens: int
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


async def test_hole_in_a_fine_window_moves_the_end_to_a_common_multiple(index: BlockIndex) -> None:
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


# Laws

depths = st.lists(st.integers(0, 10), min_size=1, max_size=6)


@given(depths, st.randoms(use_true_random=False))
async def test_order_of_ranks_changes_nothing(
    make_index: Callable[[], BlockIndex],
    close_index: CloseIndex,
    depths: list[int],
    draw: random.Random,
) -> None:
    """Whoever is applied first, the answer is the same."""
    ranks = [(RankId(InstanceId("http://engine:8000"), at), at) for at in range(len(depths))]
    answers = []
    for _ in range(2):
        index = make_index()
        for rank, at in ranks:
            await index.apply(update(rank, FULL, held(KEYS[: depths[at]])))
        answers.append(await index.match(prompt()))
        await close_index(index)
        draw.shuffle(ranks)

    assert answers[0] == answers[1]


@given(st.lists(st.integers(0, 10), min_size=1, max_size=8))
async def test_last_depth_counts_whatever_came_before(
    make_index: Callable[[], BlockIndex], close_index: CloseIndex, depths: list[int]
) -> None:
    """Growing and shrinking along a chain leaves no trace."""
    index = make_index()
    await index.apply(update(E0, FULL))
    before = 0
    for depth in depths:
        change = held(KEYS[before:depth]) if depth > before else dropped(KEYS[depth:before])
        await index.apply(update(E0, change))
        before = depth

    answers = await overlap(index), (await index.size()).entries
    await close_index(index)
    assert answers == ({E0: depths[-1] * SIZE}, depths[-1])
