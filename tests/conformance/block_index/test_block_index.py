"""What every index backend answers: the contract of `indexer.core.index`, test by test."""

import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.core.events import BlockRemoved, BlockStored, EventBatch
from indexer.core.hashing import Namespace
from indexer.core.index import (
    AllDropped,
    BlockIndex,
    BlocksDropped,
    BlocksHeld,
    GroupKind,
    GroupSpec,
    PrefixMatch,
    Prompt,
    RankUpdate,
)
from indexer.core.rank_blocks import RankBlocks
from indexer.core.types import BlockKey, EngineHash, InstanceId, RankId, Tier, Trust

Keys = Callable[..., Sequence[BlockKey]]
PromptOf = Callable[..., Prompt]
Update = Callable[..., RankUpdate]
Held = Callable[..., BlocksHeld]
Dropped = Callable[..., BlocksDropped]
Overlap = Callable[..., Awaitable[dict[RankId, int]]]

CloseIndex = Callable[[BlockIndex], Awaitable[None]]

SIZE = 4
E0, E1, E2 = (RankId(InstanceId(f"http://engine-{each}:8000"), 0) for each in range(3))
FULL = GroupSpec(group=0, kind=GroupKind.FULL, block_size=SIZE)
TOKENS = list(range(1000, 1041))
"""Ten blocks of four and one token more, so that all ten may be cached."""


KEYS = Prompt(Namespace(model="tiny"), TOKENS).keys(SIZE)


async def test_empty_index_knows_no_rank(index: BlockIndex, prompt: PromptOf) -> None:
    """Nothing raises; nobody is in the answer."""
    assert await index.match(prompt()) == {}
    assert (await index.size()).entries == 0


async def test_match_is_the_leading_run_of_held_blocks(
    index: BlockIndex, prompt: PromptOf, update: Update, held: Held
) -> None:
    """All facts of a match at once."""
    await index.apply(update(E0, FULL, held(KEYS[:3])))

    assert await index.match(prompt()) == {
        E0: PrefixMatch(tokens_by_tier={Tier.GPU: 12}, block_size=SIZE, trust=Trust.EXACT, epoch=1)
    }


@pytest.mark.parametrize("blocks", range(11))
async def test_every_depth_is_found(
    index: BlockIndex, blocks: int, update: Update, held: Held, overlap: Overlap
) -> None:
    """From nothing to the whole prompt."""
    await index.apply(update(E0, FULL, held(KEYS[:blocks])))

    assert await overlap(index) == {E0: blocks * SIZE}


async def test_last_token_is_never_credited(
    index: BlockIndex, prompt: PromptOf, update: Update, held: Held, overlap: Overlap
) -> None:
    """A prompt of ten whole blocks gets nine: the engine computes the last token anew."""
    await index.apply(update(E0, FULL, held(KEYS)))

    assert await overlap(index, prompt(TOKENS[:40])) == {E0: 36}
    assert await overlap(index, prompt(TOKENS[:4])) == {E0: 0}
    assert await overlap(index, prompt(TOKENS[:5])) == {E0: 4}


async def test_credit_stops_before_what_is_not_text(
    index: BlockIndex, update: Update, held: Held, overlap: Overlap
) -> None:
    """Tokens after an image are never credited."""
    await index.apply(update(E0, FULL, held(KEYS)))

    of = Prompt(Namespace(model="tiny"), TOKENS, creditable_tokens=11)
    assert await overlap(index, of) == {E0: 8}


async def test_f18_overlap_is_the_unbroken_run(index: BlockIndex, overlap: Overlap) -> None:
    """F18: E0 holds blocks 0, 2, 3 of four, E1 0 and 1, E2 1 to 3: overlaps 1, 2, 0."""
    for rank, blocks in ((E0, (0, 2, 3)), (E1, (0, 1)), (E2, (1, 2, 3))):
        engine = RankBlocks(rank=rank, model="tiny", epoch=1)
        stored = BlockStored([EngineHash(at) for at in range(4)], None, TOKENS[:16], SIZE)
        removed = BlockRemoved([EngineHash(at) for at in range(4) if at not in blocks])
        await index.apply(engine.apply(0, EventBatch(1.0, 0, [stored, removed])))

    assert await overlap(index) == {E0: 4, E1: 8, E2: 0}


