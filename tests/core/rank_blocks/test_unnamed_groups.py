"""Groups of hybrid models in releases that don't say which of them are windows (before 0.22)."""

from collections.abc import Sequence

from indexer.core.events import AllBlocksCleared, BlockStored, Event, EventBatch
from indexer.core.index import GroupKind
from indexer.core.rank_blocks import RankBlocks
from indexer.core.types import EngineHash, InstanceId, RankId

SIZE = 2


def stored(group: int, hashes: Sequence[int], tokens: int) -> BlockStored:
    """A store of a prompt's beginning; more tokens than the hashes cover: blocks were left out."""
    return BlockStored(
        hashes=[EngineHash(number) for number in hashes],
        parent=None,
        token_ids=list(range(tokens)),
        block_size=SIZE,
        group=group,
    )


def blocks_after(*events: Event) -> RankBlocks:
    blocks = RankBlocks(rank=RankId(InstanceId("http://e"), 0), model="m", epoch=1)
    for seq, event in enumerate(events):
        blocks.apply(seq, EventBatch(ts=0.0, rank=0, events=[event]))
    return blocks


def test_the_first_group_may_be_a_window() -> None:
    """It left blocks out; the last group, which didn't, is the full one."""
    blocks = blocks_after(stored(0, [2], 4), stored(1, [1, 2], 4), stored(0, [3], 2))

    assert [(spec.group, spec.kind) for spec in blocks.groups.values()] == [(1, GroupKind.FULL)]
    assert blocks.held_blocks == 2


def test_a_first_group_that_shows_late_that_it_is_a_window_stops_counting() -> None:
    """A short prompt fits in a window, so it looks full until a longer one comes."""
    blocks = blocks_after(stored(0, [1], 2), stored(1, [1], 2), stored(0, [4], 6))

    assert blocks.groups[0].kind is GroupKind.WINDOW
    assert blocks.groups[1].kind is GroupKind.FULL


def test_groups_that_publish_as_one_are_followed_as_one() -> None:
    """Up to 0.19 every group is 0: its aligned stores are all there is to go by."""
    blocks = blocks_after(stored(0, [2], 4), stored(0, [1, 2], 4), stored(0, [2], 4))

    assert blocks.groups[0].kind is GroupKind.FULL
    assert blocks.held_blocks == 2


def test_a_full_group_taken_for_a_window_is_full_again_after_a_clear() -> None:
    """One event of a group that isn't there, and one that left out tokens, don't cost it for good."""
    blocks = blocks_after(
        stored(0, [1], 2), stored(1, [8], 2), stored(0, [9], 3), stored(0, [1], 2)
    )
    assert blocks.groups[0].kind is GroupKind.WINDOW

    blocks.apply(4, EventBatch(ts=0.0, rank=0, events=[AllBlocksCleared(), stored(0, [1, 2], 4)]))
    assert [(spec.group, spec.kind) for spec in blocks.groups.values()] == [(0, GroupKind.FULL)]
    assert blocks.held_blocks == 2


def test_rank_whose_only_stores_are_refused_is_unfollowed() -> None:
    """Until one is taken, or the cache is empty."""
    refused = stored(0, [2], 4)

    assert not blocks_after().is_unfollowed
    assert blocks_after(refused).is_unfollowed
    assert not blocks_after(refused, stored(1, [1, 2], 4)).is_unfollowed
    assert not blocks_after(refused, AllBlocksCleared()).is_unfollowed


def test_rank_whose_full_group_is_not_told_of_is_unfollowed() -> None:
    """Windows tell more often than full groups, but not for ever."""
    window = [stored(0, [4], 6)] * 64
    full = stored(1, [1], 2)

    assert not blocks_after(full, *window).is_unfollowed
    assert blocks_after(full, *window, window[0]).is_unfollowed
    assert not blocks_after(full, *window, full, *window).is_unfollowed


def test_full_group_that_hears_nothing_while_another_does_is_none() -> None:
    """A hit needs both, so the rank's credit would be too little for good: a clear ends that."""
    one, other = stored(0, [1], 2), stored(1, [1], 2)
    none_told = stored(2, [2], 4)

    assert not blocks_after(one, other, *[one] * 64, *[none_told] * 9).is_unfollowed
    assert blocks_after(one, other, *[one] * 65).is_unfollowed
    assert not blocks_after(one, other, *[one] * 65, other).is_unfollowed
    assert not blocks_after(one, other, *[one] * 65, AllBlocksCleared(), one).is_unfollowed


def test_kinds_that_are_not_followed_beside_a_full_group_are_no_fault() -> None:
    """Named ones can't be a full group that was mistaken."""
    chunked = BlockStored(
        [EngineHash(4)], None, [1, 2], SIZE, group=3, kind="chunked_local_attention"
    )

    assert blocks_after(chunked).is_unfollowed
    assert not blocks_after(stored(0, [1], 2), *[chunked] * 70).is_unfollowed


def test_blocks_of_one_token_are_noticed() -> None:
    """Each token is a row of the index then."""
    tiny = BlockStored([EngineHash(4)], None, [1], 1, group=0)

    assert blocks_after(tiny).has_one_token_blocks
    assert not blocks_after(stored(0, [1], 2)).has_one_token_blocks
