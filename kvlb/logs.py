"""Where logs go: standard error, one event per line; JSON unless somebody is watching.

Rules:

1. Lines leave in the order in which they were logged.
2. The line of a finished request may wait, for `LATEST_S` and `MOST_WAITING` lines at most, or for a
   line of any other kind: those leave at once. What waits leaves before the process ends, unless
   it is killed.

Cost: a request's line is one encoding; the system call is shared. Through structlog each took ten
calls and a system call of its own, a fiftieth of a whole request.
"""

import asyncio
import atexit
import logging
import sys
import threading
from collections import deque
from datetime import UTC, datetime
from time import time_ns
from typing import Any, BinaryIO, Final

import msgspec
import structlog

from balancer.core.record import RequestRecord
from balancer.core.request_line import request_line
from balancer.dataplane.request_log import REQUEST_DONE, LogRequest

_REQUEST_DONE: Final = REQUEST_DONE.encode()
LATEST_S: Final = 0.5
MOST_WAITING: Final = 64


class Moments:
    """Timestamps as `_now` has them; a second is spelt once."""

    __slots__ = ("_second", "_told")

    def __init__(self) -> None:
        self._second = -1
        self._told = b""

    def spell(self, unix_ns: int) -> bytes:
        """A moment, in UTC."""
        second, ns = divmod(unix_ns, 1_000_000_000)
        if second != self._second:
            self._second = second
            self._told = datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S").encode()
        return b"%b.%06dZ" % (self._told, ns // 1000)


class LineLog:
    """Writes whole lines; structlog's logger, and the factory that makes it."""

    def __init__(self, out: BinaryIO, *, tells_requests: bool) -> None:
        self.tells_requests = tells_requests
        self._out = out
        self._waiting: deque[bytes] = deque()
        self._lock = threading.Lock()
        self._is_due = False
        self._moments = Moments()

    def __call__(self, *_: Any) -> "LineLog":
        return self

    def msg(self, line: bytes) -> None:
        """Write a line, and what waits before it. Any thread may call this."""
        self._waiting.append(line + b"\n")
        self.flush()

    debug = info = warning = error = critical = exception = msg

    def request_done(self, record: RequestRecord) -> None:
        """Tell of a finished request, soon. To be called on the event loop."""
        told = msgspec.json.encode(request_line(record))
        self._waiting.append(
            b'%b,"event":"%b","level":"info","timestamp":"%b"}\n'
            % (told[:-1], _REQUEST_DONE, self._moments.spell(time_ns()))
        )
        if len(self._waiting) >= MOST_WAITING:
            self.flush()
        elif not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_later(LATEST_S, self._flush_due)

    def flush(self) -> None:
        """Write what waits."""
        with self._lock:
            lines = []
            while self._waiting:  # one by one: others may add meanwhile
                lines.append(self._waiting.popleft())
            if lines:
                self._out.write(b"".join(lines))
                self._out.flush()

    def _flush_due(self) -> None:
        self._is_due = False
        self.flush()


def configure_logs(level: int = logging.INFO) -> None:
    """Set up structlog for this process. Standard output stays for results."""
    is_watched = sys.stderr.isatty()
    structlog.configure(
        processors=_for_people() if is_watched else _for_machines(),
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr) if is_watched else _line_log(level),
        cache_logger_on_first_use=False,  # a module's logger has to follow a later configuration
    )


def request_log() -> LogRequest | None:
    """The cheap way to log a finished request, where logs are lines for machines."""
    log = structlog.get_config()["logger_factory"]
    return log.request_done if isinstance(log, LineLog) and log.tells_requests else None


def flush_logs() -> None:
    """Write what waits, for a process that ends without the usual ceremony."""
    log = structlog.get_config()["logger_factory"]
    if isinstance(log, LineLog):
        log.flush()


def _line_log(level: int) -> LineLog:
    log = LineLog(sys.stderr.buffer, tells_requests=level <= logging.INFO)
    atexit.register(log.flush)
    return log


def _for_people() -> list[structlog.typing.Processor]:
    return [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
        # Plain tracebacks: pretty ones print local variables, and so prompts and keys.
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback),
    ]


def _for_machines() -> list[structlog.typing.Processor]:
    return [_to_line]


def _to_line(logger: Any, method: str, event: structlog.typing.EventDict) -> bytes:
    """Everything at once."""
    event = structlog.processors.add_log_level(logger, method, event)
    event["timestamp"] = _now()
    if "exc_info" in event:
        event = structlog.processors.format_exc_info(logger, method, event)
    return msgspec.json.encode(event, enc_hook=repr)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds").removesuffix("+00:00") + "Z"
