"""How a balancer is known: to other balancers, and to itself where it was named as an engine.

A balancer's `/v1/models` looks like an engine's. One that took itself for an engine, or two that took
each other, would send a request round and round until connections run out.

Rules:

1. What a balancer tells of itself (`/health`, `/ready`, `/v1/models`) carries its id in
   `x-kvlb-balancer`. Who answers a probe with that header is no engine, whatever else it says.
2. Every leg carries the sender's id in the same header. A request that has one has been through a
   balancer, and is refused: what probes didn't see, a proxy in between that drops headers for one,
   costs one leg.
3. All processes on one port have one id. It is random, and lasts as long as they do.

Cost: one look through a request's headers.
"""

from collections.abc import Iterable, Mapping

from balancer.core.errors import LoopError
from balancer.core.http.headers import find_header

BALANCER = "x-kvlb-balancer"

OWN_ADDRESS, ANOTHER_BALANCER = "own_address", "another_balancer"
"""Why an instance is none."""

_IN_BYTES = BALANCER.encode()


def balancer_reason(answer_headers: Mapping[str, str], me: str) -> str | None:
    """Tell from an answer's headers which balancer it is of; None: of none."""
    named = answer_headers.get(BALANCER)
    if named is None:
        return None
    return OWN_ADDRESS if named == me else ANOTHER_BALANCER


def refuse_balancers(headers: Iterable[tuple[bytes, bytes]], me: str) -> None:
    """Raise LoopError for a request that another balancer, or this one, has sent as a leg."""
    named = find_header(headers, _IN_BYTES)
    if named is None:
        return
    if named.decode("latin-1") == me:
        raise LoopError(
            "this request has been through this balancer already: one of its instances leads back to it"
        )
    raise LoopError(
        "this request comes from another kvlb balancer: give that one the engines themselves"
    )
