"""What was told and what was seen of each engine: plain values, gathered by `kvlb.doctor.gather`.

Rules:

1. None means "not known": it was not asked, or it could not be. No check makes a finding of it.
2. Nothing here is judged.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import msgspec

from balancer.core.fleet.snapshot import Role
from indexer.core.model_cards import ServedModels
from kvlb.doctor.core.exposition import EngineMetrics

Version = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What the configuration says of one engine."""

    name: str
    url: str
    role: Role = Role.MIXED
    connector: str = "none"
    transfer: msgspec.Struct | None = None
    """Its connector's own settings."""
    ec_zmq_addrs: tuple[str, ...] = ()
    events: str | None = None
    replay: str | None = None
    binds: bool = False
    """The engine connects to us."""
    topic: str | None = None
    model: str | None = None
    ranks: int | None = None
    rank_base: int = 0

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """One rank in the engine's `/kv_event_sources`."""

    endpoint: str
    replay: str | None = None
    topic: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """Two equal requests of one token each, sent to one rank."""

    prompt_tokens: int
    problem: str | None = None
    """Why there is no answer to judge."""
    tells_cached: bool = False
    """An answer had `prompt_tokens_details.cached_tokens`."""
    cached_tokens: int = 0
    """Of the second answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """One rank's event stream, and what came on it while requests were sent."""

    rank: int
    endpoint: str
    binds: bool = False
    problem: str | None = None
    """Why it could not be opened."""
    is_connected: bool = False
    answers_replay: bool | None = None
    """None: no replay socket is known."""
    probed: Probed | None = None
    batches: int = 0
    named_ranks: frozenset[int] = frozenset()
    """Ranks that the batches name."""
    block_size: int | None = None
    first_hash: int | None = None
    """Engine hash of the probe prompt's first block."""
    tiers: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A prefill leg sent to this instance, then its decode leg to another."""

    problem: str | None = None
    """Why the prefill leg handed nothing over."""
    host: str | None = None
    port: int | None = None
    dial_problem: str | None = None
    """Why nobody answers there, seen from this machine."""
    decode: str | None = None
    """Name of the instance that got the decode leg."""
    decode_host: str = ""
    decode_problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenized:
    """Probe texts through our tokenizer and through the engine's."""

    directory: str
    differs_at: str | None = None
    """The first probe text for which ids differ."""
    ours: int = 0
    theirs: int = 0
    """Tokens of that text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceFacts:
    """Everything known of one engine."""

    told: Told
    fault: str | None = None
    """`unreachable`, `unauthorized` or `not_vllm`; then little else is known."""
    detail: str = ""
    """What was seen of it."""
    health_status: int | None = None
    version: Version | None = None
    models: ServedModels | None = None
    declared: Mapping[int, Declared] | None = None
    """None: it has no `/kv_event_sources`."""
    metrics: EngineMetrics = field(default_factory=EngineMetrics)
    idle_closed_s: float | None = None
    """It closed an idle connection so soon; None: not before our own pool would."""
    streams: Sequence[Stream] = ()
    probed: Probed | None = None
    """Where there is no stream: the requests sent all the same."""
    transfer: Transfer | None = None
    tokenized: Tokenized | None = None

    @property
    def name(self) -> str:
        return self.told.name

    @property
    def model(self) -> str | None:
        return self.models.base if self.models else None

    @property
    def block_size(self) -> int | None:
        """As its events say, else as its metrics do."""
        seen = [each.block_size for each in self.streams if each.block_size]
        return seen[0] if seen else self.metrics.block_size


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetFacts:
    """All engines of one configuration."""

    instances: Sequence[InstanceFacts]
    keep_alive_s: float = 4.0
    """How long our pool keeps an idle connection."""
    is_probed: bool = True
