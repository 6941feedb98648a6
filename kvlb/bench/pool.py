"""Independent pieces of work on several cores."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any, NamedTuple


class Task(NamedTuple):
    """A call that another process can make."""

    function: Callable[[Any], Any]
    argument: Any


def done_each(tasks: Sequence[Task], processes: int) -> Iterator[tuple[Any, Any]]:
    """Argument and result of each, as they are done; the first are begun first."""
    if processes == 1:
        for function, argument in tasks:
            yield argument, function(argument)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(task.function, task.argument): task.argument for task in tasks}
        for done in as_completed(running):
            yield running[done], done.result()
