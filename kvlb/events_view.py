"""`kvlb events`: follows an engine's streams with the indexer's own parts and prints what comes.

What is shown is what the indexer would do: the same ordering, gap detection, replay and restart
rules. Nothing is indexed.
"""

import asyncio
import io
import json
import logging
import os
import select
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TextIO

import httpx

from balancer.fleet.engine_sockets import tls_context
from indexer.config import IndexerConfig, InstanceSource, RankSource
from indexer.core.endpoints import EndpointError, check_endpoint
from indexer.core.stream_effects import Effect, ReplayEnded, RequestReplay
from indexer.core.types import InstanceId, RankId
from indexer.follower import FollowedBatch, FollowedItem, follow
from indexer.sources import InstanceRefusedError, SourceError, find_sources
from kvlb.errors import PeerError, SettingsError
from kvlb.event_lines import EventLines, Line, render_line
from kvlb.event_loop import run_command, stop_event
from kvlb.logs import configure_logs

UNKNOWN_MODEL = "-"
"""Nothing is indexed, so the engine's model needs not be asked for."""

PATIENCE_S = 1.0
"""A publisher that is there answers sooner; until then nothing is said."""
HINT_S = 5.0
LOOK_S = 0.5
"""Between two looks whether anybody still reads what is written."""
WAITING_HINT = (
    "still nobody there: is the engine up, was it started with --kv-events-config, "
    "and can this machine reach that port?"
)

UNDECODABLE = {"what": "rejected", "reason": "undecodable_batch"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsOptions:
    """What the command line says."""

    engine: str
    replay: str | None
    start: int | None
    limit: int | None
    as_json: bool


class ShownBatches:
    """Ends the command after so many batches, over all ranks."""

    def __init__(self, limit: int | None) -> None:
        self._left = limit
        self.reached = asyncio.Event()

    def count(self) -> bool:
        """Whether one more may be shown."""
        if self.reached.is_set():
            return False
        if self._left is not None:
            self._left -= 1
            if self._left == 0:
                self.reached.set()
        return True


class RankView:
    """Turns what one rank's stream brings into lines.

    What was published before we came is only shown if asked for (`start`).
    """

    def __init__(
        self,
        source: RankSource,
        *,
        start: int | None,
        batches: ShownBatches,
        write: Callable[[Line], None],
    ) -> None:
        self._rank = source.rank.rank
        self._start = start
        self._is_joining = source.replay is not None and start is None
        self._batches = batches
        self._write = write
        self._lines = EventLines()

    def show(self, item: FollowedItem) -> None:
        """Write the lines of a batch or an effect, if they are wanted."""
        if isinstance(item, FollowedBatch):
            self._show_batch(item)
        else:
            self._show_effect(item)

    def _show_batch(self, item: FollowedBatch) -> None:
        is_history = self._is_joining and item.replayed
        if is_history or item.seq < (self._start or 0) or not self._batches.count():
            return
        if item.batch is None:
            self._write({**UNDECODABLE, "seq": item.seq, "rank": self._rank})
            return
        for line in self._lines.describe_batch(
            self._rank, item.seq, item.batch, replayed=item.replayed
        ):
            self._write(line)

    def _show_effect(self, effect: Effect) -> None:
        if self._is_joining and isinstance(effect, RequestReplay):
            return
        if isinstance(effect, ReplayEnded):
            self._is_joining = False
        line = self._lines.describe_effect(self._rank, effect)
        if line is not None:
            self._write(line)


class ConnectionView:
    """Says whether a rank's publisher is there; while it isn't, what to check."""

    def __init__(
        self,
        source: RankSource,
        write: Callable[[Line], None],
        *,
        patience_s: float = PATIENCE_S,
        hint_s: float = HINT_S,
    ) -> None:
        self._place = {"rank": source.rank.rank, "endpoint": source.events}
        self._write = write
        self._patience_s = patience_s
        self._hint_s = hint_s
        self._up = asyncio.Event()
        self._down = asyncio.Event()

    def on_connection(self, is_up: bool) -> None:
        """Tell of every change."""
        (self._down if is_up else self._up).clear()
        (self._up if is_up else self._down).set()
        self._write({"what": "following" if is_up else "waiting", **self._place})

    async def run(self) -> None:
        """Watch until cancelled."""
        if not await self._is_up_within(self._patience_s):
            self._write({"what": "waiting", **self._place})
        while True:
            if not await self._is_up_within(self._hint_s):
                self._write({"what": "waiting", **self._place, "hint": WAITING_HINT})
                await self._up.wait()
            await self._down.wait()

    async def _is_up_within(self, wait_s: float) -> bool:
        try:
            async with asyncio.timeout(wait_s):
                await self._up.wait()
        except TimeoutError:
            return False
        return True


def watch(options: EventsOptions) -> None:
    """Print events until the limit, SIGINT or SIGTERM."""
    configure_logs(logging.ERROR)
    run_command(_watch(options))


async def _watch(options: EventsOptions) -> None:
    sources = await find_streams(options)
    if options.start is not None and any(source.replay is None for source in sources):
        raise SettingsError("--from needs a replay socket; name it with --replay tcp://host:port")
    batches = ShownBatches(options.limit)
    write = _printer(json.dumps if options.as_json else render_line, batches)
    with stop_event() as stopped:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(follow_streams(sources, options.start, batches, write)),
                group.create_task(stopped.wait()),
                group.create_task(batches.reached.wait()),
                group.create_task(nobody_reads(sys.stdout)),
            ]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()


