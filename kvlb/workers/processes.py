"""The parent: binds the port, starts workers, starts again who ends, and stops them all.

Rules:

1. Every worker has a listening socket of its own on the one port (SO_REUSEPORT), bound here and listened
   on there once it is ready: so the system spreads connections, and a worker that ends takes none with it
   but those it had.
2. A worker that ends unasked is started again, at once if it had run for a while, else after a pause that
   doubles. One that refuses its settings before any worker was ever ready ends the parent, as it would
   end itself.
3. A worker that gives no sign of life for `STUCK_S` is killed: it would hold its connections for ever.
4. Workers are in sessions of their own: a signal from a terminal reaches the parent alone. It tells
   them over their pipes to finish, and passes SIGHUP on. A worker that is told to end by a signal of its
   own drains, ends, and is started again. When the parent is gone, workers finish what runs and end.
"""

import asyncio
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import structlog
from prometheus_client import CollectorRegistry, Counter

from balancer.server import ListenError, bind_shared
from balancer.siblings import read_figures
from balancer.surroundings import TimeAndChance
from kvlb.errors import SettingsError, WorkersError
from kvlb.load_stream import open_channel
from kvlb.running import listening_url
from kvlb.settings import KvlbSettings, Overrides
from kvlb.workers.hub import Hub
from kvlb.workers.pipe import Pipe, Start, Stop

CHILD = (sys.executable, "-m", "kvlb.workers.child")
SETTLED_S = 10.0
"""A worker that has run for so long is started again at once."""
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 10.0
REFUSED = 2
"""Exit code of whoever refuses its settings."""
STUCK_S = 30.0
WATCH_S = 1.0
AFTER_DRAIN_S = 5.0
"""Beyond `drain_s`, until a worker that doesn't end is killed."""

_logger = structlog.get_logger(__name__)


class Workers:
    """The workers of one port."""

    def __init__(
        self,
        settings: KvlbSettings,
        *,
        overrides: Overrides,
        config: Path | None,
        registry: CollectorRegistry,
        hub: Hub,
        stop: asyncio.Event,
    ) -> None:
        """`overrides` and `config` are read again by each worker."""
        self._settings = settings
        self._overrides = overrides
        self._config = config
        self._hub = hub
        self._stop = stop
        self._balancer_id = TimeAndChance().new_id()
        self._running: dict[int, asyncio.subprocess.Process] = {}
        self._pipes: dict[int, Pipe] = {}
        self._ready: set[int] = set()
        self._all_ready = asyncio.Event()
        self._restarts = Counter(
            "kvlb_worker_restarts_total",
            "Workers that ended and were started again.",
            registry=registry,
        )

    async def run(self, placeholder: socket.socket, on_listening: Callable[[int], None]) -> None:
        """Until `stop` is set and all have finished. Raises WorkersError.

        `placeholder` keeps the port. `on_listening` gets it once every worker accepts connections.
        """
        port = int(placeholder.getsockname()[1])
        with self._passing_on_hangups():
            async with asyncio.TaskGroup() as group:
                stopping = group.create_task(self._stop_all())
                watching = group.create_task(self._kill_stuck())
                telling = group.create_task(self._tell(lambda: on_listening(port)))
                async with asyncio.TaskGroup() as kept:
                    for number in range(self._settings.workers):
                        kept.create_task(self._keep(number, port))
                stopping.cancel()
                watching.cancel()
                telling.cancel()

    async def _keep(self, number: int, port: int) -> None:
        """Have one worker run until all are to stop."""
        pause_s = FIRST_PAUSE_S
        loop = asyncio.get_running_loop()
        while not self._stop.is_set():
            started_s = loop.time()
            code = await self._run_one(number, port)
            if self._stop.is_set():
                return
            if code == REFUSED and not self._all_ready.is_set():
                raise WorkersError
            self._restarts.inc()
            _logger.warning("worker_ended", number=number, exit_code=code)
            if loop.time() - started_s >= SETTLED_S:
                pause_s = FIRST_PAUSE_S
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stop.wait()
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _run_one(self, number: int, port: int) -> int:
        ours, theirs = socket.socketpair()
        with bind_shared(self._settings.host, port) as listener, theirs:
            descriptors = listener.fileno(), theirs.fileno()
            process = await asyncio.create_subprocess_exec(
                *CHILD,
                *(str(each) for each in descriptors),
                pass_fds=descriptors,
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
        self._running[number] = process
        pipe = self._pipes[number] = await Pipe.open(ours)
        pipe.on_ready = lambda: self._on_ready(number)
        config = None if self._config is None else str(self._config)
        pipe.send(Start(number, self._overrides, config, self._balancer_id))
        self._hub.join(number, pipe)
        try:
            if self._stop.is_set():  # it was asked before there was anybody to tell
                pipe.send(Stop())
            await pipe.run()
            return await process.wait()
        finally:
            self._hub.leave(number)
            del self._running[number], self._pipes[number]
            if process.returncode is None:
                process.kill()
                await process.wait()

    def _on_ready(self, number: int) -> None:
        self._ready.add(number)
        if len(self._ready) == self._settings.workers:
            self._all_ready.set()

    async def _tell(self, on_listening: Callable[[], None]) -> None:
        await self._all_ready.wait()
        on_listening()

    async def _kill_stuck(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            for number in self._hub.silent(STUCK_S):
                _logger.error("worker_stuck", number=number, silent_s=STUCK_S)
                self._running[number].kill()

    async def _stop_all(self) -> None:
        await self._stop.wait()
        _logger.info("draining_started", workers=len(self._running))
        for pipe in self._pipes.values():
            pipe.send(Stop())
        await asyncio.sleep(self._settings.drain_s + AFTER_DRAIN_S)
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._running.values():
            with suppress(ProcessLookupError):
                process.send_signal(number)

    @contextmanager
    def _passing_on_hangups(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, self._signal, signal.SIGHUP)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGHUP)


async def run_workers(
    settings: KvlbSettings,
    *,
    overrides: Overrides,
    config: Path | None,
    registry: CollectorRegistry,
    stop: asyncio.Event,
    on_listening: Callable[[str], None],
) -> None:
    """Serve with `settings.workers` processes until `stop` is set. Raises SettingsError, WorkersError."""
    try:
        placeholder = bind_shared(settings.host, settings.port, is_first=True)
    except ListenError as error:
        raise SettingsError(f"{error}; choose another with --host or --port") from error
    with placeholder:
        async with open_channel(settings.redis) as channel, asyncio.TaskGroup() as group:
            hub = Hub(lambda: read_figures(registry), channel)
            sharing = group.create_task(hub.run())
            workers = Workers(
                settings,
                overrides=overrides,
                config=config,
                registry=registry,
                hub=hub,
                stop=stop,
            )
            await workers.run(
                placeholder, lambda port: on_listening(listening_url(settings.host, port))
            )
            sharing.cancel()


def numbers(arguments: Sequence[str]) -> tuple[int, int]:
    """Descriptors of the listening socket and of the pipe, as a worker is given them."""
    listener, pipe = arguments
    return int(listener), int(pipe)
