"""Policies over a stream of requests: bursts, hot prefixes, paced traffic. No engines, no sockets."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import count, pairwise
from random import Random

import pytest

from balancer.core.fleet.snapshot import Instance, Role
from balancer.core.load.ledger import LegGuard, LegWork
from balancer.core.load.local_ledger import LocalLedger
from balancer.core.routing.candidates import CandidateSource, PromptMatches
from balancer.core.routing.cost import RequestShape
from balancer.core.routing.plan import Choice
from balancer.core.routing.policies import Policy, named_policy, seeded_draw
from indexer.core.hashing import Namespace
from indexer.core.index import PrefixMatch, Prompt
from indexer.core.types import BlockKey, InstanceId, RankId, Tier, Trust

NAMESPACE = Namespace(model="m")
PREFILL_S_PER_TOKEN = 1e-4
FIXED_S = 0.02


@dataclass(slots=True, kw_only=True)
class DecisionFleet:
    """Decides and books on a ledger; what a rank computed becomes an event at once."""

    size: int
    policy: Policy = field(default_factory=lambda: named_policy("kvlb"))
    seed: int = 1
    now_s: float = 0.0
    events: bool = True
    held: dict[RankId, set[BlockKey]] = field(default_factory=dict)
    assigned_tokens: Counter[str] = field(default_factory=Counter)
    ledger: LocalLedger = field(init=False)
    instances: list[Instance] = field(init=False)
    chance: Random = field(init=False)

    def __post_init__(self) -> None:
        self.ledger = LocalLedger(lambda: self.now_s)
        self.instances = [
            Instance(id=InstanceId(f"http://e{number}:8000"), alias=f"e{number}", role=Role.MIXED)
            for number in range(self.size)
        ]
        self.chance = Random(self.seed)  # noqa: S311 - a test's dice

    def choose(self, prompt: Prompt, *, output_tokens: float = float("inf")) -> Choice:
        ranks = [rank for each in self.instances for rank in each.rank_ids()]
        matches = PromptMatches(
            prompts=(prompt,),
            by_rank=({rank: self._match(prompt, rank) for rank in ranks},),
            block_sizes=dict.fromkeys(ranks, 16),
        )
        source = CandidateSource(matches=matches, ledger=self.ledger)
        candidates = source.load_answering(self.instances, frozenset())
        shape = RequestShape(prompt_tokens=prompt.tokens, max_output_tokens=output_tokens)
        choices = self.policy.choose(shape, candidates, seeded_draw(self.chance.getrandbits(60)))
        self.policy.chosen(choices[0].candidate.rank)
        return choices[0]

    def send(self, prompt: Prompt, *, output_tokens: float = float("inf")) -> "Sent":
        choice = self.choose(prompt, output_tokens=output_tokens)
        chosen = choice.candidate
        uncached = prompt.tokens - chosen.predicted_tokens
        self.assigned_tokens[chosen.instance.alias] += uncached
        guard = self.ledger.hold(
            LegWork(
                rank=chosen.rank,
                kind="whole",
                prompt_tokens=prompt.tokens,
                uncached_tokens=uncached,
                work_s=choice.terms["work"],
                keys=prompt.keys(16),
            )
        )
        return Sent(self, choice, guard, prompt, uncached)

    def _match(self, prompt: Prompt, rank: RankId) -> PrefixMatch:
        held = self.held.get(rank, set())
        blocks = 0
        for key in prompt.keys(16)[: prompt.hit_limit_blocks(16)]:
            if key not in held:
                break
            blocks += 1
        return PrefixMatch(
            tokens_by_tier={Tier.GPU: blocks * 16}, block_size=16, trust=Trust.EXACT, epoch=1
        )


@dataclass(slots=True)
class Sent:
    """A booked request."""

    fleet: DecisionFleet
    choice: Choice
    guard: LegGuard
    prompt: Prompt
    uncached_tokens: int

    @property
    def alias(self) -> str:
        return self.choice.candidate.instance.alias

    def compute(self) -> None:
        """The prompt is computed; events tell if they are on."""
        self.guard.first_token()
        if self.fleet.events:
            held = self.fleet.held.setdefault(self.choice.candidate.rank, set())
            held.update(self.prompt.keys(16))

    def finish(self) -> None:
        self.guard.__exit__(None, None, None)


@pytest.fixture
def token_source() -> Callable[[int], list[int]]:
    """Fresh tokens on each call, never the same twice."""
    counter = iter(range(1, 2**31))
    return lambda count: [next(counter) for _ in range(count)]


def serve(
    fleet: DecisionFleet, arrivals: Sequence[tuple[float, Prompt]], *, decode_s: float
) -> None:
    """Every rank computes its prompts one after another at the prior's rate, in virtual time."""
    numbers = count()
    agenda: list[tuple[float, int, Callable[[], None]]] = []
    free_s: dict[str, float] = {}

    def at(when_s: float, act: Callable[[], None]) -> None:
        heappush(agenda, (when_s, next(numbers), act))

    def arrive(prompt: Prompt) -> None:
        sent = fleet.send(prompt)
        work_s = FIXED_S + PREFILL_S_PER_TOKEN * sent.uncached_tokens
        done_s = max(fleet.now_s, free_s.get(sent.alias, 0.0)) + work_s
        free_s[sent.alias] = done_s
        at(done_s, sent.compute)
        at(done_s + decode_s, sent.finish)

    for when_s, prompt in arrivals:
        at(when_s, partial(arrive, prompt))
    while agenda:
        fleet.now_s, _, act = heappop(agenda)
        act()


