"""Says in our own words what Redis refused, and what an operator has to change.

Redis's words can quote a command, a key or a user, so none of them is passed on: only which kind
of refusal it was.
"""

from collections.abc import Iterator, Sequence

from redis.exceptions import RedisError

from indexer.core.index import IndexFullError, IndexUnavailableError

_REFUSALS: Sequence[tuple[Sequence[str], str]] = (
    (("READONLY", "ReadOnlyError"), "it is a replica: `redis.url` has to name the primary"),
    (
        ("WRONGPASS", "NOAUTH", "AuthenticationError"),
        "it wants another password: look at the variable named by `redis.password_env`, and the user",
    ),
    (("NOPERM", "NoPermissionError"), "its ACL doesn't let this user run scripts on our keys"),
    (("LOADING", "BusyLoadingError"), "it is still loading its data"),
    (("MISCONF",), "it can't save to disk and takes no writes until it can: see its log"),
    (("NOREPLICAS",), "it takes no writes while its replicas are away (min-replicas-to-write)"),
    (("MASTERDOWN", "MasterDownError"), "it is a replica that has lost its primary"),
    (("CLUSTERDOWN", "ClusterDownError"), "its cluster is down: some slots have no node"),
    (("MOVED", "MovedError", "ASK", "AskError"), "it is one node of a cluster"),
    (("BUSY",), "somebody's script keeps it busy"),
    (("max number of clients",), "it has no connection left: raise `maxclients`"),
)


def index_error(error: Exception) -> IndexUnavailableError:
    """What to raise for a failure of the client or of the server."""
    # The client strips the code off some answers, and has a class instead; what the server said
    # when a connection was opened is the cause of a `ConnectionError`.
    chain = list(_chain(error))
    told = " ".join(f"{type(each).__name__} {each}" for each in chain)
    if "OutOfMemoryError" in told or "OOM " in told:
        return IndexFullError("Redis is full (OOM): raise its `maxmemory`, or use a bigger one")
    for signs, advice in _REFUSALS:
        if any(sign in told for sign in signs):
            return IndexUnavailableError(f"Redis refuses ({signs[0]}): {advice}")
    if isinstance(error, TimeoutError):
        return IndexUnavailableError("Redis didn't answer in time")
    if isinstance(error, OSError) or type(error).__name__ in {"ConnectionError", "TimeoutError"}:
        return IndexUnavailableError(
            f"no connection to Redis ({type(chain[-1]).__name__}): is it running, is `redis.url` right?"
        )
    kind = type(error).__name__ if isinstance(error, RedisError) else "unknown"
    return IndexUnavailableError(f"Redis failed: {kind}")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
