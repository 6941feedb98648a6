"""No PD connector: one instance prefills and decodes. The planner never splits its requests."""

from collections.abc import Mapping
from typing import Any

from balancer.connectors.contract import Connector, LegContext, LegRequest, NoTransferError


class NoConnector(Connector):
    """What a mixed instance has; also the default of a decode instance left unconfigured."""

    name = "none"

    def prefill_leg(self, context: LegContext) -> LegRequest:
        """There is nothing to hand over, so a prefill leg would be work thrown away."""
        raise NoTransferError(f"{context.prefill.alias} has no connector to hand its blocks over")

    def decode_leg(
        self,
        context: LegContext,
        prefill_answer: Mapping[str, Any] | None,  # noqa: ARG002 - the contract's signature
    ) -> LegRequest:
        """The client's body as it is."""
        return LegRequest(body=context.body)
