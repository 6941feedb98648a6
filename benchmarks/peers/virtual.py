"""The same calls on the same engines in virtual time: what decisions alone are worth, without the machine.

Rules:

1. Calls, engines and loads are those of the real-time run, repetition by repetition; there may be many of
   them, since a run takes a fraction of a second.
2. Both cache_aware routers go by a tree of the texts that they sent, for ever and without events: the
   engine with the longest beginning if that is over the threshold, else the one whose tree is smallest;
   the one with fewest requests if these are too uneven. `TextTree` is that rule.
3. Nothing is late here, so every cell is valid.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from balancer.core.request import GenerateRequest, PromptView
from balancer.core.routing.cost import LoadedCandidate, RequestShape, TieBreak, estimate_all
from balancer.core.routing.plan import Choice
from balancer.core.routing.policies import Policy
from balancer.routing.route import Route
from benchmarks.peers.cells import Cell
from benchmarks.peers.engines import ENGINES
from benchmarks.peers.sizes import SIZES, first_calls
from indexer.core.types import BlockKey, RankId
from kvlb.bench.clock import VirtualClock
from kvlb.bench.figures import summarize
from kvlb.bench.fleet import VirtualFleet, equal_engines
from kvlb.bench.play import Play
from kvlb.bench.run import policy_by_name
from kvlb.bench.saturation import SATURATION
from kvlb.bench.workloads import WORKLOADS

REPEATS: Final = 40


class TextTree:
    """cache_aware, as its documentation describes it."""

    def __init__(self, threshold: float, uneven_by: int, uneven_ratio: float) -> None:
        self._threshold = threshold
        self._uneven_by = uneven_by
        self._uneven_ratio = uneven_ratio
        self._sent: dict[RankId, set[BlockKey]] = {}
        self.keys: Sequence[BlockKey] = ()
        """Of the prompt that is decided about: told before."""

    def choose(
        self, shape: RequestShape, candidates: Sequence[LoadedCandidate], draw: TieBreak
    ) -> list[Choice]:
        """The one it takes, then the others as they come."""
        choices = estimate_all(shape, candidates)
        ranks = [each.candidate.rank for each in candidates]
        sent = [self._sent.setdefault(rank, set()) for rank in ranks]
        requests = [each.load.requests for each in candidates]
        matched = [self._matched(each) for each in sent]
        scores: Sequence[float]
        if self._is_uneven(requests):
            scores = requests
        elif max(matched) > self._threshold * len(self.keys):
            scores = [-each for each in matched]
        else:
            scores = [len(each) for each in sent]
        best = min(range(len(ranks)), key=lambda number: (scores[number], draw(ranks[number])))
        sent[best].update(self.keys)
        return [choices[best], *choices[:best], *choices[best + 1 :]]

    def chosen(self, rank: RankId) -> None:
        """Nothing is booked here."""

    def _is_uneven(self, requests: Sequence[int]) -> bool:
        most, least = max(requests), min(requests)
        return most - least > self._uneven_by and most > self._uneven_ratio * least

    def _matched(self, sent: set[BlockKey]) -> int:
        return next(
            (number for number, key in enumerate(self.keys) if key not in sent), len(self.keys)
        )


class _Fleet(VirtualFleet):
    """Tells a text tree which prompt it is asked about."""

    tree: TextTree | None = None
    tree_block_size = 0

    def route(self, request: GenerateRequest, view: PromptView) -> Route:
        if self.tree is not None:
            self.tree.keys = view.prompts[0].keys(self.tree_block_size)
        return super().route(request, view)


def policies() -> dict[str, Policy]:
    """Fresh ones, by what they are called in tables."""
    return {
        "kvlb": policy_by_name("kvlb"),
        "cache_aware": TextTree(0.3, 64, 1.5),
        "cache_aware tuned": TextTree(0.1, 8, 1.2),
        "uncached_4": policy_by_name("uncached_4"),
        "round_robin": policy_by_name("round_robin"),
    }


def run_virtually(
    workloads: Sequence[str], repeats: int, load: float, calls: int | None
) -> Iterator[Cell]:
    """Every cell."""
    for workload in workloads:
        for repeat in range(repeats):
            for name, policy in policies().items():
                yield _cell(workload, repeat, load, calls or SIZES[workload].calls, (name, policy))


def _cell(workload: str, repeat: int, load: float, limit: int, router: tuple[str, Policy]) -> Cell:
    name, policy = router
    engine = WORKLOADS[workload].engine
    fleet = _Fleet(
        VirtualClock(),
        engines=equal_engines(engine, ENGINES, one_slow=False),
        policy=policy,
        seed=repeat,
    )
    if isinstance(policy, TextTree):
        fleet.tree, fleet.tree_block_size = policy, engine.block_size
    speed = load * SATURATION[workload, ENGINES]
    calls = first_calls(WORKLOADS[workload].calls(ENGINES, speed, repeat), limit)
    return Cell(
        router=name,
        workload=workload,
        repeat=repeat,
        figures=summarize(Play(fleet, calls).run(), engine, ENGINES),
        failed={},
        late_p99_s=0.0,
        engines_late_p99_s=0.0,
        busy=0.0,
        took_s=0.0,
    )
