"""Which of the things that were set aside cost a rank its exactness."""

import re
from typing import Any

import pytest

from indexer.core import rank_blocks
from indexer.core.bound import TableLimits
from indexer.core.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch
from indexer.core.index import GroupKind, GroupSpec
from indexer.core.rank_blocks import RankBlocks
from indexer.core.refusals import has_clear, has_lost_events, refused_reasons
from indexer.core.types import EngineHash, InstanceId, RankId, Tier

SIZE = 4
FULL = "full_attention"


def stored(*hashes: int, **more: Any) -> BlockStored:
    """Blocks under a root, consistent unless `more` says otherwise."""
    fields: dict[str, Any] = {
        "hashes": [EngineHash(each) for each in hashes],
        "parent": None,
        "token_ids": list(range(len(hashes) * more.get("block_size", SIZE))),
        "block_size": SIZE,
        "kind": FULL,
        **more,
    }
    return BlockStored(**fields)


def refusals(*events: Event, parked: int = 100) -> list[str]:
    """What a rank that holds one block refuses of a batch."""
    blocks = RankBlocks(
        rank=RankId(InstanceId("http://e:1"), 0),
        model="tiny",
        epoch=1,
        limits=TableLimits(max_parked_blocks=parked),
    )
    blocks.apply(0, EventBatch(ts=0.0, rank=0, events=[stored(1)]))
    blocks.apply(1, EventBatch(ts=1.0, rank=0, events=list(events)))
    return refused_reasons(blocks.counts, events, blocks.groups)


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        pytest.param(stored(2, 2), "duplicate_hashes", id="hash-twice"),
        pytest.param(stored(2, parent=2), "self_parent", id="own-parent"),
        pytest.param(stored(2, token_ids=[-1, 0, 0, 0]), "bad_token", id="token-below-0"),
        pytest.param(stored(2, token_ids=[1, 2, 3]), "unaligned_tokens", id="too-few-tokens"),
        pytest.param(stored(2, block_size=8), "mixed_block_size", id="larger-block"),
        pytest.param(stored(2, 3, block_size=2), "mixed_block_size", id="several-shorter"),
    ],
)
def test_contradictory_event_costs_exactness(event: Event, reason: str) -> None:
    """The engine may hold what it said, or not."""
    assert refusals(event) == [reason]


def test_orphan_that_had_to_leave_costs_exactness() -> None:
    """Its parent may show, and then it would be missing."""
    first, second = stored(2, parent=90), stored(3, parent=91)

    assert refusals(first, second, parked=1) == ["orphan_evicted"]


@pytest.mark.parametrize(
    "event",
    [
        pytest.param(BlockRemoved([EngineHash(7)], tier=Tier.CPU), id="removal-of-an-untold-copy"),
        pytest.param(BlockRemoved([EngineHash(7)]), id="removal-of-a-block-not-followed"),
        pytest.param(stored(), id="without-hashes"),
        pytest.param(stored(7, token_ids=[], block_size=0, tier=Tier.CPU), id="placeholder"),
        pytest.param(stored(7, kind="cross_attention", group=1), id="other-kind"),
        pytest.param(
            stored(7, kind="sliding_window", group=1, token_ids=list(range(16))), id="masked-window"
        ),
        pytest.param(stored(7, block_size=256, tier=Tier.CPU), id="connector-chunk"),
        pytest.param(
            stored(7, block_size=6, tier=Tier.CPU, is_store_only=True), id="chunk-of-odd-length"
        ),
        pytest.param(
            stored(7, parent=90, tier=Tier.CPU, is_store_only=True), id="chunk-of-an-untold-parent"
        ),
        pytest.param(stored(7, block_size=2), id="partial-entry"),
        pytest.param(stored(7, parent=90), id="orphan"),
        pytest.param(AllBlocksCleared(), id="clear"),
    ],
)
def test_normal_operation_costs_nothing(event: Event) -> None:
    """Offloading, hybrid models and connectors do this all day."""
    assert refusals(event) == []


def test_every_reason_of_the_rank_is_weighed() -> None:
    """A new reason has to be put on one side or the other."""
    told = re.findall(r"`(\w+)`", (rank_blocks.__doc__ or "").partition("by reason.")[2])
    event = stored(7, block_size=8)
    spec = GroupSpec(group=0, kind=GroupKind.FULL, block_size=SIZE)

    refused = set(refused_reasons(told, [event], {0: spec}))

    assert set(told) - refused == {
        "unsupported_group",
        "bound_evicted",
        "orphan_parked",
        "unknown_placeholder",
        "unknown_removal",
        "ended_adapter",
        "odd_chunk",
        "unknown_chunk_parent",
    }


def test_block_size_of_a_group_that_is_not_followed_is_no_contradiction() -> None:
    """It is judged by the batch's own events only."""
    spec = GroupSpec(group=0, kind=GroupKind.FULL, block_size=SIZE)
    other = stored(7, group=5, block_size=8)

    assert refused_reasons(["mixed_block_size"], [stored(2), other], {0: spec}) == []


def test_clear_anywhere_in_a_batch_is_seen() -> None:
    """Whatever else it says."""
    assert has_clear([stored(1), AllBlocksCleared()])
    assert not has_clear([stored(1)])


def test_only_a_new_kind_of_event_can_be_ignored_with_impunity() -> None:
    """A known kind with a bad field may have been a removal."""
    assert not has_lost_events(["unknown_event", "unknown_event"])
    assert has_lost_events(["unknown_event", "bad_field"])
