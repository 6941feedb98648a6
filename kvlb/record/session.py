"""One recording from the first question to the last event."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import zmq

from balancer.core.fleet.snapshot import Role
from balancer.fleet.engine_sockets import tls_context
from kvlb.errors import PeerError
from kvlb.event_taps import tapped
from kvlb.record.asking import ask
from kvlb.record.stations import RecordedEngine, Station, find_engines
from kvlb.record.streams import StreamRecorder, record_replay
from kvlb.record.workload import Player, find_targets
from kvlb.record.writer import CaptureWriter
from kvlb.settings import KvlbSettings

HTTP_TIMEOUT_S = 120.0
EVENT_PATIENCE_S = 3.0
WARM_UP_ATTEMPTS = 5
QUIET_S = 1.0
FLUSH_INTERVAL_S = 1.0
"""As much of a recording is lost at most if it is killed."""
WARM_UP_TEXT = "is this stream live, and does it come here? " * 24
KV_ROLES = {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer", Role.MIXED: "none"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordOptions:
    """What the command line says."""

    out: Path
    requests: int | None
    minutes: float | None
    nonce: str
    """Begins the prompt that shows a stream to be live; new each time."""
    concurrency: int = 1
    seed: int = 1


Drive = Callable[[Sequence[Station], CaptureWriter], Awaitable[None]]
"""Has requests sent to stations until it returns."""


async def record(
    settings: KvlbSettings,
    options: RecordOptions,
    clock: Callable[[], float],
    stopped: asyncio.Event,
    drive: Drive | None = None,
) -> CaptureWriter:
    """Record until the requests are sent, the minutes are over, or `stopped` is set."""
    limits = httpx.Limits(keepalive_expiry=2)
    async with httpx.AsyncClient(
        trust_env=False, verify=tls_context(), timeout=HTTP_TIMEOUT_S, limits=limits
    ) as http:
        engines = await find_engines(settings, http)
        stations = [station for engine in engines for station in engine.stations]
        send = drive or _player(options)
        with CaptureWriter(options.out, clock) as writer:
            _describe(engines, writer, options)
            async with _flushed(writer), _recorded(stations, writer, options.nonce):
                await _until_done(send(stations, writer), options.minutes, stopped)
            writer.note("stopped")
    return writer


def _player(options: RecordOptions) -> Drive:
    async def play(stations: Sequence[Station], writer: CaptureWriter) -> None:
        player = Player(
            find_targets(stations),
            writer,
            seed=options.seed,
            requests=options.requests,
            concurrency=options.concurrency,
        )
        await player.run()

    return play


def _describe(
    engines: Sequence[RecordedEngine], writer: CaptureWriter, options: RecordOptions
) -> None:
    roles = {engine.name: {"kv_role": KV_ROLES[engine.role]} for engine in engines}
    writer.note("config", name=options.out.name, seed=options.seed, **roles)
    writer.note(
        "started",
        models=engines[0].models,
        version=[engine.version for engine in engines],
        sources=[engine.sources for engine in engines],
    )


@asynccontextmanager
async def _flushed(writer: CaptureWriter) -> AsyncIterator[None]:
    """Keep what is written readable on disk, a moment late at most."""

    async def flush() -> None:
        while True:
            writer.flush()
            await asyncio.sleep(FLUSH_INTERVAL_S)

    async with asyncio.TaskGroup() as group:
        flushing = group.create_task(flush())
        yield
        flushing.cancel()


@asynccontextmanager
async def _recorded(
    stations: Sequence[Station], writer: CaptureWriter, nonce: str
) -> AsyncIterator[None]:
    """Record every stream; on entry each is known to be live, at the end its last events are in."""
    context = zmq.Context()
    recorders = [StreamRecorder(station, writer) for station in stations]
    try:
        async with tapped(recorders, context):
            for station in stations:
                await record_replay(station, writer, context, "before")
            for recorder in recorders:
                await _warm_up(recorder, writer, nonce)
            yield
            await _settle(writer)
        for recorder in recorders:
            if recorder.has_gap:
                await record_replay(recorder.station, writer, context, "after")
    finally:
        context.destroy(linger=0)


async def _warm_up(recorder: StreamRecorder, writer: CaptureWriter, nonce: str) -> None:
    """Send prompts nobody has sent before until an event of one comes. Raises PeerError."""
    station = recorder.station
    for attempt in range(WARM_UP_ATTEMPTS):
        # Twice as long each time: nothing is announced below a block, and blocks differ.
        text = f"{nonce} {station.label} " + WARM_UP_TEXT * 2**attempt
        body = {"model": station.model, "prompt": text, "max_tokens": 1, "temperature": 0}
        before = recorder.messages
        await ask(station, writer, body, phase="warm-up", label="warm-up")
        if await recorder.brings(before + 1, EVENT_PATIENCE_S):
            return
        if recorder.problem is not None:
            break
    raise PeerError(
        f"{station.label}: no event came from {station.source.events}"
        f"{f' ({recorder.problem})' if recorder.problem else ''}; `kvlb doctor` says why"
    )


async def _settle(writer: CaptureWriter) -> None:
    """Wait until no message has come for a while: events may be later than answers."""
    messages = -1
    while messages != writer.messages:
        messages = writer.messages
        await asyncio.sleep(QUIET_S)


async def _until_done(
    sending: Awaitable[None], minutes: float | None, stopped: asyncio.Event
) -> None:
    async def send() -> None:
        await sending

    async with asyncio.TaskGroup() as group:
        tasks = (group.create_task(send()), group.create_task(stopped.wait()))
        limit_s = None if minutes is None else 60 * minutes
        await asyncio.wait(tasks, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
