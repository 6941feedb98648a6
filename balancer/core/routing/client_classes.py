"""Who a client is in the line for room: the class of its key, and what that is worth. Pure.

Rules:

1. A client is whoever sends the same key; without one all are one.
2. A key is kept nowhere: lines and classes name it by its SHA-256.
3. Who is in no class has priority 0 and weight 1.

Cost: one digest per request that waits, two where classes are configured.
"""

from collections.abc import Iterable
from hashlib import sha256

import msgspec

from balancer.core.settings.admission import ClientClass

_NO_CLASS = ClientClass()


class Client(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Whose request it is."""

    key: str = ""
    """Of what it sends the SHA-256; empty: nobody in particular."""
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
        if not key:
            return Client()
        name = _digest(key)
        if not self._by_digest:
            return Client(key=name)
        scheme, _, token = key.partition(" ")
        bare = token.strip() if scheme.lower() == "bearer" else key
        found = self._by_digest.get(_digest(bare), _NO_CLASS)
        return Client(key=name, priority=found.priority, weight=found.weight)


def _digest(key: str) -> str:
    return sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
