"""ExampleConnector, vLLM's shared storage: prefill leg first, then the decode engine finds the files.

Nothing is handed over in the bodies. The prefill engine writes the prompt's KV cache to a directory
both engines mount, in a folder named by the prompt's tokens; the decode engine computes the same
name. It looks only for the whole prompt, so a folder of an earlier turn is of no use to a later one.
A debugging connector: docs/connectors.md says what it can't do.
"""

from collections.abc import Mapping
from typing import Any, Literal

from balancer.connectors.contract import LegContext, LegRequest, NoTransferError
from balancer.core.prefill_rewrite import prefill_body


class ExampleConnector:
    """Serial: the files have to be complete before the decode engine looks for them."""

    name = "example"
    style: Literal["serial", "concurrent"] = "serial"

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
