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
    """What didn't help for days is tried again within minutes."""
    schedule = RebuildSchedule(10)
    for _ in range(50):
        schedule.asked(0.0)

    assert schedule.wait_s(0.0) == 80


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


def test_socket_that_does_not_answer_is_looked_at_instead() -> None:
    """At once, then every 5 seconds; the rebuild's own pauses stay as they were."""
    schedule = RebuildSchedule(10, 5)
    schedule.asked(0.0)
    schedule.heard(is_answered=False)
    assert (schedule.is_unanswered, schedule.wait_s(1.0)) == (True, 0)

    schedule.asked(1.0)
    assert schedule.wait_s(1.0) == 5
    schedule.heard(is_answered=False)
    assert schedule.wait_s(2.0) == 4


def test_socket_that_answers_again_makes_the_rebuild_due() -> None:
    """And its pauses begin anew; one that always answers hurries nothing."""
    schedule = RebuildSchedule(10, 5)
    for _ in range(3):
        schedule.asked(0.0)
    schedule.heard(is_answered=True)
    assert schedule.wait_s(0.0) == 40

    schedule.heard(is_answered=False)
    schedule.heard(is_answered=True)
    assert (schedule.is_unanswered, schedule.wait_s(0.0)) == (False, 0)
    schedule.asked(0.0)
    assert schedule.wait_s(0.0) == 10
