"""Independent pieces of work on several cores."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from multiprocessing import get_context
from typing import Any, NamedTuple


class Task(NamedTuple):
    """A call that another process can make."""

    function: Callable[[Any], Any]
    argument: Any
    kind: str = "runs"
    """What many of them are called where progress is told."""


def spread(long: Sequence[Task], short: Sequence[Task]) -> list[Task]:
    """Both, in an order in which short ones end all the time, and none of the long ones is last.

    The long ones come evenly among the first half of the short ones.
    """
    if not long:
        return [*short]
    share = len(short) // 2 // len(long)
    tasks: list[Task] = []
    for number, each in enumerate(long):
        tasks += [each, *short[number * share : (number + 1) * share]]
    return [*tasks, *short[len(long) * share :]]


def done_each(
    tasks: Sequence[Task], processes: int, *, tick_s: float
) -> Iterator[tuple[Task, Any] | None]:
    """Tasks and results, as they are done; the first are begun first.

    None: nothing was done for `tick_s`. One process alone can't tell that.
    """
    if processes == 1:
        for task in tasks:
            yield task, task.function(task.argument)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(task.function, task.argument): task for task in tasks}
        while running:
            done, _ = wait(running, tick_s, FIRST_COMPLETED)
            if not done:
                yield None
            for future in done:
                yield running.pop(future), future.result()
