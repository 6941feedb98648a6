"""Takes over a changed configuration while the process runs.

Rules:

1. Asked by SIGHUP, or by a file that is another than the one read last and has stopped changing.
2. A new configuration is taken over whole or not at all: what can't be used is refused with a log
   line that names the key, and the old one stays.
3. Keys that can't change while the process runs are named, and keep their values until a restart.

4. SIGHUP never ends the process: without a file, or before it is watched, a log line says that there
   is nothing to reload.

Cost: one `stat` per `poll_s`.
"""

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog

from balancer.config import changed_keys, reloaded
from kvlb.errors import SettingsError
from kvlb.settings import KvlbSettings

POLL_S = 1.0

_logger = structlog.get_logger(__name__)

Print = tuple[int, int, int]
"""What tells one content of a file from another: inode, size, time of change."""


class Reloader:
    """Watches one configuration file for one process."""

    def __init__(
        self,
        path: Path,
        *,
        running: KvlbSettings,
        read: Callable[[], KvlbSettings],
        apply: Callable[[KvlbSettings], None],
        ignored: frozenset[str] = frozenset(),
        poll_s: float = POLL_S,
    ) -> None:
        """`read` gives the present configuration or raises SettingsError, in a thread.

        `apply` takes it over, on the loop. `ignored` are sections that this process doesn't use.
        """
        self._path = path
        self._running = running
        self._read = read
        self._apply = apply
        self._ignored = ignored
        self._poll_s = poll_s
        self._asked = asyncio.Event()
        self._seen = _fingerprint(path)

    async def run(self) -> None:
        """Watch until cancelled."""
        with _hangup_calls(self._asked.set):
            while True:
                reason = await self._changed()
                try:
                    await self._reload(reason)
                except Exception:
                    _logger.exception("reload_failed", file=str(self._path))

    async def _changed(self) -> str:
        """Wait for a reason to read the file."""
        changing = self._seen
        while True:
            try:
                async with asyncio.timeout(self._poll_s):
                    await self._asked.wait()
            except TimeoutError:
                now = _fingerprint(self._path)
                if now is None or now == self._seen:
                    changing = self._seen
                    continue
                if now != changing:  # perhaps it is still being written
                    changing = now
                    continue
                self._seen = now
                return "file_changed"
            self._asked.clear()
            self._seen = _fingerprint(self._path)
            return "sighup"

    async def _reload(self, reason: str) -> None:
        try:
            wanted = await asyncio.to_thread(self._read)
        except SettingsError as error:
            _logger.error("reload_refused", reason=reason, error=str(error))  # noqa: TRY400 - no bug
            return
        applied = reloaded(self._running, wanted)
        changed = self._relevant(self._running, applied)
        self._apply(applied)
        self._running = applied
        _logger.info("reloaded", reason=reason, changed=changed)
        if waiting := self._relevant(applied, wanted):
            _logger.warning("restart_needed", keys=waiting)

    def _relevant(self, before: KvlbSettings, now: KvlbSettings) -> list[str]:
        keys = changed_keys(before, now)
        return [key for key in keys if key.partition(".")[0] not in self._ignored]


@contextmanager
def surviving_hangup(file: Path | None) -> Iterator[None]:
    """SIGHUP doesn't end the process while the block runs, which is what it does by default.

    For the time in which no `Reloader` watches: all of it without a file.
    """
    hint = "start it with --config FILE" if file is None else "the file is read at start anyway"

    def say() -> None:
        _logger.warning("nothing_to_reload", reason="sighup", hint=hint)

    with _hangup_calls(say):
        yield


@contextmanager
def _hangup_calls(action: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, action)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)


def _fingerprint(path: Path) -> Print | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
