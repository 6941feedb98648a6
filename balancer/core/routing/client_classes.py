"""Who a client is in the line for room: the class of its key, and what that is worth. Pure.

Rules:

1. A client is whoever sends the same key; without one all are one.
2. A key is kept nowhere but in the line, while its request waits: classes name keys by their SHA-256.
3. Who is in no class has priority 0 and weight 1.

Cost: one digest per request that waits, none where no class is configured.
"""

from collections.abc import Iterable
from hashlib import sha256

import msgspec

from balancer.core.settings.admission import ClientClass

_NO_CLASS = ClientClass()


class Client(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Whose request it is."""

    key: str = ""
    priority: int = 0
    """Smaller goes first, before what the request itself asks for."""
    weight: float = 1.0
    """Its share beside others of its priority."""


class ClientClasses:
    """What the operator said of keys."""

    def __init__(self, classes: Iterable[ClientClass]) -> None:
        self._by_digest = {digest: each for each in classes for digest in each.keys_sha256}

    def client(self, key: str) -> Client:
        """Who sends this `Authorization` or `x-api-key`; empty: nobody in particular."""
        if not self._by_digest or not key:
            return Client(key=key)
        scheme, _, token = key.partition(" ")
        bare = token.strip() if scheme.lower() == "bearer" else key
        found = self._by_digest.get(sha256(bare.encode()).hexdigest(), _NO_CLASS)
        return Client(key=key, priority=found.priority, weight=found.weight)
