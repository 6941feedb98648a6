"""P2pNcclConnector (0.9.2 to 0.23): prefill leg first; the request id carries both addresses.

No field of the body is used: each engine reads the other's address out of the id, and finds the
blocks by it. The id is made for the attempt. From 0.14 to 0.23 engines append random digits to ids
and then wait for blocks under another name for ever, unless
`VLLM_DISABLE_REQUEST_ID_RANDOMIZATION=1` is set (0.17 and later).

A decode engine waits for blocks of *every* request, so none may come without a prefill leg. The
answer's `id` holds what the engine was sent, so a client sees both addresses.
"""

from collections.abc import Mapping
from typing import Any

from balancer.connectors.contract import (
    REQUEST_ID,
    Connector,
    LegContext,
    LegRequest,
    NoTransferError,
    settings_of,
)
from balancer.core.fleet.snapshot import Instance
from balancer.core.http.prefill_rewrite import prefill_body
from balancer.core.settings.transfer import P2pNcclSettings


class P2pNcclConnector(Connector):
    """Serial: the prefill engine has sent, or offers, everything when it answers."""

    name = "p2p_nccl"
    has_one_address = True

    def mismatch(self, source: Instance, target: Instance) -> str | None:
        """An id has no place for a rank: blocks of any but the first would be waited for in vain."""
        several = [each for each in (source, target) if len(each.ranks) > 1]
        if not several:
            return None
        return f"{several[0].alias} has {len(several[0].ranks)} ranks, and an id names one address"

    def prefill_leg(self, context: LegContext) -> LegRequest:
        """One token, under the id that names both."""
        return LegRequest(body=prefill_body(context.body), request_id=_pair_id(context))

    def decode_leg(
        self, context: LegContext, prefill_answer: Mapping[str, Any] | None
    ) -> LegRequest:
        """The client's body under the same id."""
        if prefill_answer is None:
            raise NoTransferError("without a prefill answer nothing has been sent")
        return LegRequest(body=context.body, request_id=_pair_id(context))

    def needs_prefill(self, instance: Instance) -> bool:  # noqa: ARG002 - the contract's signature
        """It waits for blocks of every request whose prompt it doesn't hold."""
        return True

    def params(self) -> frozenset[str]:
        """The id alone."""
        return frozenset({REQUEST_ID})


def _pair_id(context: LegContext) -> str:
    source, target = _address(context.prefill), _address(context.decode)
    return addressed_id(source, target, context.attempt_id)


def addressed_id(source: str, target: str, attempt_id: str) -> str:
    """The form that P2P-NCCL and MoRI-IO take apart again."""
    return f"___prefill_addr_{source}___decode_addr_{target}_{attempt_id}"


def _address(instance: Instance) -> str:
    configured = settings_of(instance, P2pNcclSettings).zmq_address
    registered = instance.facts.registration
    address = configured or (registered.zmq_address if registered is not None else None)
    if address is None:
        raise NoTransferError(
            f"the ZMQ address of {instance.alias} is unknown: it hasn't registered, and "
            "`transfer.zmq_address` isn't set"
        )
    return address
