"""A fleet of mixed virtual engines behind the balancer's own router, ledger, planner and index.

What engines do to their caches reaches the index `EVENT_DELAY_S` late, as the changes that the
indexer would have made of their events.
"""

import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import msgspec

from balancer.core.fleet.snapshot import Fleet, Instance
from balancer.core.load.local_ledger import LocalLedger
from balancer.core.request import GenerateRequest, PromptView
from balancer.core.routing.policies import Policy
from balancer.core.settings.routing import RoutingSettings
from balancer.routing.route import Route
from balancer.routing.router import Router
from indexer.core.index import Change, GroupKind, GroupSpec, RankUpdate
from indexer.core.model_cards import ServedModels
from indexer.core.types import InstanceId, RankId
from indexer.memory_index import MemoryIndex
from kvlb.bench.calls import MODEL
from kvlb.bench.clock import VirtualClock
from kvlb.bench.engine import VirtualEngine
from simulator.core.settings import EngineSettings

EVENT_DELAY_S = 0.01
SLOWER = 4.0
"""How many times as long a slow engine takes for everything."""

MODELS = ServedModels(base=MODEL, aliases=frozenset({MODEL}), adapters=frozenset(), cards=())

Answer = TypeVar("Answer")


def at_once(waiting: Coroutine[Any, Any, Answer]) -> Answer:
    """The result of a coroutine that never waits."""
    try:
        waiting.send(None)
    except StopIteration as done:
        result: Answer = done.value
        return result
    raise RuntimeError("it waits")


class VirtualFleet:
    """Engines of one rank each, and the router that decides among them."""

    def __init__(
        self,
        clock: VirtualClock,
        *,
        engines: Sequence[EngineSettings],
        policy: Policy,
        seed: int,
    ) -> None:
        self.clock = clock
        self.engines: dict[RankId, VirtualEngine] = {}
        self._index = MemoryIndex()
        self.fleet = Fleet(
            instances=tuple(
                self._instance(f"e{number}", settings) for number, settings in enumerate(engines)
            )
        )
        self.ledger = LocalLedger(lambda: clock.now_s)
        self._router = Router(
            index=self._index,
            ledger=self.ledger,
            policy=policy,
            settings=RoutingSettings(),
            random=random.Random(seed).random,  # noqa: S311 - ties of a benchmark
            clock=lambda: clock.now_s,
        )

    def route(self, request: GenerateRequest, view: PromptView) -> Route:
        """Choose an engine and book it."""
        return at_once(self._router.route(self.fleet, request, view))

    def cached_share(self, request: GenerateRequest, view: PromptView) -> float:
        """Of the prompt, the most that any engine holds as far as the balancer knows."""
        return at_once(self._router.cached_share(self.fleet, request, view))

    def block_size(self, rank: RankId) -> int | None:
        """Of a rank, as its events told."""
        return self._router.known_ranks.block_sizes.get(rank)

    def _instance(self, name: str, settings: EngineSettings) -> Instance:
        rank = RankId(InstanceId(f"http://{name}:8000"), 0)
        group = GroupSpec(group=0, kind=GroupKind.FULL, block_size=settings.block_size)
        apply = self._changes_of(rank)
        apply([group])()
        self.engines[rank] = VirtualEngine(
            settings,
            self.clock,
            lambda changes: self.clock.at(self.clock.now_s + EVENT_DELAY_S, apply(changes)),
        )
        return Instance(
            id=rank.instance,
            alias=name,
            models=MODELS,
            healthy=True,
            rank_cache_tokens=settings.cache_tokens,
        )

    def _changes_of(self, rank: RankId) -> Callable[[list[Change]], Callable[[], None]]:
        seqs = iter(range(10**9))

        def apply(changes: list[Change]) -> Callable[[], None]:
            update = RankUpdate(
                rank=rank, model=MODEL, epoch=1, seq=next(seqs), changes=tuple(changes)
            )
            return lambda: at_once(self._index.apply(update))

        return apply


def equal_engines(settings: EngineSettings, count: int, *, one_slow: bool) -> list[EngineSettings]:
    """`count` of them, the first one slower if asked."""
    engines = [settings] * count
    if one_slow:
        engines[0] = msgspec.structs.replace(
            settings,
            prefill_tokens_per_s=settings.prefill_tokens_per_s / SLOWER,
            inter_token_ms=settings.inter_token_ms * SLOWER,
        )
    return engines
