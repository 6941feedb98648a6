"""What the server's libraries log goes through our own log."""

import logging

import pytest
from structlog.testing import capture_logs

from balancer.server_log import through_structlog


@pytest.fixture
def uvicorn_log() -> logging.Logger:
    """Where uvicorn tells of its troubles."""
    return logging.getLogger("uvicorn.error")


def test_problem_is_an_event_without_a_traceback(uvicorn_log: logging.Logger) -> None:
    """Its kind is told; what it says may hold a prompt."""
    with through_structlog(), capture_logs() as logs:
        uvicorn_log.error("Exception in ASGI application\n", exc_info=ValueError("a prompt"))

    assert logs == [
        {
            "event": "server_problem",
            "problem": "Exception in ASGI application",
            "error": "ValueError",
            "log_level": "warning",
        }
    ]


def test_what_clients_cause_is_said_quietly(uvicorn_log: logging.Logger) -> None:
    """Else a client could fill the log."""
    with through_structlog(), capture_logs() as logs:
        uvicorn_log.error("Invalid UTF-8 sequence received from client.")

    assert [each["log_level"] for each in logs] == ["debug"]


def test_what_a_request_tells_itself_is_not_told(uvicorn_log: logging.Logger) -> None:
    """Its text has a client's address and query."""
    with through_structlog(), capture_logs() as logs:
        uvicorn_log.error("ASGI callable returned without completing response.")
        uvicorn_log.warning('%s - "WebSocket %s" 403', "client", "/x?key=secret")

    assert logs == []


def test_loggers_are_as_before_afterwards(uvicorn_log: logging.Logger) -> None:
    """Whoever embeds a balancer has a log of its own."""
    handlers, propagates = list(uvicorn_log.handlers), uvicorn_log.propagate
    with through_structlog():
        assert not uvicorn_log.propagate

    assert (uvicorn_log.handlers, uvicorn_log.propagate) == (handlers, propagates)
