"""Where Redis is, and how long to wait for it. Part of both commands' configuration."""

import os
from typing import Annotated
from urllib.parse import urlsplit

import msgspec

PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]
PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
KeyPrefix = Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9_.-]{1,32}$")]

_SCHEMES = ("redis", "rediss", "unix")


class RedisSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One Redis or Valkey server, 7.0 or newer, with `maxmemory-policy noeviction`."""

    url: str = "redis://127.0.0.1:6379/0"
    """`redis://host:port/db`, `rediss://` for TLS, `unix:///path`. Without a password."""
    username: str | None = None
    password_env: str | None = None
    """Environment variable that holds the password."""
    prefix: KeyPrefix = "kvlb"
    """Of every key. Fleets that share a server need different ones."""
    lease_s: PositiveFloat = 120.0
    """Entries whose indexer is gone leave after this long. A restart must be quicker."""
    heartbeat_s: PositiveFloat = 1.0
    """How often the indexer renews leases and looks if Redis still has what was written."""
    connect_timeout_s: PositiveFloat = 1.0
    read_timeout_s: PositiveFloat = 1.0
    """For a lookup. The router's own deadline is shorter."""
    write_timeout_s: PositiveFloat = 2.0
    max_connections: PositiveInt = 16
    """Per process. Lookups beyond it wait for their turn."""
    max_lookup_blocks: PositiveInt = 65_536
    """Blocks of a prompt that are asked for: a million tokens in blocks of 16."""

    def __post_init__(self) -> None:
        """Raise ValueError for an address that can't be used, or that holds a secret."""
        parts = urlsplit(self.url)
        if parts.scheme not in _SCHEMES:
            raise ValueError(f"url: a Redis address begins with one of {', '.join(_SCHEMES)}")
        if parts.username or parts.password:
            raise ValueError("url: name the user in `username`, the password in `password_env`")
        if self.lease_s < 3 * self.heartbeat_s:
            raise ValueError("lease_s must be at least three times heartbeat_s")

    def password(self) -> str | None:
        """The secret itself. Raises ValueError if its variable isn't set."""
        if self.password_env is None:
            return None
        secret = os.environ.get(self.password_env)
        if not secret:
            raise ValueError(f"password_env: the environment has no {self.password_env}")
        return secret
