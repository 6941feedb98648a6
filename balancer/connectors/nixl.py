"""NixlConnector, pull: prefill leg first, then the decode engine reads its blocks.

The prefill engine keeps the prompt's blocks only if asked (`do_remote_decode`), and answers where
they lie. That answer goes to the decode engine unread: its fields grow with every release.
The decode leg must start within the engine's lease (30 s from the end of the prefill leg).
"""

from collections.abc import Mapping
from typing import Any, Literal

from balancer.connectors.contract import LegContext, LegRequest, NoTransferError
from balancer.core.prefill_rewrite import prefill_body

PREFILL_PARAMS: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class NixlConnector:
    """Serial: the decode leg is written from the prefill leg's answer."""

    name = "nixl"
    style: Literal["serial", "concurrent"] = "serial"

    def prefill_leg(self, context: LegContext) -> LegRequest:
        """One token, and keep the blocks for whoever comes to read them."""
        body = prefill_body(context.body)
        return LegRequest(body={**body, "kv_transfer_params": dict(PREFILL_PARAMS)})

    def decode_leg(
        self, context: LegContext, prefill_answer: Mapping[str, Any] | None
    ) -> LegRequest:
        """The client's body, with the address of the blocks."""
        params = _transfer_params(prefill_answer)
        return LegRequest(body={**context.body, "kv_transfer_params": params})


def _transfer_params(answer: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """What the prefill engine handed over. Raises NoTransferError if that is nothing."""
    params = answer.get("kv_transfer_params") if answer is not None else None
    if not isinstance(params, Mapping) or params.get("do_remote_prefill") is not True:
        raise NoTransferError("the prefill answer names no blocks to read")
    return params