async def nobody_reads(output: TextIO) -> None:
    """Wait until who reads `output` has left. A quiet stream writes nothing that would show it."""
    poll = select.poll()
    with suppress(io.UnsupportedOperation):  # a test's, which is no file
        poll.register(output.fileno(), 0)
    while not poll.poll(0):  # noqa: ASYNC110 - loops don't watch a pipe for that end
        await asyncio.sleep(LOOK_S)


async def follow_streams(
    sources: Sequence[RankSource],
    start: int | None,
    batches: ShownBatches,
    write: Callable[[Line], None],
) -> None:
    """Write what every source brings, until cancelled."""
    async with asyncio.TaskGroup() as group:
        for source in sources:
            view = RankView(source, start=start, batches=batches, write=write)
            connection = ConnectionView(source, write)
            group.create_task(connection.run())
            group.create_task(
                follow(
                    source,
                    view.show,
                    config=IndexerConfig(),
                    on_connection=connection.on_connection,
                )
            )


async def find_streams(options: EventsOptions) -> Sequence[RankSource]:
    """Resolve the command line's engine to its ranks' endpoints, or say what is missing."""
    try:
        for endpoint in (options.replay, None if _is_url(options.engine) else options.engine):
            if endpoint is not None:
                check_endpoint(endpoint)
    except EndpointError as error:
        raise SettingsError(f"{error}; an engine's address begins with http://") from error
    if not _is_url(options.engine):
        rank = RankId(InstanceId(options.engine), 0)
        return [
            RankSource(
                rank=rank,
                alias=options.engine,
                model=UNKNOWN_MODEL,
                events=options.engine,
                replay=options.replay,
            )
        ]
    engine = _instance_source(options)
    try:
        async with httpx.AsyncClient(trust_env=False, verify=tls_context()) as http:
            found = await find_sources(engine, config=IndexerConfig(), http=http)
    except InstanceRefusedError as error:
        raise PeerError(str(error)) from error
    except SourceError as error:
        raise PeerError(f"no engine answers at {options.engine}") from error
    if not found.ranks:
        raise PeerError(f"{options.engine} {REMEDIES.get(found.reason, found.reason)}")
    return found.ranks


REMEDIES = {
    "events_off": "publishes no KV events; start it with --kv-events-config "
    '\'{"enable_kv_cache_events": true, "replay_endpoint": "tcp://*:5657"}\'',
    "no_events_endpoint": "has no /kv_event_sources (vLLM before 0.31); name its event socket: "
    "kvlb events tcp://host:5557 --replay tcp://host:5657",
}


def _instance_source(options: EventsOptions) -> InstanceSource:
    try:
        return InstanceSource(url=options.engine, replay=options.replay, model=UNKNOWN_MODEL)
    except ValueError as error:
        raise SettingsError(str(error)) from error


def _is_url(engine: str) -> bool:
    return engine.startswith(("http://", "https://"))


def _printer(render: Callable[[Line], str], batches: ShownBatches) -> Callable[[Line], None]:
    def write(line: Line) -> None:
        try:
            sys.stdout.write(render(line) + "\n")
            sys.stdout.flush()
        except BrokenPipeError:
            # `| head` has what it wanted. What is still buffered must not fail at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            batches.reached.set()

    return write
