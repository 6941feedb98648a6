"""Runs a command's coroutine on uvloop, until it is done or somebody asks it to stop."""

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

from kvlb.errors import KvlbError

T = TypeVar("T")


def run_command(command: Coroutine[Any, Any, T]) -> T:
    """Run `command` to its end. A KvlbError from inside any task group comes out as itself."""
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(command)
    except BaseExceptionGroup as group:
        deliberate = group.subgroup(KvlbError)
        if deliberate is None or group.split(KvlbError)[1] is not None:
            raise
        raise _first(deliberate) from group


async def wait_for_stop() -> None:
    """Return at the first SIGINT or SIGTERM."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    try:
        await stopped.wait()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def _first(group: BaseExceptionGroup[KvlbError]) -> KvlbError:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
