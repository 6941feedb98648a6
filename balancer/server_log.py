"""What the server's libraries log, as events of our log.

Rules:

1. Nothing is told twice: a request's own log line says more than uvicorn's text, and no client's
   address or query.
2. What clients can cause at will is said at debug level: nobody can fill a log.
3. No tracebacks: their locals and messages may hold prompts.
"""

import contextlib
import logging
from collections.abc import Iterator
from typing import Final

import structlog

TOLD_ELSEWHERE: Final = (
    "ASGI callable returned without completing",
    "Cancel %s running task",
    '%s - "WebSocket %s"',
)
CLIENTS_FAULTS: Final = ("Invalid UTF-8 sequence received from client.",)
_LOGGERS: Final = ("uvicorn.error", "websockets")

_logger = structlog.stdlib.get_logger(__name__)


class ToStructlog(logging.Handler):
    """Writes what is news."""

    def emit(self, record: logging.LogRecord) -> None:
        text = str(record.msg)
        if text.startswith(TOLD_ELSEWHERE):
            return
        error = record.exc_info[0] if record.exc_info else None
        tell = _logger.debug if text.startswith(CLIENTS_FAULTS) else _logger.warning
        tell(
            "server_problem",
            problem=record.getMessage().strip(),
            error=None if error is None else error.__name__,
        )


@contextlib.contextmanager
def through_structlog() -> Iterator[None]:
    """Take what uvicorn and websockets log while a server runs."""
    handler = ToStructlog(logging.WARNING)
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    propagated = [each.propagate for each in loggers]
    for each in loggers:
        each.addHandler(handler)
        each.propagate = False
    try:
        yield
    finally:
        for each, was in zip(loggers, propagated, strict=True):
            each.removeHandler(handler)
            each.propagate = was
