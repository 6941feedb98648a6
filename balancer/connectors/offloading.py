"""OffloadingConnector: caches behind the GPU's; legs meet in a shared storage, or peer to peer.

With a storage that both engines use nothing travels in the bodies. With the P2P tier
(`transfer.p2p_host`, 0.33's experimental `kv_transfer_params`) the legs of a pair name the same
request to each other, and a request that one instance serves whole can fetch its prefix from the
peer that the index names (`remote_kv_source`). What isn't there in time is computed.
"""

from collections.abc import Mapping
from typing import Any

from balancer.connectors.contract import (
    Connector,
    LegContext,
    LegRequest,
    NoTransferError,
    PullContext,
    Style,
    settings_of,
    with_params,
)
from balancer.core.fleet.snapshot import Instance
from balancer.core.http.prefill_rewrite import prefill_body
from balancer.core.settings.transfer import OffloadingSettings


class OffloadingConnector(Connector):
    """Serial: what the prefill engine stores has to be there before it is looked for.

    But for a decode engine with `decoder_first`: of a peer that was named to it, it asks for the
    whole prompt and waits, and the peer hands over what it stores for whom has asked.
    """

    name = "offloading"
    pulls = True

    def style(self, context: LegContext) -> Style:
        """As the decode instance is set, if both have the tier."""
        is_peer = settings_of(context.prefill, OffloadingSettings).p2p_host is not None
        is_first = settings_of(context.decode, OffloadingSettings).decoder_first
        return "concurrent" if is_peer and is_first else "serial"

    def prefill_leg(self, context: LegContext) -> LegRequest:
        """One token; with the P2P tier, kept for the request of this name."""
        body = prefill_body(context.body)
        if settings_of(context.prefill, OffloadingSettings).p2p_host is None:
            return LegRequest(body=body)
        params = {"remote_decoder": {"kv_request_id": context.attempt_id}}
        return LegRequest(body=with_params(body, params))

    def decode_leg(
        self, context: LegContext, prefill_answer: Mapping[str, Any] | None
    ) -> LegRequest:
        """The client's body; with the P2P tier, where the blocks are."""
        if prefill_answer is None and self.style(context) == "serial":
            raise NoTransferError("without a prefill answer nothing has been stored")
        address = _peer(context.prefill, context.prefill_rank, context.attempt_id)
        if address is None:
            return LegRequest(body=context.body)
        return LegRequest(body=with_params(context.body, {"remote_prefiller": address}))

    def mismatch(self, source: Instance, target: Instance) -> str | None:
        """Peers both have the tier, or neither."""
        both = [settings_of(each, OffloadingSettings).p2p_host is None for each in (source, target)]
        return None if both[0] == both[1] else "`transfer.p2p_host` is set on one side only"

    def params(self) -> frozenset[str]:
        """The fields of all three uses."""
        return frozenset({"remote_decoder", "remote_prefiller", "remote_kv_source"})

    def pull(self, context: PullContext) -> Mapping[str, Any] | None:
        """Ask for the peer's blocks where both have the tier and enough is to be gained."""
        settings = settings_of(context.target, OffloadingSettings)
        least = settings.pull_min_tokens
        if settings.p2p_host is None or not least or context.more_tokens < least:
            return None
        address = _peer(context.source, context.source_rank, context.attempt_id)
        if address is None:
            return None
        return with_params(context.body, {"remote_kv_source": address})


def _peer(instance: Instance, rank: int, attempt_id: str) -> dict[str, Any] | None:
    settings = settings_of(instance, OffloadingSettings)
    if settings.p2p_host is None:
        return None
    return {
        "kv_request_id": attempt_id,
        "remote_host": settings.p2p_host,
        "remote_port": settings.p2p_port + rank,
    }
