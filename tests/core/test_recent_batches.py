"""What the last batches stored, by time of arrival."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from indexer.core.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from indexer.core.recent_batches import RecentBatches, mark
from indexer.core.types import BlockKey, EngineHash, Tier


def stored(*hashes: int, tier: Tier = Tier.GPU, group: int = 0) -> BlockStored:
    return BlockStored([EngineHash(each) for each in hashes], None, [], 4, tier=tier, group=group)


def removed(*hashes: int, tier: Tier = Tier.GPU) -> BlockRemoved:
    return BlockRemoved([EngineHash(each) for each in hashes], tier=tier)


def batch(*events: Any) -> EventBatch:
    return EventBatch(0.0, 0, list(events))


def test_counts_what_came_at_a_moment_or_later() -> None:
    """Only stores, only of what was asked for."""
    recent = RecentBatches(1.0)
    recent.note(2.0, batch(stored(1, 2), removed(9)))
    recent.note(3.0, batch(stored(2, 3), removed(2), stored(2)))

    assert recent.stored_since(0.0, {1, 2}) == {1: 1, 2: 3}
    assert recent.stored_since(2.5, {1, 2}) == {2: 2}
    assert recent.stored_since(3.5, {2}) == {}


def test_tiers_and_groups_are_kept_apart() -> None:
    """The same hash may lie on two tiers, and in two groups."""
    recent = RecentBatches(0.0)
    recent.note(1.0, batch(stored(7), stored(7, tier=Tier.CPU), stored(7, group=1)))
    marks = {mark(EngineHash(7), group, tier) for group in (0, 1) for tier in range(3)}

    counted = recent.stored_since(0.0, marks)

    assert counted[mark(EngineHash(7), 0, 0)] == 1
    assert counted[mark(EngineHash(7), 0, 1)] == 1
    assert counted[mark(EngineHash(7), 1, 0)] == 1
    assert counted.total() == 3


def test_newest_batch_and_newest_clear_are_remembered() -> None:
    """Not every batch clears."""
    recent = RecentBatches(0.0)
    assert (recent.newest_s, recent.cleared_s) == (None, None)

    recent.note(1.0, batch(AllBlocksCleared()))
    recent.note(2.0, batch())

    assert (recent.newest_s, recent.cleared_s) == (2.0, 1.0)


def test_oldest_batches_go_and_it_is_known_since_when_all_is_there() -> None:
    """By hashes."""
    recent = RecentBatches(0.0, max_hashes=4)
    assert recent.reaches(0.0)
    for number in range(5):
        recent.note(1.0 + number, batch(stored(2 * number, 2 * number + 1)))

    # More than twice the most were there: half of them went.
    assert not recent.reaches(2.9)
    assert recent.reaches(3.0)
    assert recent.stored_since(3.5, set(range(10))).keys() == {6, 7, 8, 9}


def test_number_of_batches_is_bounded_too() -> None:
    """Empty ones cost something as well."""
    recent = RecentBatches(0.0, max_batches=2)
    for number in range(5):
        recent.note(float(number), batch(stored(number)))

    assert recent.since_s == 2.0
    assert recent.stored_since(2.5, set(range(5))).keys() == {3, 4}


def test_one_huge_batch_goes_whole() -> None:
    """It alone is more than may be kept."""
    recent = RecentBatches(0.0, max_hashes=2)
    recent.note(1.0, batch(stored(*range(10))))

    assert recent.since_s == 1.0
    assert recent.stored_since(0.0, set(range(10))) == {}


def test_block_that_left_was_there_before() -> None:
    """Since a moment, or at least until everything was cleared."""
    recent = RecentBatches(0.0)
    recent.lose(1.0, [BlockKey(1), BlockKey(2)])
    recent.lose(2.0, [BlockKey(3)])

    assert recent.has_lost_since(0.5, BlockKey(1))
    assert not recent.has_lost_since(1.5, BlockKey(1))
    assert recent.has_lost_since(1.5, BlockKey(3))
    assert not recent.has_lost_since(0.5, BlockKey(4))
    recent.note(3.0, batch(AllBlocksCleared()))
    assert recent.has_lost_since(2.5, BlockKey(4))
    assert not recent.has_lost_since(3.5, BlockKey(4))


def test_blocks_that_left_longest_ago_are_forgotten() -> None:
    """They are bounded, too."""
    recent = RecentBatches(0.0, max_hashes=3)
    recent.lose(1.0, [BlockKey(1), BlockKey(2)])
    recent.lose(1.0, [BlockKey(3), BlockKey(4)])

    assert [recent.has_lost_since(0.5, BlockKey(key)) for key in (1, 2, 3, 4)] == [
        False,
        False,
        True,
        True,
    ]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=40), st.integers(1, 6))
def test_what_is_reached_back_to_is_counted_right(
    happened: list[tuple[bool, int]], most: int
) -> None:
    """Law: from any moment that is reached on, the counts are those of the whole history."""
    recent = RecentBatches(-1.0, max_hashes=most, max_batches=most)
    for number, (is_stored, engine_hash) in enumerate(happened):
        event = stored(engine_hash) if is_stored else removed(engine_hash)
        recent.note(float(number), batch(event))

    for moment in range(len(happened) + 1):
        if recent.reaches(moment - 0.5):
            since = happened[moment:]
            counted = recent.stored_since(moment - 0.5, {0, 1, 2, 3})
            assert counted.total() == sum(is_stored for is_stored, _ in since)


def test_losses_are_bounded_by_moments_too() -> None:
    """A moment costs more than a number does; what is forgotten is known to be."""
    recent = RecentBatches(0.0, max_batches=2)
    for second in (1.0, 2.0, 3.0):
        recent.lose(second, [BlockKey(int(second))])

    assert [recent.has_lost_since(0.0, BlockKey(each)) for each in (1, 2, 3)] == [False, True, True]
    assert (recent.remembers_losses(0.5), recent.remembers_losses(1.0)) == (False, True)


def test_nothing_that_left_is_no_moment() -> None:
    """Else empty ones would push out those that say something."""
    recent = RecentBatches(0.0, max_batches=1)
    recent.lose(1.0, [BlockKey(1)])
    for moment_s in (2.0, 3.0):
        recent.lose(moment_s, [])

    assert recent.has_lost_since(0.5, BlockKey(1))
