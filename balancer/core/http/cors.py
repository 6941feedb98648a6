"""What browsers are told of who may call (CORS), where the operator has named origins.

Rules:

1. Off without origins: an engine's own `Access-Control-*` headers pass, preflights are refused like
   any method that a path doesn't take.
2. On, ours take the place of the engine's, so none is ever doubled; errors carry them, too, or a
   browser couldn't read them.
3. An origin that isn't named gets no headers, which is how a browser is refused. The request itself
   is answered as ever: CORS guards browsers' users, not us.
4. Credentials are never allowed: keys travel in `Authorization`, which scripts set themselves.
"""

from collections.abc import Iterable
from typing import Final

from balancer.core.http.headers import Headers, find_header

ANY_ORIGIN: Final = "*"
_MAX_AGE_S: Final = 600
_PREFIX: Final = b"access-control-"
_EXPOSED: Final = (
    "x-request-id, x-kvlb-instance, x-kvlb-prefill, x-kvlb-reason, x-kvlb-trust, "
    "x-kvlb-trust-reason, x-kvlb-overlap-tokens, x-kvlb-why, x-kvlb-candidates, "
    "x-kvlb-retries, retry-after"
)


class Cors:
    """The operator's origins."""

    def __init__(self, origins: Iterable[str]) -> None:
        self._origins = frozenset(origin.rstrip("/").encode("latin-1") for origin in origins)
        self._takes_any = ANY_ORIGIN.encode() in self._origins

    @property
    def is_on(self) -> bool:
        return bool(self._origins)

    def is_preflight(self, method: str, headers: Headers) -> bool:
        """Tell a browser's question from an OPTIONS request of another kind."""
        return method == "OPTIONS" and (
            find_header(headers, b"origin") is not None
            and find_header(headers, b"access-control-request-method") is not None
        )

    def preflight(self, headers: Headers, methods: Iterable[str]) -> Headers:
        """Headers of the answer to a preflight for a path that takes `methods`."""
        allowed = self._allowed(headers)
        if not allowed:
            return self._varies()
        asked = find_header(headers, b"access-control-request-headers")
        return (
            *allowed,
            (b"access-control-allow-methods", ", ".join(methods).encode()),
            *(((b"access-control-allow-headers", asked),) if asked else ()),
            (b"access-control-max-age", str(_MAX_AGE_S).encode()),
        )

    def answer(self, asked: Headers, answered: Iterable[tuple[bytes, bytes]]) -> Headers:
        """The headers of an answer, ours in the place of the engine's."""
        kept = tuple(pair for pair in answered if not pair[0].startswith(_PREFIX))
        allowed = self._allowed(asked)
        if not allowed:
            return (*kept, *self._varies())
        return (*kept, *allowed, (b"access-control-expose-headers", _EXPOSED.encode()))

    def _allowed(self, headers: Headers) -> Headers:
        origin = find_header(headers, b"origin")
        if origin is None:
            return ()
        if self._takes_any:
            return ((b"access-control-allow-origin", b"*"),)
        if origin not in self._origins:
            return ()
        return ((b"access-control-allow-origin", origin), *self._varies())

    def _varies(self) -> Headers:
        """A cache must not give one origin's answer to another."""
        return () if self._takes_any else ((b"vary", b"origin"),)
