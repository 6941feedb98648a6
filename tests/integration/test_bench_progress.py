"""Progress of `kvlb bench`, where somebody watches and where nobody does."""

import itertools
import time
from io import StringIO

from rich.console import Console

from kvlb.bench.pool import Task, spread
from kvlb.bench.progress import LINE_EVERY_S, watched

TASKS = [Task(abs, -number) for number in range(1, 7)]
DONE = [(-number, number) for number in range(1, 7)]


def test_where_nobody_watches_a_line_tells_now_and_then() -> None:
    """Not with every run: thousands take a second or less each."""
    out = StringIO()
    ticks = itertools.count(step=LINE_EVERY_S / 2)

    done = list(watched(TASKS, 1, console=Console(file=out), clock=lambda: next(ticks)))

    assert done == DONE
    assert out.getvalue().splitlines() == [
        "2 of 6 runs in 0.5 minutes",
        "4 of 6 runs in 1.0 minutes",
        "6 of 6 runs in 1.5 minutes",
    ]


def test_who_watches_sees_a_bar() -> None:
    """It is gone at the end: what stays are the tables."""
    out = StringIO()

    done = list(watched(TASKS, 1, console=Console(file=out, force_terminal=True, width=80)))

    assert done == DONE
    assert "6 of 6 runs" in out.getvalue()


def test_a_line_comes_while_nothing_ends_and_kinds_are_told_apart() -> None:
    """A search takes minutes: a benchmark that is silent so long looks like a hang."""
    out = StringIO()
    tasks = [Task(time.sleep, 1.0, "searches"), Task(abs, -1)]

    done = list(watched(tasks, 2, console=Console(file=out), line_every_s=0.01))

    assert sorted(done) == [(-1, 1), (1.0, None)]
    assert out.getvalue().startswith("0 of 1 searches, 0 of 1 runs in 0.0 minutes")
    assert "\n0 of 1 searches, 1 of 1 runs in 0.0 minutes" in out.getvalue()


def test_long_tasks_are_spread_and_none_is_last() -> None:
    """So that short ones end meanwhile, and no process is left with a long one at the end."""
    long = [Task(abs, -1, "searches"), Task(abs, -2, "searches")]
    short = [Task(abs, number) for number in range(9)]

    order = [each.argument for each in spread(long, short)]

    assert order == [-1, 0, 1, -2, 2, 3, 4, 5, 6, 7, 8]
    assert spread([], short) == short
    assert spread(long, []) == long
