"""NixlConnector, pull: prefill leg first, then the decode engine reads its blocks.

The prefill engine keeps the prompt's blocks only if asked (`do_remote_decode`), and answers where
they lie. That answer goes to the decode engine unread: its fields grow with every release.
The decode leg must be on its way within the engine's lease (30 s from the end of the prefill leg,
`transfer.lease_s` below it): nothing checks a later read, its text is wrong.

Bidirectional (0.21 and later, `transfer.bidirectional` on both sides): a decode engine's last
answer of a turn carries `do_remote_decode` and where *its* blocks lie. In the next turn of the
conversation they go to the prefill engine, which reads them instead of computing them again. What
is known of a conversation, and that it is the beginning of this prompt, is the caller's business
(`core.routing.conversations`).
"""

from collections.abc import Mapping
from typing import Any

from balancer.connectors.contract import (
    Connector,
    LegContext,
    LegRequest,
    NoTransferError,
    settings_of,
    with_params,
)
from balancer.core.fleet.snapshot import Instance
from balancer.core.http.prefill_rewrite import prefill_body
from balancer.core.settings.transfer import NixlSettings

PREFILL_PARAMS: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""Exactly the fields that vLLM's own proxies send."""
KEYS = frozenset({*PREFILL_PARAMS, "remote_request_id", "tp_size"})
"""Those, and what every answer has had since 0.13."""


class NixlConnector(Connector):
    """Serial: the decode leg is written from the prefill leg's answer."""

    name = "nixl"

    def prefill_leg(self, context: LegContext) -> LegRequest:
        """One token, and keep the blocks for whoever comes to read them."""
        params = PREFILL_PARAMS
        if context.earlier is not None:
            params = {**context.earlier, "do_remote_decode": True, "do_remote_prefill": False}
        return LegRequest(body=with_params(prefill_body(context.body), params))

    def decode_leg(
        self, context: LegContext, prefill_answer: Mapping[str, Any] | None
    ) -> LegRequest:
        """The client's body, with the address of the blocks."""
        params = prefill_answer.get("kv_transfer_params") if prefill_answer is not None else None
        if not isinstance(params, Mapping) or params.get("do_remote_prefill") is not True:
            raise NoTransferError("the prefill answer names no blocks to read")
        return LegRequest(body=with_params(context.body, params))

    def lease_s(self, context: LegContext) -> float | None:
        """As long as the prefill engine is told to have."""
        return settings_of(context.prefill, NixlSettings).lease_s

    def mismatch(self, source: Instance, target: Instance) -> str | None:
        """Both sides keep blocks for each other, or neither."""
        both = [settings_of(each, NixlSettings).bidirectional for each in (source, target)]
        if both[0] == both[1]:
            return None
        return "`transfer.bidirectional` is set on one side only"

    def params(self) -> frozenset[str]:
        """The fields of both legs and of the answer."""
        return KEYS
