"""What an operator can set of admission: when requests wait in the balancer, and for how long."""

from typing import Annotated

import msgspec

from indexer.core.limits import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Share

Sha256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class ClientClass(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Clients that go before or after others where requests wait."""

    keys_sha256: tuple[Sha256, ...] = ()
    """Their keys, each as `printf %s KEY | sha256sum` writes it."""
    priority: int = 0
    """Smaller goes first, whatever `priority` its requests ask for among themselves."""
    weight: PositiveFloat = 1.0
    """Share of prompt tokens beside other clients of the same priority."""


class AdmissionSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Requests that no rank has room for wait in one line per model, and are decided when it has.

    What waits too long, or finds the line full, gets 503 with `Retry-After`. The same line holds what
    comes faster than `requests_per_s`. What makes a rank full counts once prefill rates are learned
    (docs/admission.md).
    """

    promise_s: NonNegativeFloat = 2.0
    """How long a prompt may wait before it is computed. A rank with so much prefill before a new one
    gets no more, and a line that stands is left after half of it. 0: engines queue without a bound."""
    prefill_share: Share = 0.65
    """Share of its time that a rank which decodes may spend on prompts, lately, if its answers show it:
    at two thirds they are three times as slow as on an idle engine. 1: any."""
    memory_share: Share = 0.9
    """Share of a rank's KV memory that prompts and answers in flight may fill, where its size is
    known. 1: any."""
    least_requests: PositiveInt = 8
    """A rank with fewer legs in flight has room, if its KV memory has: a few long prompts are no
    overload."""
    requests_per_s: NonNegativeFloat = 0.0
    """Most requests that each process lets in per second, over all models; the others wait in line.
    0: no limit."""
    max_waiting: NonNegativeInt = 1000
    """Requests that wait for one model. Beyond it the least urgent is refused. 0: none may wait."""
    max_wait_s: PositiveFloat = 30.0
    """Longest wait."""
    classes: dict[str, ClientClass] = {}
    """By name: clients that go first, or get more. Each class has `keys_sha256`, a list of its keys' digests as
    `printf %s KEY | sha256sum` writes them, `priority` (0; smaller goes first, before any `priority` of
    the request) and `weight` (1; its share of prompt tokens beside others)."""
    standing_s: PositiveFloat = 2.0
    """A line that hasn't been empty for so long stands: more comes than the fleet can serve, and
    waiting longer than half of `promise_s` would help nobody."""

    @property
    def standing_wait_s(self) -> float:
        """Longest wait in a line that stands."""
        return self.promise_s / 2 if self.promise_s else self.max_wait_s
