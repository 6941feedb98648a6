"""ExampleConnector, vLLM's shared storage: prefill leg first, then the decode engine finds the files.

Nothing is handed over in the bodies. The prefill engine writes the prompt's KV cache to a directory
both engines mount, in a folder named by the prompt's tokens; the decode engine computes the same
name. It looks only for the whole prompt, so a folder of an earlier turn is of no use to a later one.
A debugging connector: docs/connectors.md says what it can't do. What would load another request's
cache or end the engine is never split: see `carries`.
"""

from collections.abc import Mapping
from typing import Any

from balancer.connectors.contract import (
    Connector,
    HandOver,
    LegContext,
    LegRequest,
    NoTransferError,
)
from balancer.core.fleet.snapshot import Instance
from balancer.core.http.prefill_rewrite import prefill_body


class ExampleConnector(Connector):
    """Serial: the files have to be complete before the decode engine looks for them."""

    name = "example"

    def prefill_leg(self, context: LegContext) -> LegRequest:
        """One token; the engine writes the files unasked."""
        return LegRequest(body=prefill_body(context.body))

    def decode_leg(
        self, context: LegContext, prefill_answer: Mapping[str, Any] | None
    ) -> LegRequest:
        """The client's body as it is; that there is an answer is all it can tell."""
        if prefill_answer is None:
            raise NoTransferError("without a prefill answer there are no files to look for")
        return LegRequest(body=context.body)

    def carries(self, request: HandOver, instance: Instance) -> bool:  # noqa: ARG002
        """Not what its names can't tell apart, and not the length that ends the 0.32 engine.

        A folder's name knows tokens only: an adapter's or a tenant's cache would be loaded into
        another's. A prompt of one token more than full blocks is written under one name and looked
        for under another; if an earlier prompt left a folder of that name, the engine dies. Where
        the length is unknown it might be that one.
        """
        if request.has_adapter or request.has_salt or request.prompt_tokens is None:
            return False
        tokens = request.prompt_tokens
        return all(size == 1 or tokens % size != 1 for size in request.block_sizes)
