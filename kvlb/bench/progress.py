"""What is seen of long work: a bar where somebody watches, a line now and then where nobody does."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvlb.bench.pool import Task, done_each

LINE_EVERY_S: Final = 30.0


def watched(
    tasks: Sequence[Task],
    processes: int,
    *,
    console: Console | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[tuple[Any, Any]]:
    """As `done_each`. Progress goes to `console`, stderr if none is given."""
    console = console or Console(stderr=True)
    shown = _with_bar if console.is_terminal else _with_lines
    yield from shown(done_each(tasks, processes), len(tasks), console, clock)


def _with_bar(
    done: Iterator[tuple[Any, Any]], planned: int, console: Console, _: Callable[[], float]
) -> Iterator[tuple[Any, Any]]:
    columns = (TextColumn("runs"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=planned)
        for each in done:
            progress.advance(bar)
            yield each


def _with_lines(
    done: Iterator[tuple[Any, Any]], planned: int, console: Console, clock: Callable[[], float]
) -> Iterator[tuple[Any, Any]]:
    began_s = told_s = clock()
    for count, each in enumerate(done, 1):
        now_s = clock()
        if now_s - told_s >= LINE_EVERY_S:
            told_s = now_s
            minutes = (now_s - began_s) / 60
            console.print(f"{count} of {planned} runs in {minutes:.1f} minutes", highlight=False)
        yield each
