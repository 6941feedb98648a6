"""What an operator can set of encode legs. Only fleets with instances of role `encode` have any."""

from typing import Literal

import msgspec

from indexer.core.limits import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt


class EncodeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Images, audio and video of a chat are encoded by `encode` instances, where the fleet has any.

    Each item is a leg of its own, to the instance that saw it last unless that is busier than others.
    Text goes straight to prefill and decode.
    """

    attempts: PositiveInt = 2
    """Encode instances tried for one item."""
    on_failure: Literal["local", "refuse"] = "local"
    """If no encode instance could: `local` lets the engine that computes the prompt encode the item
    itself (it needs the encoder's weights; with Mooncake's connector it can't), `refuse` answers
    503."""
    reuse_s: NonNegativeFloat = 60.0
    """So long after an item was encoded its next request goes without an encode leg, if the connector
    allows it. What the encode instance has dropped since is encoded where the prompt is computed.
    0: a leg for each request."""
    affinity_legs: NonNegativeInt = 4
    """An item goes to the encode instance that saw it last as long as that has at most so many legs more
    than the least loaded."""
    parallel: PositiveInt = 8
    """Encode legs of one request at once."""
    timeout_s: PositiveFloat = 60.0
    """For one encode leg."""
    remembered_items: PositiveInt = 50_000
    """Items whose last instance is known; the longest unseen are forgotten first."""
