"""LMCacheConnectorV1 and LMCacheMPConnector: prefill leg first, then the decode engine looks it up.

Three ways of the same connector. A cache that both engines use (V1 with a remote or disk tier, or
MP's central server): nothing travels in the bodies. V1 with a receiver on the decode engine
(`transfer.receiver_host` there): the prefill engine is told where to send to, in `disagg_spec`.

What the decode engine doesn't find it computes itself; a lost hand-over costs time, not the answer.
"""

from collections.abc import Mapping
from typing import Any

from balancer.connectors.contract import (
    Connector,
    LegContext,
    LegRequest,
    Notice,
    NoTransferError,
    settings_of,
    with_params,
)
from balancer.core.http.prefill_rewrite import prefill_body
from balancer.core.settings.transfer import LmcacheSettings


class LmcacheConnector(Connector):
    """Serial: the cache has to be filled before it is looked at."""

    name = "lmcache"

    def prefill_leg(self, context: LegContext) -> LegRequest:
        """One token; with the decode engine's receiver if it has one."""
        body = prefill_body(context.body)
        receiver = settings_of(context.decode, LmcacheSettings)
        if receiver.receiver_host is None:
            return LegRequest(body=body)
        spec = {
            "req_id": context.attempt_id,
            "receiver_host": receiver.receiver_host,
            "receiver_init_port": list(receiver.receiver_init_ports),
            "receiver_alloc_port": list(receiver.receiver_alloc_ports),
        }
        return LegRequest(body=with_params(body, {"disagg_spec": spec}))

    def decode_leg(
        self, context: LegContext, prefill_answer: Mapping[str, Any] | None
    ) -> LegRequest:
        """The client's body as it is."""
        if prefill_answer is None:
            raise NoTransferError("without a prefill answer the cache holds nothing to look for")
        return LegRequest(body=context.body)

    def notice(self, context: LegContext) -> Notice | None:
        """Each tensor-parallel rank says that it has sent its blocks to the receiver."""
        ranks = len(settings_of(context.decode, LmcacheSettings).receiver_init_ports)
        return Notice(name=context.attempt_id, times=ranks) if ranks else None

    def params(self) -> frozenset[str]:
        """The one of a receiver."""
        return frozenset({"disagg_spec"})
