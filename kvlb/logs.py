"""Where logs go: standard error, one event per line; JSON unless somebody is watching."""

import logging
import sys

import msgspec
import structlog


def _to_json(event: object, **_options: object) -> str:
    return msgspec.json.encode(event, enc_hook=repr).decode()


def configure_logs(level: int = logging.INFO) -> None:
    """Set up structlog for this process. Standard output stays for results."""
    watched = sys.stderr.isatty()
    renderer: structlog.typing.Processor = (
        # Plain tracebacks: pretty ones print local variables, and so prompts and keys.
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
        if watched
        else structlog.processors.JSONRenderer(serializer=_to_json)
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            *(() if watched else (structlog.processors.format_exc_info,)),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,  # a module's logger has to follow a later configuration
    )
