"""What is told of Redis's refusals: enough to act on, and none of its words."""

import pytest
from redis._parsers import BaseParser
from redis.exceptions import ConnectionError as RedisConnectionError

from indexer.core.index import IndexFullError
from indexer.redis_index.faults import index_error


def answered(words: str) -> Exception:
    """The client's error for this answer of a server."""
    error: Exception = BaseParser.parse_error(words)  # type: ignore[no-untyped-call]
    return error


SECRET = "7305"  # noqa: S105 - what must not be shown


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        pytest.param("READONLY You can't write", "primary", id="read-only"),
        pytest.param("WRONGPASS invalid username-password pair", "password_env", id="password"),
        pytest.param("NOAUTH Authentication required.", "password_env", id="no-password"),
        pytest.param("NOPERM this user has no permissions", "ACL", id="acl"),
        pytest.param("LOADING Redis is loading", "loading", id="loading"),
        pytest.param("MISCONF Redis is configured to save", "disk", id="disk"),
        pytest.param("NOREPLICAS Not enough good replicas", "replicas", id="no-replicas"),
        pytest.param("MASTERDOWN Link with MASTER is down", "lost its primary", id="primary-gone"),
        pytest.param("CLUSTERDOWN Hash slot not served", "slots", id="cluster-down"),
        pytest.param("MOVED 3999 127.0.0.1:", "cluster", id="cluster"),
        pytest.param("BUSY Redis is busy running a script", "busy", id="busy"),
        pytest.param("ERR max number of clients reached", "maxclients", id="clients"),
        pytest.param("OOM command not allowed", "maxmemory", id="full"),
        pytest.param("ERR OOM command not allowed. script: 1a", "maxmemory", id="full-in-script"),
        pytest.param("ERR something new", "ResponseError", id="unknown"),
    ],
)
def test_refusal_says_what_to_change(answer: str, word: str) -> None:
    """By what Redis answered, without repeating it."""
    told = str(index_error(answered(answer + SECRET)))

    assert word in told
    assert SECRET not in told


def test_full_is_an_error_of_its_own() -> None:
    """The indexer makes room then."""
    assert isinstance(index_error(answered("OOM no")), IndexFullError)


def test_lost_connection_names_its_cause() -> None:
    """Refused, reset or no such host: whatever the client says of it."""
    error = RedisConnectionError(SECRET)
    error.__cause__ = ConnectionRefusedError(111, SECRET)

    assert "ConnectionRefusedError" in str(index_error(error))
    assert "didn't answer" in str(index_error(TimeoutError()))
    assert SECRET not in str(index_error(error))
    assert "ValueError" not in str(index_error(ValueError(SECRET)))
