"""The port to tracing: where a request's steps begin and end. `NoTracing` is used unless it is on.

Rules:

1. Off, it costs a look at `is_on`; `traceparent` and `tracestate` of the client pass to both legs as
   they are, like any other header.
2. On, each leg is a span of its own, and its engine is told that span as parent.
3. A span never holds prompts, keys or addresses.
"""

# ruff: noqa: ARG002 - who traces nothing needs nothing

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from balancer.core.http.headers import Headers
from balancer.core.record import LegRecord, RequestRecord

Fact = str | bool | int | float


class Step(Protocol):
    """A span that is under way."""

    def note(self, name: str, value: Fact) -> None:
        """Add a fact to it."""
        ...


class Tracing(Protocol):
    """What the data plane tells. Steps nest by the context of the task they run in."""

    is_on: bool
    """False: nothing comes of what is told, so it needn't be."""

    def request(self, record: RequestRecord, headers: Headers) -> AbstractContextManager[Step]:
        """One client request, under the client's own span if `headers` name one."""
        ...

    def step(self, name: str) -> AbstractContextManager[Step]:
        """A part of the request that has a duration: `match`, `plan`."""
        ...

    def leg(self, leg: LegRecord) -> AbstractContextManager[Step]:
        """One attempt at one leg; its record is read when the block ends."""
        ...

    def pass_on(self, headers: Headers) -> Headers:
        """Headers for an engine: with the span that runs as its parent."""
        ...


class _NoStep:
    def note(self, name: str, value: Fact) -> None:
        """Nobody is listening."""


class NoTracing:
    """Traces nothing."""

    is_on = False

    def __init__(self) -> None:
        self._nothing: AbstractContextManager[Step] = nullcontext(_NoStep())

    def request(self, record: RequestRecord, headers: Headers) -> AbstractContextManager[Step]:
        return self._nothing

    def step(self, name: str) -> AbstractContextManager[Step]:
        return self._nothing

    def leg(self, leg: LegRecord) -> AbstractContextManager[Step]:
        return self._nothing

    def pass_on(self, headers: Headers) -> Headers:
        return headers
