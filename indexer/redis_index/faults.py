"""Says in our own words what Redis refused, and what an operator has to change. Pure.

Redis's words can quote a command, a key or a user, so none of them is passed on: only which kind
of refusal it was.
"""

from collections.abc import Mapping

from indexer.core.index import IndexFullError, IndexSpoiltError, IndexUnavailableError

_ADVICE: Mapping[str, str] = {
    "READONLY": "it is a replica: `redis.url` has to name the primary",
    "WRONGPASS": "look at the password in the variable named by `redis.password_env`, and the user",
    "NOAUTH": "it wants a password: name its variable in `redis.password_env`",
    "AUTH": "it has no password, or no such user: look at `redis.password_env`, `redis.username`",
    "NOPERM": "its ACL doesn't let this user run scripts on our keys",
    "LOADING": "it is still loading its data",
    "MISCONF": "it can't save to disk and takes no writes until it can: see its log",
    "NOREPLICAS": "it takes no writes while its replicas are away (min-replicas-to-write)",
    "MASTERDOWN": "it is a replica that has lost its primary",
    "CLUSTERDOWN": "some slots of its cluster have no node",
    "MOVED": "the nodes of its cluster disagree on who has our keys",
    "TRYAGAIN": "our keys are on their way to another node of its cluster",
    "BUSY": "somebody's script keeps it busy",
    "DENIED": "it is in protected mode: it wants a password, or another `bind`",
    "max number of clients": "it has no connection left: raise its `maxclients`",
    "DB index": "it has no database of that number: look at the end of `redis.url`",
}


def index_error(error: Exception) -> IndexUnavailableError:
    """What to raise for a failure of the connection, or a refusal of the server."""
    if isinstance(error, TimeoutError):
        return IndexUnavailableError("Redis didn't answer in time")
    if isinstance(error, OSError):
        return IndexUnavailableError(
            f"no connection to Redis ({type(error).__name__}): is it running, is `redis.url` right?"
        )
    told = str(error)
    # A script's refusal may have other words before the one that counts.
    if "OOM " in told:
        return IndexFullError("Redis is full (OOM): raise its `maxmemory`, or use a bigger one")
    if "WRONGTYPE" in told:
        return IndexSpoiltError(
            "Redis refuses (WRONGTYPE): somebody else wrote one of our keys. It is removed, and what "
            "was there written anew; if it comes back, choose another `redis.prefix`"
        )
    for sign, advice in _ADVICE.items():
        if sign in told:
            return IndexUnavailableError(f"Redis refuses ({sign}): {advice}")
    code = told.partition(" ")[0]
    return IndexUnavailableError(f"Redis refuses ({code if code.isupper() else 'unknown'})")
