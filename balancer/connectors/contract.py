"""The connector contract: what a KV connector needs on the two legs of a PD request.

Rules:

1. A connector is pure: it rewrites JSON bodies and headers, it performs nothing.
2. `serial`: the prefill answer is complete before the decode leg is written from it.
   `concurrent`: both legs are written at once and `prefill_answer` is None.
3. Both legs keep the client's path and carry one request id.
4. If one leg dies the other is cancelled; the caller sees to it, for every connector.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from balancer.core.errors import EngineError
from balancer.core.fleet import Instance


@dataclass(frozen=True, slots=True, kw_only=True)
class LegContext:
    """Who takes part in a PD request."""

    request_id: str
    path: str
    body: Mapping[str, Any]
    """The client's body, forbidden fields removed. Not to be mutated."""
    prefill: Instance
    prefill_rank: int
    decode: Instance
    decode_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LegRequest:
    """What to send on one leg."""

    body: Mapping[str, Any]
    headers: tuple[tuple[bytes, bytes], ...] = field(default=())
    """Added to the leg's headers."""


class NoTransferError(EngineError):
    """A prefill answer that doesn't let the decode leg start: a failed prefill leg."""

    code = "no_transfer"


class Connector(Protocol):
    """Every connector passes tests/conformance/test_connectors.py."""

    name: str
    style: Literal["serial", "concurrent"]

    def prefill_leg(self, context: LegContext) -> LegRequest: ...

    def decode_leg(
        self, context: LegContext, prefill_answer: Mapping[str, Any] | None
    ) -> LegRequest:
        """Write the decode leg. Raises NoTransferError if the answer carries nothing to pull.

        `prefill_answer` is the JSON body of a serial prefill leg's 200; one that tells of an error
        (`core.usage.prefill_fault`) never gets here.
        """
        ...
