"""A fleet of simulated ranks behind the balancer's own router, ledger and index.

Events take the way they take in production, but for the socket: encoded as a release writes them,
decoded, turned into updates by `RankBlocks`, applied to the index; `EVENT_DELAY_S` late.
"""

import random
from dataclasses import dataclass

import msgspec

from balancer.core.fleet.snapshot import Fleet, Instance, Role
from balancer.core.load.local_ledger import LocalLedger
from balancer.core.routing.policies import named_policy
from balancer.core.settings.routing import PdSettings, RoutingSettings
from balancer.routing.router import Router
from benchmarks.routing.traces import MODEL
from benchmarks.routing.virtual_time import VirtualClock, VirtualRank
from indexer.core.events import decode_batch
from indexer.core.model_cards import ServedModels
from indexer.core.rank_blocks import RankBlocks
from indexer.core.types import InstanceId, RankId
from indexer.memory_index import MemoryIndex
from simulator.core.engine import EngineCore
from simulator.core.settings import EngineSettings
from simulator.core.transfer import SideChannel, TransferDirectory
from simulator.core.types import KvEvent
from simulator.core.wire import EventEncoder

EVENT_DELAY_S = 0.01
NO_DEADLINE_S = 60.0
"""Of a lookup, in real time: a slow machine must not change what is decided."""

ENGINE = EngineSettings(
    model=MODEL,
    block_size=64,
    num_blocks=6251,
    max_model_len=131_072,
)
"""The simulator's usual engine (20,000 prompt tokens per second, steps of 10 ms), with the memory
that an 8B model leaves of 80 GB: 400,000 tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """How fast blocks move between two engines."""

    tokens_per_s: float
    latency_ms: float


LINKS = {
    "fast": Link(tokens_per_s=200_000.0, latency_ms=2.0),
    "slow": Link(tokens_per_s=20_000.0, latency_ms=20.0),
}

MODELS = ServedModels(base=MODEL, aliases=frozenset({MODEL}), adapters=frozenset(), cards=())


class SimulatedFleet:
    """Prefill and decode instances of one rank each, and the router that decides among them."""

    def __init__(
        self,
        clock: VirtualClock,
        *,
        prefill: int,
        decode: int,
        link: Link,
        pd: PdSettings,
        seed: int,
    ) -> None:
        self.clock = clock
        self.index = MemoryIndex()
        self.ranks: dict[RankId, VirtualRank] = {}
        self._directory = TransferDirectory()
        self._settings = msgspec.structs.replace(
            ENGINE,
            kv_connector="nixl",
            transfer_tokens_per_s=link.tokens_per_s,
            transfer_latency_ms=link.latency_ms,
        )
        self.fleet = Fleet(
            instances=(
                *(self._instance(f"p{number}", Role.PREFILL) for number in range(prefill)),
                *(self._instance(f"d{number}", Role.DECODE) for number in range(decode)),
            )
        )
        self.ledger = LocalLedger(lambda: clock.now_s)
        self.router = Router(
            index=self.index,
            ledger=self.ledger,
            policy=named_policy("kvlb"),
            settings=RoutingSettings(lookup_timeout_s=NO_DEADLINE_S),
            random=random.Random(seed).random,  # noqa: S311 - ties of a benchmark
            clock=lambda: clock.now_s,
            pd=pd,
        )

    def _instance(self, name: str, role: Role) -> Instance:
        rank = RankId(InstanceId(f"http://{name}:8000"), 0)
        core = EngineCore(
            self._settings,
            none_hash=name.encode(),
            channel=SideChannel(engine_id=name, host=name, port=5600),
            directory=self._directory,
        )
        self._directory.enter(name, core.reservations)
        blocks = RankBlocks(rank=rank, model=MODEL, epoch=1)
        encoder = EventEncoder(self._settings.release)
        seqs = iter(range(10**9))

        def publish(events: list[KvEvent]) -> None:
            payload = encoder.encode_batch(events, unix_s=self.clock.now_s, rank=0)
            update = blocks.apply(next(seqs), decode_batch(payload))
            self.clock.at(self.clock.now_s + EVENT_DELAY_S, lambda: self.index.apply(update))

        self.ranks[rank] = VirtualRank(core, self.clock, publish)
        return Instance(
            id=rank.instance,
            alias=name,
            role=role,
            models=MODELS,
            connector="nixl",
            healthy=True,
            rank_cache_tokens=self._settings.cache_tokens,
        )
