"""What is told of Redis's refusals: enough to act on, and none of its words."""

import pytest

from indexer.core.index import IndexFullError
from indexer.redis_index.faults import index_error
from indexer.redis_index.lane import RedisRefusal

SECRET = "hunter2"  # noqa: S105 - what must not be shown


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        pytest.param("READONLY You can't write", "primary", id="read-only"),
        pytest.param("WRONGPASS invalid username-password pair", "password_env", id="password"),
        pytest.param("NOAUTH Authentication required.", "password_env", id="no-password"),
        pytest.param("ERR AUTH <password> called without any", "no password", id="needless"),
        pytest.param("NOPERM this user has no permissions", "ACL", id="acl"),
        pytest.param("LOADING Redis is loading", "loading", id="loading"),
        pytest.param("MISCONF Redis is configured to save", "disk", id="disk"),
        pytest.param("NOREPLICAS Not enough good replicas", "replicas", id="no-replicas"),
        pytest.param("MASTERDOWN Link with MASTER is down", "lost its primary", id="primary-gone"),
        pytest.param("CLUSTERDOWN Hash slot not served", "slots", id="cluster-down"),
        pytest.param("MOVED 3999 127.0.0.1:6381", "cluster", id="moved"),
        pytest.param("WRONGTYPE Operation against a key", "redis.prefix", id="wrong-type"),
        pytest.param("BUSY Redis is busy running a script", "busy", id="busy"),
        pytest.param("-DENIED Redis is running in protected mode", "protected", id="protected"),
        pytest.param("ERR max number of clients reached", "maxclients", id="clients"),
        pytest.param("ERR DB index is out of range", "database", id="database"),
        pytest.param("OOM command not allowed", "maxmemory", id="full"),
        pytest.param("ERR OOM command not allowed. script: 1a", "maxmemory", id="full-in-script"),
        pytest.param("WHATEVER is new", "WHATEVER", id="unknown"),
        pytest.param("unheard of", "unknown", id="without-a-code"),
    ],
)
def test_refusal_says_what_to_change(answer: str, word: str) -> None:
    """By what Redis answered, without repeating it."""
    told = str(index_error(RedisRefusal(f"{answer} {SECRET}")))

    assert word in told
    assert SECRET not in told


def test_full_is_an_error_of_its_own() -> None:
    """The indexer makes room then."""
    assert isinstance(index_error(RedisRefusal("OOM no")), IndexFullError)


def test_lost_connection_names_its_cause() -> None:
    """Refused, reset or no such host; a deadline is told apart."""
    refused = ConnectionRefusedError(111, SECRET)

    assert "ConnectionRefusedError" in str(index_error(refused))
    assert SECRET not in str(index_error(refused))
    assert "in time" in str(index_error(TimeoutError()))
