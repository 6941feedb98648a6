"""What a decision is made of: candidates in, a plan with its reason out.

Candidates and choices are msgspec structs: a decision makes hundreds, ten times faster so.
"""

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from balancer.core.fleet.snapshot import Instance
from balancer.core.load.ledger import Learning
from indexer.core.types import RankId, Tier, Trust


class Reason(StrEnum):
    """Why the prefill leg is run or not. A header value and a metric label."""

    AGGREGATED = "aggregated"
    """The chosen instance is mixed: it prefills and decodes itself."""
    REMOTE_PREFILL = "remote_prefill"
    """By estimate the prefill leg costs less, or the local limit asks for it."""
    DECODE_HAS_CACHE = "decode_has_cache"
    """Skipped: what the decode instance lacks is at most the local limit, and it holds some."""
    SHORT_PROMPT = "short_prompt"
    """Skipped: the whole prompt is at most the local limit."""
    NO_PREFILL_INSTANCE = "no_prefill_instance"
    CONNECTOR_MISMATCH = "connector_mismatch"
    """Every prefill instance has another connector: a fault of the configuration."""
    NOT_SPLITTABLE = "not_splittable"
    """The request can't be split over two legs (prompt_logprobs, several prompts, ...)."""
    PREFILL_FAILED = "prefill_failed"
    """Prefill legs failed; the decode instance does it all, since the operator allows it."""
    UNSCORABLE = "unscorable"
    """Tokens are unknown: routed by load, and by how the text begins."""
    LOCAL_FASTER = "local_faster"
    """Skipped: by estimate, computing it where it decodes costs less than a prefill leg."""
    FORCED_LOCAL = "forced_local"
    FORCED_REMOTE = "forced_remote"


class Candidate(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One rank that could take a leg, with everything the cost reads."""

    rank: RankId
    instance: Instance
    overlap_tokens: int = 0
    """Leading prompt tokens held by events, at most n - 1."""
    predicted_tokens: int = 0
    """Leading prompt tokens held or on their way (blocks of prompts already routed there)."""
    tokens_by_tier: Mapping[Tier, int] = msgspec.field(default_factory=dict)
    """Where the held ones lie."""
    loading_tokens: float = 0.0
    """Tokens that could be computed in the time that loading from slower tiers takes."""
    trust: Trust = Trust.LOAD_ONLY
    trust_reason: str | None = None
    """Why it isn't exact, where that isn't the stream's doing: `lookup_timeout`, `lookup_failed`,
    `indexer_silent`."""
    block_size: int | None = None
    used_blocks: int = 0
    """Leading blocks of the first prompt that requests in flight use there."""


class OtherWay(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What the way not taken would cost on the same decode rank; terms both share left out."""

    remote: bool
    cost_s: float
    terms: Mapping[str, float]


class Choice(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A candidate with its cost, as chosen or as passed over."""

    candidate: Candidate
    cost_s: float
    terms: Mapping[str, float] = msgspec.field(default_factory=dict)
    """Each term of the cost in seconds, for explain."""
    prefill: "Choice | None" = None
    """Who prefills for this decode rank; None: it does so itself."""
    other: OtherWay | None = None
    """The way not taken, where both were open."""
    is_home: bool = False
    """Its session's home, preferred to who costs less."""


class RoutePlan(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Which rank answers, which one (if any) prefills first, and why."""

    decode: Choice
    prefill: Choice | None = None
    reason: Reason
    prompt_tokens: int | None = None
    considered: tuple[Choice, ...] = ()
    """Every decode candidate, cheapest first."""
    considered_prefill: tuple[Choice, ...] = ()
    held_back: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Aliases of instances that weren't considered since their breakers are open, and why."""
    learning: Learning | None = None
    """What has been seen of prefills and hand-overs, if it was too little to compare both ways."""
