"""A worker's entry: `python -m kvlb.workers.child LISTENER PIPE`, started by the parent alone."""

import asyncio
import os
import socket
import sys
from pathlib import Path

import structlog

from kvlb.errors import KvlbError
from kvlb.event_loop import run_command, spare_startup_objects, stop_event
from kvlb.logs import configure_logs
from kvlb.reload import surviving_hangup
from kvlb.running import ConfigFile, run_balancer
from kvlb.settings import load_fleet
from kvlb.workers.pipe import Pipe, Start
from kvlb.workers.processes import REFUSED, numbers
from kvlb.workers.seat import Seat

_logger = structlog.get_logger(__name__)


def main() -> None:
    """Run until the parent says so, or is gone."""
    configure_logs()
    listener, pipe = (socket.socket(fileno=each) for each in numbers(sys.argv[1:]))
    try:
        run_command(_work(listener, pipe))
    except KvlbError as error:
        sys.stderr.write(f"kvlb: {error}\n")
        sys.exit(REFUSED)


async def _work(listener: socket.socket, end: socket.socket) -> None:
    pipe = await Pipe.open(end)
    start = await pipe.read()
    if not isinstance(start, Start):
        return
    structlog.contextvars.bind_contextvars(worker=start.number)
    config = None if start.config is None else Path(start.config)
    with stop_event() as stop, surviving_hangup(config):
        settings = load_fleet(config, start.overrides, os.environ)
        seat = Seat(start.number, listener, pipe, balancer_id=start.balancer_id)

        def listening(_: str) -> None:
            seat.ready()
            spare_startup_objects()

        async with asyncio.TaskGroup() as group:
            watching = group.create_task(_watch_parent(pipe, stop))
            await run_balancer(
                settings,
                stop=stop,
                on_listening=listening,
                file=ConfigFile.of(config, start.overrides),
                seat=seat,
            )
            watching.cancel()


async def _watch_parent(pipe: Pipe, stop: asyncio.Event) -> None:
    pipe.on_stop = stop.set
    await pipe.run()
    if stop.is_set():
        # Its owner was told twice to end, or killed while we finished: nobody waits for more.
        os._exit(0)
    _logger.warning("parent_gone", hint="finishing what runs, then ending")
    stop.set()


if __name__ == "__main__":
    main()
