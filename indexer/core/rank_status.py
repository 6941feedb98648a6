"""What can be said of one rank's stream and entries at one moment: for status, metrics, tests.

`RankCounts` only grows, and outlives a subscriber that had to be started anew.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from indexer.core.types import InstanceId, RankId, Trust


@dataclass(slots=True)
class RankCounts:
    """Everything counted for one rank since it joined the fleet."""

    batches: int = 0
    """Batches decoded and applied."""
    events: int = 0
    """Events applied."""
    rejected: Counter[str] = field(default_factory=Counter)
    """Messages, batches and events that were not applied, by reason."""
    set_aside: Counter[str] = field(default_factory=Counter)
    """Blocks that could not be used, or not yet, by reason."""
    gaps: Counter[str] = field(default_factory=Counter)
    """Holes in the numbering, by outcome: opened, repaired, lost."""
    lost_batches: int = 0
    wrong_rank: int = 0
    """Batches that name another rank than the one whose connection they came on. Applied."""
    replays: Counter[str] = field(default_factory=Counter)
    """Replays, by outcome."""
    epochs: Counter[str] = field(default_factory=Counter)
    """Epochs opened, by reason."""
    connections: int = 0
    """Times the live socket got a peer."""
    index_faults: Counter[str] = field(default_factory=Counter)
    """What went wrong with the index: unavailable, full, lost, differs, not_renewed, taken_over."""
    contradictions: Counter[str] = field(default_factory=Counter)
    """Finished legs that found other blocks cached than predicted, by cause."""
    pruned_blocks: int = 0
    """Copies taken out of the tables because the engine turned out not to have them."""
    failures: int = 0
    """Times the subscriber had to be started anew: each one is a bug."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """One rank, seen from outside."""

    rank: RankId
    alias: str
    """The instance's name in metrics."""
    model: str
    endpoint: str
    replay_endpoint: str | None
    is_connected: bool
    is_standing_by: bool
    """Another indexer writes this rank, and we wait until it lets go of it. Its trust is `load_only` here:
    we don't hear it."""
    problem: str | None
    """Why it is not being followed, or not being written."""
    epoch: int
    """Number of the present life; unique in this process."""
    epoch_reason: str
    last_seq: int | None
    """Batch applied last in this epoch; None: none yet."""
    trust: Trust
    trust_reason: str
    trust_since_s: float
    """Seconds since trust changed."""
    held_batches: int
    """Live batches waiting for a replay."""
    is_replaying: bool
    held_blocks: int
    """Reachable full-attention blocks."""
    orphans: int
    """Blocks parked because their parent is unknown."""
    doubted_blocks: int
    """Blocks that count no more since what was stored with them turned out to be gone."""
    block_sizes: Mapping[int, int]
    """Tokens per block, by KV-cache group."""
    lag_s: float | None
    """Age of the newest live batch when it was applied, by both clocks."""
    named_rank: int | None
    """Rank that the newest batch names: another than `rank` if ports are crossed."""
    counts: RankCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceStatus:
    """One instance of the fleet, whether its streams were found or not."""

    instance: InstanceId
    alias: str
    state: str
    """`following`; `events_off`, `no_events_endpoint`: it has none; `searching`, `unreachable`,
    `refused`, `failed`: not found yet, or not again."""
    problem: str | None
    """What to tell the operator."""
    ranks: int
    """Ranks that are followed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PortStatus:
    """One port that we bind for engines to connect to."""

    endpoint: str
    topics: tuple[str | None, ...]
    is_connected: bool
    problem: str | None
    rejected: Mapping[str, int]
    """Messages that belong to no rank, by reason."""
