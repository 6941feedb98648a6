"""Trust, epochs and retirement of ranks, in every index backend."""

from collections.abc import Awaitable, Callable, Sequence

import pytest

from indexer.core.hashing import Namespace
from indexer.core.index import (
    BlockIndex,
    BlocksHeld,
    GroupKind,
    GroupSpec,
    PrefixMatch,
    Prompt,
    RankUpdate,
    StaleEpochError,
)
from indexer.core.types import BlockKey, InstanceId, RankId, Tier, Trust

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


async def test_trust_is_told_with_the_match_and_outlives_epochs(
    index: BlockIndex, prompt: PromptOf, update: Update
) -> None:
    """EXACT until set; then as set, until set again."""
    await index.apply(update(E0, FULL))
    await index.set_trust(E0, Trust.DEGRADED)
    await index.apply(update(E0, FULL, epoch=2))
    assert (await index.match(prompt()))[E0].trust is Trust.DEGRADED

    await index.set_trust(E0, Trust.EXACT)
    assert (await index.match(prompt()))[E0].trust is Trust.EXACT


async def test_reason_is_told_of_what_is_not_exact(index: BlockIndex, update: Update) -> None:
    """And of a new one, though trust is the same; a rewrite or a new epoch changes nothing of it."""

    async def told() -> list[tuple[Trust, str | None]]:
        found = await index.match(Prompt(Namespace(model="tiny"), TOKENS))
        return [(match.trust, match.reason) for match in found.values()]

    await index.apply(update(E0, FULL))
    seen = await told()
    for trust, reason in [
        (Trust.DEGRADED, "gap_lost"),
        (Trust.DEGRADED, "orphans"),
        (Trust.EXACT, "replayed"),
        (Trust.DEGRADED, ""),
        (Trust.LOAD_ONLY, "nothing_known"),
    ]:
        await index.set_trust(E0, trust, reason)
        seen += await told()
    await index.apply(update(E0, FULL, epoch=2))
    seen += await told()
    await index.retire(E0)
    await index.apply(update(E0, FULL))
    seen += await told()

    assert seen == [
        (Trust.EXACT, None),
        (Trust.DEGRADED, "gap_lost"),
        (Trust.DEGRADED, "orphans"),
        (Trust.EXACT, None),
        (Trust.DEGRADED, None),
        (Trust.LOAD_ONLY, "nothing_known"),
        (Trust.LOAD_ONLY, "nothing_known"),
        (Trust.EXACT, None),
    ]


async def test_new_epoch_empties_the_rank_at_once(
    index: BlockIndex, update: Update, held: Held, overlap: Overlap
) -> None:
    """Its group must be described again; other ranks don't notice."""
    await index.apply(update(E0, FULL, held(KEYS[:3])))
    await index.apply(update(E1, FULL, held(KEYS[:3])))

    await index.apply(update(E0, epoch=2))
    assert await overlap(index) == {E0: 0, E1: 12}
    assert (await index.size()).entries_by_rank == {E0: 0, E1: 3}
    await index.apply(update(E0, FULL, held(KEYS[:1]), epoch=2))
    assert await overlap(index) == {E0: 4, E1: 12}


async def test_epoch_is_told_with_the_match(
    index: BlockIndex, prompt: PromptOf, update: Update, held: Held
) -> None:
    """From the first update of the new life on, though it holds nothing yet."""
    await index.apply(update(E0, FULL, held(KEYS[:3]), epoch=4))
    before = (await index.match(prompt()))[E0].epoch
    await index.apply(update(E0, epoch=7))

    assert (before, (await index.match(prompt()))[E0].epoch) == (4, 7)


async def test_stale_epoch_is_refused_and_changes_nothing(
    index: BlockIndex, update: Update, held: Held, overlap: Overlap
) -> None:
    """A late writer of an ended life."""
    await index.apply(update(E0, FULL, held(KEYS[:1]), epoch=2))

    with pytest.raises(StaleEpochError):
        await index.apply(update(E0, FULL, held(KEYS[:5]), epoch=1))
    assert await overlap(index) == {E0: 4}


async def test_new_epoch_may_serve_another_model(
    index: BlockIndex, prompt: PromptOf, update: Update, held: Held, overlap: Overlap
) -> None:
    """The new owner of an address does not inherit blocks."""
    await index.apply(update(E0, FULL, held(KEYS[:3])))

    await index.apply(update(E0, FULL, epoch=2, model="big"))
    assert await overlap(index) == {}
    assert await overlap(index, prompt(model="big")) == {E0: 0}


async def test_retired_rank_is_gone(
    index: BlockIndex, update: Update, held: Held, overlap: Overlap
) -> None:
    """With its blocks and its trust; an unknown one is ignored."""
    await index.apply(update(E0, FULL, held(KEYS[:3])))
    await index.apply(update(E1, FULL, held(KEYS[:2])))
    await index.set_trust(E0, Trust.DEGRADED)

    await index.retire(E0)
    await index.retire(E2)
    assert await overlap(index) == {E1: 8}
    assert (await index.size()).entries_by_rank == {E1: 2}


async def test_retired_rank_may_return(
    index: BlockIndex, prompt: PromptOf, update: Update, held: Held
) -> None:
    """As a new one, whatever its epoch."""
    await index.apply(update(E0, FULL, held(KEYS[:3]), epoch=5))
    await index.set_trust(E0, Trust.DEGRADED)
    await index.retire(E0)

    await index.apply(update(E0, FULL, held(KEYS[:1])))
    assert await index.match(prompt()) == {
        E0: PrefixMatch(tokens_by_tier={Tier.GPU: 4}, block_size=SIZE, trust=Trust.EXACT, epoch=1)
    }


async def test_size_counts_every_tier_and_group(
    index: BlockIndex, update: Update, held: Held
) -> None:
    """Keys x holders."""
    other = GroupSpec(group=1, kind=GroupKind.STATE, block_size=SIZE)
    await index.apply(
        update(E0, FULL, other, held(KEYS[:3]), held(KEYS[:2], Tier.CPU), held(KEYS[:1], group=1))
    )
    await index.apply(update(E1, FULL, held(KEYS[:3])))

    size = await index.size()
    assert (size.entries, size.entries_by_rank) == (9, {E0: 6, E1: 3})
