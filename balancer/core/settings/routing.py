"""Settings of routing and of the prefill decision: typed, frozen, units in their names.

`balancer.config` composes both under the keys `routing` and `pd`.
"""

from collections.abc import Mapping
from typing import Literal

import msgspec

from indexer.core.limits import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Share,
)
from indexer.core.types import Tier

PolicyName = Literal["kvlb", "round_robin", "least_loaded", "prefix_overlap", "session"]


class RoutingSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who gets a request."""

    policy: str = "kvlb"
    """`kvlb` takes the least estimated time; `round_robin`, `least_loaded`, `prefix_overlap` and
    `session` are there to compare with (docs/routing.md). One's own by its import path:
    `package.module:Class` (docs/extending.md)."""
    observe_share: Share = 0.01
    """Under `round_robin` and `least_loaded`, which don't ask what is cached, of so many prompts it is
    looked up all the same, so that hit rates can be compared. 0: of none."""
    lookup_timeout_s: PositiveFloat = 0.02
    """Longest wait for the index; then the request is routed by load."""
    confirm_s: PositiveFloat = 2.0
    """How long after its first token a routed prompt counts as held until events confirm it."""
    approximate_ttl_s: PositiveFloat = 120.0
    """How long after a leg that used them blocks are guessed to be held by a rank without events. A
    turn of a conversation comes back within it; what the engine has evicted earlier shows in the
    cached tokens it reports."""
    max_predicted_blocks: PositiveInt = 100_000
    """Predicted blocks kept per rank; about what a GPU holds."""
    cpu_weight: Share = 0.9
    """What a token held in CPU memory is worth beside one held on the GPU: 1 would say that loading
    it is free, 0 that it costs as much as computing it anew."""
    storage_weight: Share = 0.6
    """The same for a token on disk, or in a store behind a network."""
    session_header: str = "x-session-id"
    """Request header that names a session, for the policy `session`."""
    max_requests_per_rank: NonNegativeInt = 0
    """Legs in flight at which a rank gets no more; 0: no limit."""
    full_report_interval_s: NonNegativeFloat = 10.0
    """A rank that stays degraded has one request in this time ask its engine to announce the blocks it
    reuses once more (vLLM from 0.30 on); 0: never."""

    def tier_weights(self) -> Mapping[Tier, float]:
        """Worth of a held token by where it lies."""
        return {Tier.GPU: 1.0, Tier.CPU: self.cpu_weight, Tier.STORAGE: self.storage_weight}


class PdSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prefill elsewhere, or where the request decodes."""

    decide: Literal["time", "threshold"] = "time"
    """`time`: whichever is estimated to cost less, once rates are learned; `threshold`: by
    `local_prefill_max_tokens` alone."""
    local_prefill_max_tokens: NonNegativeInt = 256
    """Up to so many uncached tokens the decode instance computes itself, where times aren't
    compared: until rates are learned, if tokens are unknown, or with `decide: threshold`."""
    force: Literal["auto", "local", "remote"] = "auto"
    """`local` or `remote` decide for every request."""
    allow_local_on_failure: bool = False
    """May a decode instance prefill a long prompt because every prefill instance failed or is
    down? Long prefills stall what it decodes, so this has to be asked for."""
    prefill_attempts: PositiveInt = 3
    """Prefill instances tried for one request."""
