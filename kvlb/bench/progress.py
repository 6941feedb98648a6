"""What is seen of long work: a bar where somebody watches, a line now and then where nobody does."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kvlb.bench.pool import Task, done_each

LINE_EVERY_S: Final = 30.0

Steps = Iterator[tuple[Task, Any] | None]


def watched(
    tasks: Sequence[Task],
    processes: int,
    *,
    console: Console | None = None,
    clock: Callable[[], float] = time.monotonic,
    line_every_s: float = LINE_EVERY_S,
) -> Iterator[tuple[Any, Any]]:
    """Argument and result of each, as they are done.

    Progress goes to `console`, stderr if none is given; also while nothing ends, if there are
    several processes.
    """
    console = console or Console(stderr=True)
    counts = _Counts(tasks)
    steps = done_each(tasks, processes, tick_s=line_every_s)
    if console.is_terminal:
        shown = _with_bar(steps, counts, console)
    else:
        shown = _with_lines(steps, counts, console, clock, line_every_s)
    for step in shown:
        if step is not None:
            yield step[0].argument, step[1]


class _Counts:
    """How many of each kind there are, and are done."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.planned = Counter(task.kind for task in tasks)
        self._done: Counter[str] = Counter()

    def note(self, step: tuple[Task, Any] | None) -> None:
        """Count what was done, if anything was."""
        if step is not None:
            self._done[step[0].kind] += 1

    def __str__(self) -> str:
        counts = (
            f"{self._done[kind]} of {planned} {kind}" for kind, planned in self.planned.items()
        )
        return ", ".join(counts)


def _with_bar(steps: Steps, counts: _Counts, console: Console) -> Steps:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task(str(counts), total=counts.planned.total())
        for step in steps:
            counts.note(step)
            progress.update(bar, advance=step is not None, description=str(counts))
            yield step


def _with_lines(
    steps: Steps,
    counts: _Counts,
    console: Console,
    clock: Callable[[], float],
    line_every_s: float,
) -> Steps:
    began_s = told_s = clock()
    for step in steps:
        counts.note(step)
        now_s = clock()
        if step is None or now_s - told_s >= line_every_s:
            told_s = now_s
            console.print(f"{counts} in {(now_s - began_s) / 60:.1f} minutes", highlight=False)
        yield step