async def test_rank_that_holds_nothing_is_present(
    index: BlockIndex, prompt: PromptOf, update: Update
) -> None:
    """Its block size is known, so it is a candidate with an overlap of nothing."""
    await index.apply(update(E0, FULL))

    assert (await index.match(prompt()))[E0] == PrefixMatch(
        tokens_by_tier={}, block_size=SIZE, trust=Trust.EXACT, epoch=1
    )


async def test_rank_that_stored_nothing_yet_is_present(
    index: BlockIndex, prompt: PromptOf, update: Update
) -> None:
    """Its trust and epoch are known before its block size. A trust alone names no rank."""
    await index.apply(update(E0, epoch=3))
    await index.set_trust(E0, Trust.DEGRADED)
    await index.set_trust(E1, Trust.DEGRADED)

    assert await index.match(prompt()) == {
        E0: PrefixMatch(tokens_by_tier={}, block_size=None, trust=Trust.DEGRADED, epoch=3)
    }


async def test_ranks_of_one_instance_are_apart(
    index: BlockIndex, update: Update, held: Held, overlap: Overlap
) -> None:
    """Each data-parallel rank is a cache of its own."""
    other = RankId(E0.instance, 1)
    await index.apply(update(E0, FULL, held(KEYS[:2])))
    await index.apply(update(other, FULL, held(KEYS[:5])))

    assert await overlap(index) == {E0: 8, other: 20}


# Changes


async def test_dropped_blocks_give_no_credit(
    index: BlockIndex, update: Update, held: Held, dropped: Dropped, overlap: Overlap
) -> None:
    """The tail goes first."""
    await index.apply(update(E0, FULL, held(KEYS[:5])))

    await index.apply(update(E0, dropped(KEYS[3:5])))
    assert await overlap(index) == {E0: 12}


async def test_changes_apply_in_order(
    index: BlockIndex, update: Update, held: Held, dropped: Dropped, overlap: Overlap
) -> None:
    """One update may empty the rank and fill it again."""
    await index.apply(update(E0, FULL, held(KEYS[:5])))

    await index.apply(update(E0, AllDropped(), FULL, held(KEYS[:2]), dropped(KEYS[1:2])))
    assert await overlap(index) == {E0: 4}


async def test_clears_are_counted(index: BlockIndex, update: Update, held: Held) -> None:
    """In each epoch anew, also if the same is told right after."""

    async def clears() -> list[int]:
        asked = Prompt(Namespace(model="tiny"), TOKENS)
        return [match.clears for match in (await index.match(asked)).values()]

    await index.apply(update(E0, FULL, held(KEYS[:5])))
    counted = await clears()
    await index.apply(update(E0, AllDropped(), FULL, held(KEYS[:5])))
    counted += await clears()
    await index.apply(update(E0, AllDropped()))
    counted += await clears()
    await index.apply(update(E0, FULL, epoch=2))
    counted += await clears()

    assert counted == [0, 1, 2, 0]


async def test_repeated_changes_change_nothing(
    index: BlockIndex, update: Update, held: Held, dropped: Dropped, overlap: Overlap
) -> None:
    """Adding what is held and dropping what is absent."""
    await index.apply(update(E0, FULL, held(KEYS[:2]), held(KEYS[:2]), FULL))
    await index.apply(update(E0, dropped(KEYS[5:6]), dropped(KEYS[5:6])))

    assert await overlap(index) == {E0: 8}
    assert (await index.size()).entries == 2


