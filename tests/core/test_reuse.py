"""How likely blocks are asked for again, learned from when they were."""

from itertools import count

import pytest

from balancer.core.load import reuse
from balancer.core.load.reuse import AGES_S, ReuseTimes, sample_blocks, sampled
from indexer.core.types import BlockKey


def keys(first: int, blocks: int) -> list[BlockKey]:
    return [BlockKey(number) for number in range(first, first + blocks)]


def settled(times: ReuseTimes, now_s: float) -> ReuseTimes:
    """Let a batch open: only then what happened before counts."""
    times.used((), now_s)
    return times


def test_of_nothing_nothing_is_expected() -> None:
    """A new fleet pays nothing for what it pushes out."""
    assert ReuseTimes().chance(0.0) == 0
    assert settled(ReuseTimes(), 1.0).chance(1.0) == 0


def test_blocks_asked_for_again_and_again_are_likely_to_be_asked_for_again() -> None:
    """Every three seconds: as long as nobody waited longer than that."""
    times = ReuseTimes()
    for turn in range(40):
        times.used(keys(0, 20), turn * 3.0)

    assert times.chance(0.5) > 0.95
    assert times.chance(10.0) == 0


def test_a_third_of_the_uses_is_followed_by_another_one_after_four_seconds() -> None:
    """Of forty blocks half come back once: who waited longer than that waits for ever."""
    times = ReuseTimes()
    for turn in range(100):
        now_s = turn * 8.0
        times.used(keys(turn * 100, 40), now_s)
        times.used(keys(turn * 100, 20), now_s + 4.0)
    settled(times, 2000.0)

    assert times.chance(1.0) == pytest.approx(1 / 3, abs=0.01)
    assert times.chance(5.0) < 0.02


def test_what_still_waits_says_nothing_of_later_ages() -> None:
    """A table of ten seconds' standing knows only of blocks that came back, or waited for ten."""
    times = ReuseTimes()
    for turn in range(10):
        times.used(keys(0, 50), turn * 1.0)
    times.used(keys(1000, 50), 9.5)
    settled(times, 10.0)

    assert times.chance(0.3) > 0.85


def test_siblings_of_one_moment_are_no_reuse() -> None:
    """A burst says nothing of what is asked for after a pause."""
    times = ReuseTimes()
    for _ in range(64):
        times.used(keys(0, 50), 5.0)
    settled(times, 1000.0)

    assert times.chance(0.0) == 0


def test_who_waited_longer_than_any_age_is_forgotten() -> None:
    """It is new when it comes back, and memory is bounded by time, too."""
    times = ReuseTimes()
    times.used(keys(0, 50), 0.0)
    settled(times, AGES_S[-1] + 1)
    times.used(keys(0, 50), AGES_S[-1] + 2)
    settled(times, AGES_S[-1] + 10)

    assert times.chance(0.0) == 0


def test_more_blocks_than_there_is_room_for_are_thinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """By key, so that those still looked at are looked at whenever they come."""
    monkeypatch.setattr(reuse, "MAX_BLOCKS", 100)
    times, fresh = ReuseTimes(), count(10_000, 1000)
    for turn in range(200):
        now_s = turn * 2.0
        times.used(keys(0, 40), now_s)
        times.used(keys(next(fresh), 10), now_s)

    assert times.chance(1.0) > 0.5
    assert len(times._last) <= 150


def test_habits_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was learned long ago counts ever less."""
    monkeypatch.setattr(reuse, "MAX_COUNTED", 1000)
    times, fresh = ReuseTimes(), count(10_000, 100)
    for turn in range(100):
        times.used(keys(0, 20), turn * 2.0)
    before = times.chance(1.0)
    for turn in range(100, 400):
        times.used(keys(next(fresh), 20), turn * 2.0)

    assert before > 0.9
    assert times.chance(1.0) < 0.2


@pytest.mark.parametrize(("block_size", "stride"), [(16, 32), (128, 4), (512, 1), (1024, 1)])
def test_prompts_that_share_a_prefix_share_its_samples(block_size: int, stride: int) -> None:
    """One block in 512 tokens, always at the same depths."""
    short, long = keys(0, 100), keys(0, 400)

    assert sample_blocks(block_size) == stride
    assert list(sampled(short, block_size)) == list(sampled(long, block_size))[: 100 // stride]
    assert len(sampled(long, block_size)) == pytest.approx(400 / stride, abs=1)
