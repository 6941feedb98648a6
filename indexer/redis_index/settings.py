"""Where Redis is, and how long to wait for it. Part of both commands' configuration."""

import os
import re
from typing import Annotated
from urllib.parse import SplitResult

import msgspec

from indexer.core.addresses import split_address

PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]
PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
KeyPrefix = Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9_.-]{1,32}$")]

_FORMS = "write `redis://host:6379/0`, `rediss://host:6379/0` or `unix:///path?db=0`"
_DATABASE = re.compile(r"[0-9]{1,9}")
_TLS_OPTION = re.compile(r"ssl_(ca_certs|certfile|keyfile)=[^&=]+|ssl_cert_reqs=(none|required)")


class RedisSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The index that processes share.

    One Redis or Valkey server, 7.0 or newer, with `maxmemory-policy noeviction`, or a Redis Cluster. `kvlb indexer` writes
    it, `kvlb balancer` reads it. Without this section `kvlb up` keeps the index in its own memory, and
    the other two say that they need one. docs/operations.md says how large it has to be,
    docs/redis-schema.md what is in it.
    """

    url: str = "redis://127.0.0.1:6379/0"
    """`redis://host:port/database`; `rediss://` for TLS, with `?ssl_ca_certs=/path` where needed;
    `unix:///path?db=0`. Any node of a cluster. No password in it."""
    username: str | None = None
    """ACL user."""
    password_env: str | None = None
    """Environment variable that holds the password. Default: `KVLB_REDIS_PASSWORD`, if that is
    set."""
    prefix: KeyPrefix = "kvlb"
    """Of every key; fleets that share a server need different ones."""
    lease_s: PositiveFloat = 120.0
    """What an indexer wrote leaves after it has been gone for this long; restarts must be
    quicker."""
    heartbeat_s: PositiveFloat = 1.0
    """How often the indexer renews leases and looks whether Redis still has what it wrote. Three missed,
    at least 3 s, and balancers take the indexer for gone: both need the same figure."""
    connect_timeout_s: PositiveFloat = 1.0
    """For a connection."""
    read_timeout_s: PositiveFloat = 1.0
    """For a lookup; `routing.lookup_timeout_s` is shorter."""
    write_timeout_s: PositiveFloat = 2.0
    """For a write."""
    max_lookup_blocks: PositiveInt = 65_536
    """Blocks of a prompt that are asked for: a million tokens in blocks of 16."""

    def __post_init__(self) -> None:
        """Raise ValueError for an address that can't be used, or that holds a secret."""
        _check_url(self.url)
        if self.lease_s < 3 * self.heartbeat_s:
            raise ValueError("lease_s: must be at least three times `heartbeat_s`")

    def password(self) -> str | None:
        """The secret itself. Raises ValueError if its variable isn't set."""
        if self.password_env is None:
            return None
        secret = os.environ.get(self.password_env)
        if not secret:
            raise ValueError(f"password_env: the environment has no {self.password_env}")
        return secret


def _check_url(url: str) -> None:
    """Refuse what the client would read as something else: a database `abc` as 0, `1/2` as 12."""
    if "@" in url:
        raise ValueError("url: name the user in `username`, the password in `password_env`")
    try:
        parts = split_address(url)
    except ValueError as error:
        raise ValueError(f"url: {error}; {_FORMS}") from error
    checks = {"redis": _fault_of_host, "rediss": _fault_of_host, "unix": _fault_of_socket}
    check = checks.get(parts.scheme)
    fault = check(parts) if check else "its scheme isn't one of redis, rediss, unix"
    if fault is not None:
        raise ValueError(f"url: {fault}; {_FORMS}")


def _fault_of_host(parts: SplitResult) -> str | None:
    database = parts.path.removeprefix("/")
    options = [each for each in parts.query.split("&") if each]
    if not parts.hostname:
        return "it names no host"
    if database and not _DATABASE.fullmatch(database):
        return f"the database {database!r} is not a number"
    if parts.fragment or (options and parts.scheme != "rediss"):
        return "nothing follows the database"
    if not all(_TLS_OPTION.fullmatch(each) for each in options):
        return (
            "only ssl_ca_certs, ssl_certfile, ssl_keyfile and ssl_cert_reqs can follow the database"
        )
    return None


def _fault_of_socket(parts: SplitResult) -> str | None:
    if parts.netloc or len(parts.path) < len("/x"):
        return "it names no absolute path"
    name, _, database = parts.query.partition("=")
    if parts.fragment or (parts.query and (name != "db" or not _DATABASE.fullmatch(database))):
        return "only the number of a database can follow the path"
    return None
