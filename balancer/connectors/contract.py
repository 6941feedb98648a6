"""The connector contract: what a KV connector needs on the two legs of a PD request.

Rules:

1. A connector is pure: it rewrites JSON bodies and headers, it performs nothing and remembers
   nothing.
2. `serial`: the prefill answer is complete before the decode leg is written from it.
   `concurrent`: both legs are written at once and `prefill_answer` is None.
3. Both legs keep the client's path and carry one request id: the client's, or one made for this
   attempt where engines find each other by it. A second attempt is another one, so that it can't
   be taken for the first.
4. If one leg dies the other is cancelled; the caller sees to it, for every connector.
5. What a leg can't be written without (`core.fleet.transfer_facts`, `core.settings.transfer`) and isn't
   there fails the prefill leg with a NoTransferError that names the instance and the setting.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import msgspec

from balancer.core.errors import EngineError
from balancer.core.fleet.snapshot import Instance
from balancer.core.fleet.transfer_facts import Inquiry

Style = Literal["serial", "concurrent"]

S = TypeVar("S", bound=msgspec.Struct)

REQUEST_ID = "x-request-id"
"""Stands in `params` for a request id that the connector makes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LegContext:
    """Who takes part in a PD request."""

    request_id: str
    attempt_id: str = ""
    """32 hexadecimal digits that no other attempt has, not even one of the same request."""
    path: str
    body: Mapping[str, Any]
    """The client's body, forbidden fields removed. Not to be mutated."""
    prefill: Instance
    prefill_rank: int
    decode: Instance
    decode_rank: int
    earlier: Mapping[str, Any] | None = None
    """Blocks of the conversation's last turn that a decode engine still holds, as it told; they
    have been checked to be the beginning of this prompt."""


class LegRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What to send on one leg. A struct, as what is made once per request."""

    body: Mapping[str, Any]
    headers: tuple[tuple[bytes, bytes], ...] = ()
    """Added to the leg's headers."""
    request_id: str | None = None
    """To be sent as `x-request-id` in place of the client's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOver:
    """What of a request decides if its KV cache can be handed over at all."""

    prompt_tokens: int | None
    """None: unknown."""
    block_sizes: frozenset[int]
    """Of all who would hand over or receive."""
    has_adapter: bool = False
    has_salt: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PullContext:
    """A request that one instance serves whole, and the peer that holds more of its prompt."""

    attempt_id: str
    body: Mapping[str, Any]
    target: Instance
    source: Instance
    source_rank: int
    more_tokens: int
    """Leading prompt tokens that the source holds beyond the target's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """What the prefill side says over another channel before the decode leg has something to find."""

    name: str
    times: int
    """How often it is said."""


class NoTransferError(EngineError):
    """A prefill answer that doesn't let the decode leg start: a failed prefill leg."""

    code = "no_transfer"


class Connector(Protocol):
    """Every connector inherits from it and passes tests/conformance/connectors/."""

    name: str
    pairs_ranks: bool = False
    """Both legs should run on ranks of the same number where both have it."""
    has_one_address: bool = False
    """A leg names an instance by one address, which is that of its only rank."""
    pulls: bool = False
    """`pull` may find something to do."""

    def style(self, context: LegContext) -> Style:  # noqa: ARG002 - for those that differ
        """Whether the decode leg waits for the prefill leg's answer."""
        return "serial"

    def prefill_leg(self, context: LegContext) -> LegRequest:
        """Write the prefill leg. Raises NoTransferError if something is unknown that it needs."""
        ...

    def decode_leg(
        self, context: LegContext, prefill_answer: Mapping[str, Any] | None
    ) -> LegRequest:
        """Write the decode leg. Raises NoTransferError if the answer carries nothing to pull.

        `prefill_answer` is the JSON body of a serial prefill leg's 200; one that tells of an error
        (`core.usage.prefill_fault`) never gets here.
        """
        ...

    def carries(self, request: HandOver, instance: Instance) -> bool:  # noqa: ARG002
        """Whether the decode engine `instance` can use what another computed of it at all."""
        return True

    def needs_prefill(self, instance: Instance) -> bool:  # noqa: ARG002
        """Whether the decode engine `instance` takes no request without a prefill leg at all."""
        return False

    def notice(self, context: LegContext) -> Notice | None:  # noqa: ARG002
        """What a serial decode leg should wait for beside the prefill answer; None: nothing."""
        return None

    def lease_s(self, context: LegContext) -> float | None:  # noqa: ARG002
        """How long after its answer the prefill engine's blocks may be counted on; None: no limit."""
        return None

    def inquiry(self, instance: Instance) -> Inquiry | None:  # noqa: ARG002
        """What has to be asked before `instance` can take part; None: nothing."""
        return None

    def mismatch(self, source: Instance, target: Instance) -> str | None:  # noqa: ARG002
        """Say why these two can't hand over although both have this connector; None: they can."""
        return None

    def params(self) -> frozenset[str]:
        """What is used of a leg by one connector only: keys of `kv_transfer_params`, the id."""
        return frozenset()

    def pull(self, context: PullContext) -> Mapping[str, Any] | None:  # noqa: ARG002
        """The body with which `target` fetches blocks from `source`; None: it can't."""
        return None


def settings_of(instance: Instance, type_: type[S]) -> S:
    """The instance's `transfer:` settings, or the defaults of a connector without any."""
    return instance.transfer if isinstance(instance.transfer, type_) else type_()


def host_of(instance: Instance) -> str:
    """Host of its address, an IPv6 one without brackets."""
    return instance.id.partition("://")[2].rpartition(":")[0].strip("[]")


def bracketed(host: str) -> str:
    """`host` as it can stand in front of a port."""
    return f"[{host}]" if ":" in host else host


def with_params(body: Mapping[str, Any], params: Mapping[str, Any]) -> Mapping[str, Any]:
    """A copy of `body` that carries `kv_transfer_params`."""
    return {**body, "kv_transfer_params": dict(params)}