@pytest.mark.parametrize("output_tokens", [1, 64], ids=["prefill-leg", "whole"])
def test_siblings_in_a_burst_land_together(
    token_source: Callable[[int], list[int]], output_tokens: int
) -> None:
    """Eight at once with one 4,000-token prefix: seven share a rank before any event (F19)."""
    fleet = DecisionFleet(size=4, events=False)
    shared = token_source(4000)

    sent = [
        fleet.send(Prompt(NAMESPACE, shared + token_source(40)), output_tokens=output_tokens)
        for _ in range(8)
    ]

    assert Counter(each.alias for each in sent).most_common(1)[0][1] >= 7


def test_a_failed_first_sibling_takes_its_guess_back(
    token_source: Callable[[int], list[int]],
) -> None:
    """After the only sibling failed nothing is predicted anywhere (F19)."""
    fleet = DecisionFleet(size=4, events=False)
    prompt = Prompt(NAMESPACE, token_source(4000))
    first = fleet.send(prompt)

    first.guard.__exit__(RuntimeError, RuntimeError("engine died"), None)

    assert fleet.choose(prompt).candidate.predicted_tokens == 0


@pytest.mark.parametrize("load", [0.25, 0.5, 0.9])
def test_a_hot_system_prompt_does_not_pull_the_fleet(
    token_source: Callable[[int], list[int]], load: float
) -> None:
    """200 chats with one 2,000-token system prompt: work stays within 1.3 of the mean (F21)."""
    fleet = DecisionFleet(size=4)
    system = token_source(2000)
    chance = Random(3)  # noqa: S311 - a test's dice
    mean_service_s = FIXED_S + 325 * PREFILL_S_PER_TOKEN
    arrivals: list[float] = []
    for _ in range(200):
        last_s = arrivals[-1] if arrivals else 0.0
        arrivals.append(last_s + chance.expovariate(load * 4 / mean_service_s))
    prompts = [
        Prompt(NAMESPACE, system + token_source(chance.randrange(50, 600))) for _ in arrivals
    ]

    serve(fleet, list(zip(arrivals, prompts, strict=True)), decode_s=1.3)

    work = fleet.assigned_tokens
    assert max(work.values()) / (sum(work.values()) / 4) <= 1.3


def test_a_hot_system_prompt_spreads_when_all_arrive_at_once(
    token_source: Callable[[int], list[int]],
) -> None:
    """The same 200 chats in one instant, nothing computed yet (F21)."""
    fleet = DecisionFleet(size=4)
    system = token_source(2000)
    for _ in range(200):
        fleet.send(Prompt(NAMESPACE, system + token_source(200)))

    work = fleet.assigned_tokens
    assert max(work.values()) / (sum(work.values()) / 4) <= 1.3


@pytest.mark.parametrize("pause_s", [0.01, 1.0, 60.0])
@pytest.mark.parametrize("turn_tokens", [40, 200])
def test_paced_sessions_spread_and_stay(
    token_source: Callable[[int], list[int]], pause_s: float, turn_tokens: int
) -> None:
    """448 requests one after another, 20 sessions with a common first block, 2 ranks (F22)."""
    fleet = DecisionFleet(size=2)
    chance = Random(5)  # noqa: S311 - a test's dice
    common = token_source(16)
    sessions = {number: common + token_source(turn_tokens) for number in range(20)}
    homes: dict[int, list[str]] = {number: [] for number in sessions}
    for _ in range(448):
        number = chance.randrange(20)
        sent = fleet.send(Prompt(NAMESPACE, sessions[number]))
        homes[number].append(sent.alias)
        fleet.now_s += FIXED_S + PREFILL_S_PER_TOKEN * sent.uncached_tokens
        sent.compute()
        fleet.now_s += 0.2
        sent.finish()
        sessions[number] += token_source(turn_tokens)
        fleet.now_s += pause_s

    shares = Counter(alias for visits in homes.values() for alias in visits)
    moves = sum(
        earlier != later for visits in homes.values() for earlier, later in pairwise(visits)
    )
    assert max(shares.values()) / 448 <= 0.65
    assert moves / 448 <= 0.05


def test_overlap_counts_the_unbroken_run_from_the_start() -> None:
    """Holding 0,2,3 / 0,1 / 1,2,3 of four blocks is worth 1, 2 and 0 blocks (F18)."""
    fleet = DecisionFleet(size=3)
    prompt = Prompt(NAMESPACE, range(65))
    keys = prompt.keys(16)
    ranks = [next(iter(each.rank_ids())) for each in fleet.instances]
    held = [[0, 2, 3], [0, 1], [1, 2, 3]]
    fleet.held = {
        rank: {keys[block] for block in blocks} for rank, blocks in zip(ranks, held, strict=True)
    }

    matches = PromptMatches(
        prompts=(prompt,),
        by_rank=({rank: fleet._match(prompt, rank) for rank in ranks},),
        block_sizes=dict.fromkeys(ranks, 16),
    )
    candidates = [
        matches.candidate(rank, instance, fleet.ledger)
        for rank, instance in zip(ranks, fleet.instances, strict=True)
    ]

    assert [each.overlap_tokens for each in candidates] == [16, 32, 0]
