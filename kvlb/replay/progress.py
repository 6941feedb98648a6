"""What is seen while a replay runs: a bar where somebody watches, log lines where nobody does."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from kvlb.replay.sending import Sent

REFRESH_S = 0.25
LOG_S = 10.0

_logger = structlog.get_logger(__name__)


@asynccontextmanager
async def shown_progress(
    sent: Sent, planned: int, console: Console, *, log_s: float = LOG_S
) -> AsyncIterator[None]:
    """Show `sent` until the block ends."""
    if not console.is_terminal:
        async with asyncio.TaskGroup() as group:
            logging = group.create_task(_log_forever(sent, planned, log_s))
            yield
            logging.cancel()
        return
    bar = Progress(
        TextColumn("replaying"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[in_flight]} in flight, {task.fields[failed]} failed"),
        TimeElapsedColumn(),
        console=console,
        auto_refresh=False,  # from the loop, not from a thread that disturbs it
    )
    task = bar.add_task("", total=planned, in_flight=0, failed=0)
    with bar:
        async with asyncio.TaskGroup() as group:
            refreshing = group.create_task(_refresh_forever(sent, bar, task))
            yield
            refreshing.cancel()
        _refresh(sent, bar, task)


async def _refresh_forever(sent: Sent, bar: Progress, task: TaskID) -> None:
    while True:
        _refresh(sent, bar, task)
        await asyncio.sleep(REFRESH_S)


def _refresh(sent: Sent, bar: Progress, task: TaskID) -> None:
    done = len(sent.outcomes)
    bar.update(task, completed=done, in_flight=sent.in_flight, failed=sent.failed)
    bar.refresh()


async def _log_forever(sent: Sent, planned: int, log_s: float) -> None:
    while True:
        await asyncio.sleep(log_s)
        _logger.info(
            "replay_sent",
            planned=planned,
            answered=sent.answered,
            failed=sent.failed,
            in_flight=sent.in_flight,
        )
