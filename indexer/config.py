"""The indexer's settings and where its streams come from. Frozen, checked, units in the names."""

from dataclasses import dataclass, field
from typing import Literal

import msgspec

from indexer.core.addresses import parse_instance_id
from indexer.core.endpoints import check_endpoints
from indexer.core.limits import NonNegativeInt, Port, PositiveFloat, PositiveInt
from indexer.core.types import InstanceId, RankId

Direction = Literal["connect", "bind"]


class InstanceSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One instance whose events are followed.

    Whatever is left out is asked of the engine (`/v1/models`, `/kv_event_sources`). What is given
    is used instead of the engine's answer: a mapped port is known to the operator only.
    """

    url: str
    """`http://host:port`."""
    alias: str | None = None
    """Its name in metrics; default: the url."""
    events: str | None = None
    """Endpoint of `--kv-events-config`. Rank r is found at its port + r."""
    replay: str | None = None
    """Replay endpoint of `--kv-events-config`. Rank r is found at its port + r."""
    direction: Direction = "connect"
    """`bind`: the engine connects to `events`, which we bind."""
    topic: str | None = None
    """With `bind`: tells this engine's messages from others on the same port."""
    model: str | None = None
    """Base model."""
    ranks: PositiveInt | None = None
    """Data-parallel ranks behind this address."""
    rank_base: NonNegativeInt = 0
    """Global number of its first rank."""
    api_key: str | None = None
    """The engine's `--api-key`."""

    def __post_init__(self) -> None:
        """Raise ValueError for an address or endpoint that can't be used."""
        parse_instance_id(self.url)
        check_endpoints(events=self.events, replay=self.replay)

    def __repr__(self) -> str:
        """The key stays out of logs."""
        return f"InstanceSource({self.url!r}, events={self.events!r}, replay={self.replay!r})"

    @property
    def instance(self) -> InstanceId:
        """One spelling per address, the same that the balancer uses."""
        return parse_instance_id(self.url)

    @property
    def name(self) -> str:
        return self.alias or self.instance

    def has_streams_of(self, other: "InstanceSource") -> bool:
        """Is this the same instance, followed the same way? Its key and name may be others."""
        return self._anonymous() == other._anonymous()  # noqa: SLF001 - of its own class

    def _anonymous(self) -> "InstanceSource":
        return msgspec.structs.replace(self, api_key=None, alias=None)


class IndexerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How event streams are followed."""

    status_host: str | None = None
    """Where `kvlb indexer` shows `/health`, `/ready`, `/metrics`, `/status`. Default: on
    `host`."""
    status_port: Port = 8081
    """Its port; 0 takes any free one."""
    replay_timeout_s: PositiveFloat = 5.0
    """A replay is given up when nothing has come for this long."""
    receive_high_water: NonNegativeInt = 0
    """Messages ZMQ may queue per socket; 0: no limit. With one we lose batches ourselves when we
    are slow."""
    repair_grace_s: PositiveFloat = 1.0
    """A rank whose missing batches a replay hasn't brought within this time is not exact until it
    has: `degraded`, `gap_open`. Healthy replays take milliseconds."""
    max_held_batches: PositiveInt = 20_000
    """Live batches that may wait for a replay, twice vLLM's default ring; more end the wait, and
    the gap is lost."""
    max_blocks_per_rank: PositiveInt = 2_000_000
    """Blocks that a rank's tables may hold, each counted on every tier; beyond it the oldest leave,
    and the rank is `degraded` (`bound_hit`)."""
    max_parked_blocks: PositiveInt = 65_536
    """Blocks per KV-cache group that may wait for their parent; the oldest leaves first."""
    store_only_ttl_s: PositiveFloat = 600.0
    """How long a block counts that LMCache or Mooncake has stored: they never tell when they drop
    one. Announced again, it counts anew."""
    max_store_only_blocks: PositiveInt = 200_000
    """Such blocks per rank; the oldest leave first."""
    rebuild_interval_s: PositiveFloat = 60.0
    """A degraded rank is replayed from its beginning at once and when orphans first appear, then
    after this long, and twice as long each time it hasn't helped, up to eight times; for as long as
    the engine still buffers the beginning. If its replay socket doesn't answer, it is asked for a
    little every `replay_timeout_s`, and for all once it does."""
    silent_after_s: PositiveFloat = 10.0
    """A rank that computes prompts and publishes nothing for this long is degraded."""
    shared_bind: str | None = None
    """`tcp://*:5557`, bound by us for all instances that have a `topic` and no `events`: they
    connect to it. Whose connection comes or goes can't be told there: a rank is exact once it is
    heard, until any connection is lost."""
    discovery_interval_s: PositiveFloat = 10.0
    """How often an instance is asked whether its streams have changed."""
    discovery_retry_s: PositiveFloat = 1.0
    """First pause after an instance didn't answer; doubles up to `discovery_interval_s`."""
    http_timeout_s: PositiveFloat = 5.0
    """For each call of discovery."""
    size_interval_s: PositiveFloat = 5.0
    """How often the index is measured for metrics."""
    log_interval_s: PositiveFloat = 10.0
    """At most one line per rank and fault in this time; metrics count all of them."""

    def __post_init__(self) -> None:
        check_endpoints(shared_bind=self.shared_bind)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSource:
    """Where the events of one rank come from: everything resolved."""

    rank: RankId
    alias: str = field(compare=False)
    """The instance's name in metrics. Another one makes no other stream."""
    model: str
    """Base model."""
    events: str
    """Endpoint to connect to or to bind."""
    replay: str | None
    direction: Direction = "connect"
    topic: str | None = None
    """With `bind`: topic of this rank's messages; None: the port is this rank's alone."""
