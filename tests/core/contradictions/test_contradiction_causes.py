"""Why an engine had other blocks cached than predicted: told since, or the index differs."""

from collections.abc import Callable
from typing import Any

from indexer.core.contradictions import Cause, Weighed
from indexer.core.events import AllBlocksCleared
from indexer.core.types import EngineHash

NewRank = Callable[..., Any]


def test_eviction_told_since_explains_it(rank: Any) -> None:
    """Then the copy that is there is the one computed anew."""
    rank.batch(rank.stored(1, 2))
    rank.batch(rank.removed(2), rank.removed(1), rank.stored(1, 2))

    assert rank.over(0, matched_s=1.5) == Weighed(cause=Cause.EVICTED_SINCE)
    assert [rank.copies(key) for key in rank.keys[:2]] == [1, 1]


def test_block_that_is_gone_by_now_needs_nothing(rank: Any) -> None:
    """Evicted again already."""
    rank.batch(rank.stored(1, 2))
    rank.batch(rank.removed(2), rank.removed(1))

    assert rank.over(0, matched_s=1.5).cause is Cause.EVICTED_SINCE


def test_reset_told_since_explains_it(rank: Any) -> None:
    """The event came with the request's own step."""
    rank.batch(rank.stored(1, 2))
    rank.batch(AllBlocksCleared(), rank.stored(1, 2))

    assert rank.over(0, matched_s=1.5).cause is Cause.RESET_SEEN_LATE
    assert rank.copies(rank.keys[0]) == 1


def test_reset_before_the_lookup_explains_nothing(rank: Any) -> None:
    """It was known when the index was asked."""
    rank.batch(AllBlocksCleared(), rank.stored(1, 2))
    rank.batch(rank.stored(1, 2))

    assert rank.over(0, matched_s=1.5).cause is Cause.GHOST


def test_index_that_promises_what_the_tables_never_had_differs(rank: Any) -> None:
    """Whether or not the request computed the block meanwhile; that copy stays."""
    rank.batch(rank.stored(1))
    untold = rank.over(1, matched_s=1.5)
    rank.batch(rank.stored(2, parent=1, first=1))

    assert [untold, rank.over(1, matched_s=1.5)] == [Weighed(cause=Cause.INDEX_DIFFERS)] * 2
    assert rank.copies(rank.keys[1]) == 1


def test_ghost_found_out_twice_is_no_fault_of_the_index(rank: Any) -> None:
    """Two requests were promised it; the first one's report has pruned it."""
    rank.batch(rank.stored(1, 2))
    rank.batch(rank.stored(1, 2))

    found = [rank.over(0, matched_s=1.5).cause for _ in range(2)]

    assert found == [Cause.GHOST, Cause.EVICTED_SINCE]


def test_index_is_not_blamed_if_losses_since_are_forgotten(new_rank: NewRank) -> None:
    """What is absent now may have been there then."""
    rank = new_rank(max_hashes=1)
    rank.batch(rank.stored(1))
    rank.batch(rank.removed(1))
    rank.batch(rank.stored(2, 3))
    rank.batch(rank.removed(3), rank.removed(2))

    assert rank.over(0, matched_s=1.5).cause is Cause.TOO_LONG_AGO


def test_blocks_stored_since_explain_that_more_was_cached(rank: Any) -> None:
    """A sibling's, between the lookup and the request's turn; even if they have left again."""
    rank.batch(rank.stored(1, 2))

    assert rank.under(1).cause is Cause.STORED_SINCE
    assert rank.under(2).cause is Cause.UNSEEN

    rank.recent.lose(2.0, [rank.keys[2]])
    assert rank.under(2).cause is Cause.STORED_SINCE


def test_index_that_lacks_what_it_was_told_of_before_differs(new_rank: NewRank) -> None:
    """Nothing was stored since, the tables hold it, and the engine had it."""
    rank = new_rank(hears_gains=True)
    rank.batch(rank.stored(1, 2))

    assert rank.under(1, matched_s=1.5).cause is Cause.INDEX_DIFFERS


def test_index_that_was_told_since_explains_that_more_was_cached(new_rank: NewRank) -> None:
    """Of the block itself, of the one above that cut it off, or of everything."""
    rank = new_rank(hears_gains=True)
    rank.batch(rank.stored(1, 2))
    rank.batch(rank.removed(1))
    rank.batch(rank.stored(1))

    assert rank.under(1, matched_s=2.5).cause is Cause.STORED_SINCE
    assert rank.under(1, matched_s=3.5).cause is Cause.INDEX_DIFFERS

    rank.recent.gain_all(4.0)
    assert rank.under(1, matched_s=3.5).cause is Cause.STORED_SINCE


def test_index_is_not_blamed_if_what_it_was_told_is_forgotten(new_rank: NewRank) -> None:
    """It may have been told since."""
    rank = new_rank(hears_gains=True, max_hashes=1)
    rank.batch(rank.stored(1))
    rank.batch(rank.stored(2, parent=1, first=1))

    assert rank.under(0, matched_s=0.5).cause is Cause.TOO_LONG_AGO


def test_index_is_not_blamed_where_another_group_may_have_ended_the_match(
    new_rank: NewRank,
) -> None:
    """A window's block may be what it rightly missed."""
    rank = new_rank(hears_gains=True)
    window: dict[str, Any] = {"kind": "sliding_window", "window_tokens": 9, "group": 1}
    rank.batch(rank.stored(1, 2, kind="full_attention"), rank.stored(1, 2, **window))

    assert rank.under(1, matched_s=1.5).cause is Cause.STORED_SINCE


def test_rank_without_a_full_group_holds_nothing(rank: Any) -> None:
    """Nothing was ever stored."""
    assert rank.under(0).cause is Cause.UNSEEN
    assert rank.over(0, matched_s=0.5).cause is Cause.INDEX_DIFFERS
    assert list(rank.held.copies_below(rank.keys[0])) == []
    assert rank.held.full_group == -1


def test_only_some_causes_speak_against_the_tables() -> None:
    """What is explained, or can't be judged, proves nothing."""
    speaking = {cause for cause in Cause if cause.is_over_evidence}

    assert speaking == {Cause.GHOST, Cause.OTHER_GROUPS}


def test_block_that_was_doubted_is_there_after_all(rank: Any) -> None:
    """It, or what hangs on it."""
    rank.batch(rank.stored(1, 2, 3))
    first = rank.blocks.first_full()
    assert first is not None
    first.held.doubt([EngineHash(1)])

    assert rank.under(0, matched_s=5.0).cause is Cause.DOUBTED
    assert rank.under(2, matched_s=5.0).cause is Cause.DOUBTED
