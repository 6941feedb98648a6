"""Progress of `kvlb bench`, where somebody watches and where nobody does."""

import itertools
from io import StringIO

from rich.console import Console

from kvlb.bench.pool import Task
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
    assert "6/6" in out.getvalue()
