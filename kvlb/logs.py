"""Where logs go: standard error, one event per line; JSON unless somebody is watching."""

import logging
import sys
from datetime import UTC, datetime
from typing import Any

import msgspec
import structlog


def configure_logs(level: int = logging.INFO) -> None:
    """Set up structlog for this process. Standard output stays for results."""
    watched = sys.stderr.isatty()
    structlog.configure(
        processors=_for_people() if watched else _for_machines(),
        wrapper_class=structlog.make_filtering_bound_logger(level),
        # Whole lines of bytes, in one call each: a third of what `print` takes.
        logger_factory=structlog.PrintLoggerFactory(sys.stderr)
        if watched
        else structlog.BytesLoggerFactory(sys.stderr.buffer),
        cache_logger_on_first_use=False,  # a module's logger has to follow a later configuration
    )


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
    """Everything at once: a line is written for every request."""
    event = structlog.processors.add_log_level(logger, method, event)
    event["timestamp"] = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%f}Z"
    if "exc_info" in event:
        event = structlog.processors.format_exc_info(logger, method, event)
    return msgspec.json.encode(event, enc_hook=repr)