async def test_all_dropped_spares_other_ranks(
    index: BlockIndex, update: Update, held: Held, overlap: Overlap
) -> None:
    """A reset is one rank's."""
    await index.apply(update(E0, FULL, held(KEYS[:3]), held(KEYS[:3], Tier.CPU)))
    await index.apply(update(E1, FULL, held(KEYS[:3])))

    await index.apply(update(E0, AllDropped()))
    assert await overlap(index) == {E0: 0, E1: 12}
    assert (await index.size()).entries_by_rank == {E0: 0, E1: 3}


async def test_group_that_is_not_told_of_after_a_clear_limits_nothing(
    index: BlockIndex, update: Update, held: Held, overlap: Overlap
) -> None:
    """A hit needs all full groups: one that isn't there would end the rank's credit for good."""
    stray = GroupSpec(group=1, kind=GroupKind.FULL, block_size=4)
    await index.apply(update(E0, FULL, held(KEYS[:3]), stray))
    assert await overlap(index) == {E0: 0}

    await index.apply(update(E0, AllDropped()))
    await index.apply(update(E0, FULL, held(KEYS[:3])))
    assert await overlap(index) == {E0: 12}


async def test_group_described_anew_is_empty(
    index: BlockIndex, keys_of: Keys, update: Update, held: Held, overlap: Overlap
) -> None:
    """Another block size makes every key of before meaningless."""
    await index.apply(update(E0, FULL, held(KEYS[:3])))

    coarse = keys_of(size=8)
    spec = GroupSpec(group=0, kind=GroupKind.FULL, block_size=8)
    await index.apply(update(E0, spec))
    assert await overlap(index) == {E0: 0}
    await index.apply(update(E0, held(coarse[:2])))
    assert await overlap(index) == {E0: 16}
    assert (await index.size()).entries == 2


# Models, namespaces, block sizes


async def test_models_are_apart(
    index: BlockIndex, keys_of: Keys, prompt: PromptOf, update: Update, held: Held, overlap: Overlap
) -> None:
    """A rank of another model is not in the answer at all."""
    await index.apply(update(E0, FULL, held(KEYS[:2])))
    await index.apply(update(E1, FULL, held(keys_of(model="big")[:3]), model="big"))

    assert await overlap(index) == {E0: 8}
    assert await overlap(index, prompt(model="big")) == {E1: 12}
    assert await overlap(index, prompt(model="none")) == {}


@pytest.mark.parametrize("namespace", [{"lora": "sql"}, {"cache_salt": "tenant"}])
async def test_namespaces_are_apart(
    index: BlockIndex,
    namespace: dict[str, Any],
    keys_of: Keys,
    prompt: PromptOf,
    update: Update,
    held: Held,
    overlap: Overlap,
) -> None:
    """Adapters and salts share ranks but never blocks."""
    await index.apply(update(E0, FULL, held(keys_of(**namespace)[:3])))

    assert await overlap(index, prompt(**namespace)) == {E0: 12}
    assert await overlap(index) == {E0: 0}


async def test_each_rank_keeps_its_block_size(
    index: BlockIndex, keys_of: Keys, prompt: PromptOf, update: Update, held: Held
) -> None:
    """Several block sizes live in one model; the overlap is in tokens."""
    fine = GroupSpec(group=0, kind=GroupKind.FULL, block_size=2)
    await index.apply(update(E0, FULL, held(KEYS[:3])))
    await index.apply(update(E1, fine, held(keys_of(size=2)[:9])))

    matches = await index.match(prompt())
    assert {rank: (match.block_size, match.tokens) for rank, match in matches.items()} == {
        E0: (4, 12),
        E1: (2, 18),
    }


# Laws


depths = st.lists(st.integers(0, 10), min_size=1, max_size=6)


@given(depths, st.randoms(use_true_random=False))
async def test_order_of_ranks_changes_nothing(
    prompt: PromptOf,
    update: Update,
    held: Held,
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
    update: Update,
    held: Held,
    dropped: Dropped,
    overlap: Overlap,
    make_index: Callable[[], BlockIndex],
    close_index: CloseIndex,
    depths: list[int],
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
