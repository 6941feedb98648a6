"""Which blocks are doubted, by marks in the order in which they were stored."""

import random
from itertools import pairwise
from statistics import fmean

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from indexer.core.doubts import MOST_MARKS, Doubts, without
from indexer.core.types import EngineHash

ORDER = [EngineHash(1000 + place) for place in range(1000)]


def doubts(*missing: int, present: tuple[int, ...] = (), order: list[EngineHash] = ORDER) -> Doubts:
    """These places were found so, in this order."""
    found = Doubts(order, 0.0)
    for place in missing:
        found.found(EngineHash(1000 + place), missing=True)
    for place in present:
        found.found(EngineHash(1000 + place), missing=False)
    return found


@pytest.mark.parametrize("missing", [(), (5,), (5, 700), (5, 5, 5, 700)])
def test_few_missing_blocks_raise_no_doubt(missing: tuple[int, ...]) -> None:
    """Each may have been evicted for itself; the same one again is no news."""
    assert doubts(*missing).ranges() == []


@pytest.mark.parametrize(
    ("missing", "present", "doubted"),
    [
        pytest.param((300, 100, 200), (), [range(75, 326)], id="between-and-a-quarter-beside"),
        pytest.param((100, 120, 140), (), [range(95, 161)], id="three-in-order"),
        pytest.param((100, 120, 140, 170), (), [range(95, 264)], id="next-right-above"),
        pytest.param((100, 120, 140, 170, 270), (), [range(90, 951)], id="and-next"),
        pytest.param((100, 120, 140, 170, 270, 130), (), [range(92, 815)], id="and-one-between"),
        pytest.param((100, 120, 140, 280), (), [range(85, 296)], id="far-above"),
        pytest.param((900, 880, 860, 830), (), [range(737, 906)], id="right-below"),
        pytest.param((100, 120, 140, 170, 60), (), [range(54, 177)], id="below-then"),
        pytest.param((10, 990, 500), (), [range(1000)], id="no-farther-than-there-are-blocks"),
        pytest.param((100, 300, 200), (220,), [range(75, 211), range(275, 326)], id="halfway"),
        pytest.param((100, 300, 200), (320,), [range(75, 311)], id="halfway-above"),
        pytest.param((100, 300, 200), (900,), [range(75, 326)], id="present-far-away"),
        pytest.param((100, 300, 200), (200,), [], id="present-after-all"),
        pytest.param((100, 300, 200), (5000,), [range(75, 326)], id="present-and-new"),
    ],
)
def test_doubt_goes_as_far_as_the_marks_say(
    missing: tuple[int, ...], present: tuple[int, ...], doubted: list[range]
) -> None:
    """Places, both of those that were found and of those that nobody asked for."""
    assert doubts(*missing, present=present).ranges() == doubted


def test_block_that_is_missing_again_was_present_only_then() -> None:
    """The newest word counts."""
    found = doubts(100, 300, 200, present=(250,))
    found.found(EngineHash(1250), missing=True)

    assert found.ranges() == [range(84, 317)]


def test_newest_word_counts_however_often_it_changes() -> None:
    """Missing, there, and missing again."""
    found = doubts(100, 300, 200, present=(200,))
    found.found(EngineHash(1200), missing=True)

    assert found.ranges() == doubts(100, 300, 200).ranges()
    assert found.told_anew(ORDER, 1.0, lambda _: True).ranges() == found.ranges()


def test_only_so_many_marks_count() -> None:
    """The oldest go, of each kind."""
    found = doubts(*range(0, 10 * (MOST_MARKS + 5), 10))
    first = min(found.ranges(), key=lambda each: each.start)

    assert first.start == 50 - 10 // 4


def test_marks_are_kept_where_blocks_are_told_anew() -> None:
    """In another order; those that are there no more mark nothing."""
    found = doubts(100, 300, 200, 999, present=(800,))

    anew = found.told_anew(list(reversed(ORDER[:900])), 5.0, lambda _: True)

    assert anew.since_s == 5.0
    assert anew.ranges() == doubts(799, 599, 699, present=(99,)).ranges()
    assert anew.ranges()
    assert found.told_anew(ORDER, 5.0, lambda _: False).ranges() == []


@pytest.mark.parametrize(
    ("present", "is_doubted"),
    [((150, 350), True), ((150, 350, 450), False), ((50, 150, 350, 800), True)],
)
def test_missing_blocks_between_present_ones_were_not_lost_together(
    present: tuple[int, ...], is_doubted: bool
) -> None:
    """Single ghosts among true blocks; those beside all of them say nothing of it."""
    found = doubts(100, 500, 200, 300, 400, present=present)

    assert bool(found.ranges()) is is_doubted


@pytest.mark.parametrize("seed", range(5))
def test_untold_reset_is_found_out_in_any_order(seed: int) -> None:
    """500 blocks in 50 prompts are gone, 500 newer ones aren't: who asks for doubted ones learns nothing."""
    places = list(range(0, 500, 10))
    if seed:
        random.Random(seed).shuffle(places)  # noqa: S311 - the same each time
    found, wrong = doubts(), 0
    for place in places:
        if not is_in(place, found.ranges()):
            wrong += 1
            found.found(EngineHash(1000 + place), missing=True)
    (doubted,) = found.ranges()

    assert wrong <= 8
    assert doubted.start <= 20
    assert 480 <= doubted.stop <= 700


def test_twenty_requests_find_out_nearly_all_and_doubt_few_that_are_true() -> None:
    """The figures of rule 2: 100 prompts of ten blocks are gone, 100 newer ones aren't."""
    order = [EngineHash(1000 + place) for place in range(2000)]
    left, doubted = [], []
    for seed in range(60):
        places = list(range(0, 1000, 10))
        random.Random(seed).shuffle(places)  # noqa: S311 - the same each time
        found = doubts(order=order)
        for place in places[:20]:
            if not is_in(place, found.ranges()):
                found.found(EngineHash(1000 + place), missing=True)
        ranges = found.ranges()
        left.append(sum(not is_in(place, ranges) for place in places[20:]))
        doubted.append(sum(is_in(place, ranges) for place in range(1000, 2000, 10)))

    assert fmean(left) < 5
    assert fmean(doubted) < 7


def is_in(place: int, ranges: list[range]) -> bool:
    return any(place in each for each in ranges)


def sets(limit: int) -> st.SearchStrategy[set[int]]:
    return st.sets(st.integers(0, limit - 1))


def runs(places: set[int]) -> list[range]:
    """The same places as ranges, in order and apart."""
    found: list[range] = []
    for place in sorted(places):
        if found and found[-1].stop == place:
            found[-1] = range(found[-1].start, place + 1)
        else:
            found.append(range(place, place + 1))
    return found


@example({1, 2, 3, 4, 8}, {2, 3, 8, 9})
@given(sets(30), sets(30))
def test_ranges_are_taken_from_each_other(some: set[int], others: set[int]) -> None:
    """As sets are."""
    left = list(without(runs(some), runs(others)))

    assert left == runs(some - others) or set().union(*left) == some - others
    assert all(left)


@given(st.permutations(range(20)), st.integers(0, 20))
def test_ranges_are_in_order_and_apart(places: list[int], missing: int) -> None:
    """And no block that was found present is among them."""
    found = doubts(*places[:missing], present=tuple(places[missing:]), order=ORDER[:20])

    ranges = found.ranges()

    assert all(left.stop < right.start for left, right in pairwise(ranges))
    assert not set(places[missing:]) & {place for each in ranges for place in each}
