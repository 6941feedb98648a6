"""Rebuilds are asked for at once, then ever more rarely."""

from indexer.core.rebuild_schedule import RebuildSchedule


def test_first_rebuild_is_due_at_once_and_later_ones_ever_more_rarely() -> None:
    """10, 20, 40 seconds."""
    schedule = RebuildSchedule(10)
    waits = []
    now_s = 100.0
    for _ in range(4):
        waits.append(schedule.wait_s(now_s))
        now_s += schedule.wait_s(now_s)
        schedule.asked(now_s)

    assert waits == [0, 10, 20, 40]


def test_pause_has_a_longest() -> None:
    """An engine that gets its replay socket back days later is asked within the hour."""
    schedule = RebuildSchedule(10)
    for _ in range(50):
        schedule.asked(0.0)

    assert schedule.wait_s(0.0) == 640


def test_orphans_hurry_it_once() -> None:
    """However many come while it doesn't help."""
    schedule = RebuildSchedule(10)
    schedule.asked(0.0)
    schedule.hurry()
    assert schedule.wait_s(1.0) == 0

    schedule.asked(1.0)
    schedule.hurry()
    assert schedule.wait_s(1.0) == 20


def test_exact_rank_begins_with_short_pauses_again() -> None:
    """But never sooner than the last pause ends, except for orphans."""
    schedule = RebuildSchedule(10)
    schedule.asked(0.0)
    schedule.asked(0.0)
    schedule.ease()
    assert schedule.wait_s(0.0) == 20

    schedule.hurry()
    assert schedule.wait_s(0.0) == 0
    schedule.asked(0.0)
    assert schedule.wait_s(0.0) == 10
