"""Situations in which a router is easily wrong, each with what is right: decisions, never times.

The balancer's own router, ledger and policy decide. Engines compute one prompt after another at a
stated speed, keep what was used last, and tell of it once it is computed; time is virtual.
"""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count, pairwise
from random import Random

import pytest

from balancer.core.fleet.snapshot import Fleet, Instance, Role
from balancer.core.load.local_ledger import LocalLedger
from balancer.core.request import Endpoint, GenerateRequest, PromptView
from balancer.core.routing.policies import named_policy
from balancer.core.settings.routing import RoutingSettings
from balancer.routing.route import Route
from balancer.routing.router import Router
from indexer.core.hashing import Namespace
from indexer.core.index import PrefixMatch, Prompt
from indexer.core.model_cards import ServedModels
from indexer.core.types import BlockKey, InstanceId, RankId, Tier, Trust

BLOCK = 16
FIXED_S = 0.01
FAST = 5e-5
"""Seconds per prompt token: 20,000 tokens in a second."""
STEP_S = 0.01
MODELS = ServedModels(base="m", aliases=frozenset({"m"}), adapters=frozenset(), cards=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """What an engine is like."""

    s_per_token: float = FAST
    step_s: float = STEP_S
    cache_tokens: int = 400_000


@dataclass(slots=True)
class _Sent:
    """A request on its way."""

    route: Route
    prompt: Prompt
    output_tokens: int
    at_s: float
    then: Callable[[], None]

    def finish(self) -> None:
        self.route.decode_guard.generated(self.output_tokens)
        self.route.__exit__(None, None, None)
        self.then()


@dataclass(slots=True)
class Engine:
    """Computes prompts one after another, decodes all at once."""

    instance: Instance
    speed: Speed
    held: OrderedDict[BlockKey, None] = field(default_factory=OrderedDict)
    told: set[BlockKey] = field(default_factory=set)
    """Of what is held: what events have told of."""
    queue: deque[_Sent] = field(default_factory=deque)
    """Prompts not yet computed; the first one is being so."""

    @property
    def rank(self) -> RankId:
        return RankId(self.instance.id, 0)

    def held_tokens(self, prompt: Prompt, among: Container[BlockKey]) -> int:
        blocks = 0
        for key in prompt.keys(BLOCK)[: prompt.hit_limit_blocks(BLOCK)]:
            if key not in among:
                break
            blocks += 1
        return blocks * BLOCK

    def keep(self, prompt: Prompt) -> None:
        for key in prompt.keys(BLOCK):
            self.held[key] = None
            self.held.move_to_end(key)
        while len(self.held) > self.speed.cache_tokens // BLOCK:
            self.told.discard(self.held.popitem(last=False)[0])

    def tell(self, prompt: Prompt) -> None:
        self.told.update(key for key in prompt.keys(BLOCK) if key in self.held)


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a prompt went, and what that engine computed of it."""

    at_s: float
    alias: str
    prompt: Prompt
    computed_tokens: int


class Stage:
    """A fleet in virtual time."""

    def __init__(self, speeds: Sequence[Speed], *, seed: int = 1) -> None:
        self.now_s = 0.0
        self.decisions: list[Decision] = []
        self.tokens = count(1)
        self.chance = Random(seed)  # noqa: S311 - a test's dice
        self._numbers = count()
        self._agenda: list[tuple[float, int, Callable[[], object]]] = []
        engines = [Engine(_instance(number, each), each) for number, each in enumerate(speeds)]
        self._engines = {each.rank: each for each in engines}
        self._fleet = Fleet(instances=tuple(each.instance for each in engines))
        self._router = Router(
            index=self,
            ledger=LocalLedger(lambda: self.now_s),
            policy=named_policy("kvlb"),
            settings=RoutingSettings(lookup_timeout_s=60.0),
            random=self.chance.random,
            clock=lambda: self.now_s,
        )

    never_waits = True

    async def match(self, prompt: Prompt) -> dict[RankId, PrefixMatch]:
        """What every engine has told of."""
        return {
            rank: PrefixMatch(
                tokens_by_tier={Tier.GPU: engine.held_tokens(prompt, engine.told)},
                block_size=BLOCK,
                trust=Trust.EXACT,
                epoch=1,
            )
            for rank, engine in self._engines.items()
        }

    def fresh(self, tokens: int) -> list[int]:
        """Tokens that nobody has seen."""
        return [next(self.tokens) for _ in range(tokens)]

    def at(self, when_s: float, act: Callable[[], object]) -> None:
        heappush(self._agenda, (when_s, next(self._numbers), act))

    def send_at(
        self,
        when_s: float,
        token_ids: Sequence[int],
        *,
        output_tokens: int = 20,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """`then` is called when its answer is complete."""
        prompt = Prompt(Namespace(model="m"), token_ids)
        self.at(when_s, lambda: self._send(prompt, output_tokens, then))

    def run(self) -> list[Decision]:
        """Until nothing is left to do."""

        async def play() -> None:
            while self._agenda:
                self.now_s, _, act = heappop(self._agenda)
                waiting = act()
                if asyncio.iscoroutine(waiting):
                    await waiting

        asyncio.run(play())
        return self.decisions

    async def _send(self, prompt: Prompt, output_tokens: int, then: Callable[[], None]) -> None:
        request = GenerateRequest(
            request_id="r",
            endpoint=Endpoint.CHAT,
            body={"stream": True},
            raw_body=b"",
            headers=(),
            model="m",
            base_model="m",
            lora=None,
        )
        view = PromptView(prompts=(prompt,), source="ids")
        route = await self._router.route(self._fleet, request, view)
        engine = self._engines[route.plan.decode.candidate.rank]
        sent = _Sent(route, prompt, output_tokens, self.now_s, then)
        engine.queue.append(sent)
        if len(engine.queue) == 1:
            self._start(engine)

    def _start(self, engine: Engine) -> None:
        sent = engine.queue[0]
        computed = sent.prompt.tokens - engine.held_tokens(sent.prompt, engine.held)
        decision = Decision(sent.at_s, engine.instance.alias, sent.prompt, computed)
        self.decisions.append(decision)
        engine.keep(sent.prompt)
        done_s = self.now_s + FIXED_S + computed * engine.speed.s_per_token

        def first_token() -> None:
            sent.route.decode_guard.first_token()
            engine.tell(engine.queue.popleft().prompt)
            if engine.queue:
                self._start(engine)

        self.at(done_s, first_token)
        self.at(done_s + engine.speed.step_s * sent.output_tokens, sent.finish)


def _instance(number: int, speed: Speed) -> Instance:
    return Instance(
        id=InstanceId(f"http://e{number}:8000"),
        alias=f"e{number}",
        role=Role.MIXED,
        models=MODELS,
        healthy=True,
        rank_cache_tokens=speed.cache_tokens,
    )


def share(decisions: Sequence[Decision]) -> dict[str, float]:
    """Of the requests, by engine."""
    counts = Counter(each.alias for each in decisions)
    return {alias: number / len(decisions) for alias, number in counts.items()}


def work(decisions: Sequence[Decision]) -> Counter[str]:
    """Tokens computed, by engine."""
    found: Counter[str] = Counter()
    for each in decisions:
        found[each.alias] += each.computed_tokens
    return found


def chats(stage: Stage, *, sessions: int, turns: int, per_s: float, first_tokens: int) -> None:
    """Sessions that begin at random moments; each turn adds to the one before, after a pause."""
    begin_s = 0.0
    for _ in range(sessions):
        begin_s += stage.chance.expovariate(per_s)
        _turn(stage, begin_s, stage.fresh(first_tokens), turns)


def _turn(stage: Stage, at_s: float, token_ids: list[int], left: int) -> None:
    def again() -> None:
        if left > 1:
            pause_s = stage.chance.uniform(0.5, 2.0)
            _turn(stage, stage.now_s + pause_s, token_ids + stage.fresh(100), left - 1)

    stage.send_at(at_s, token_ids, then=again)


def moves(decisions: Sequence[Decision]) -> float:
    """Share of turns that another engine got than the turn before. A session is its first tokens."""
    homes: dict[BlockKey, list[str]] = {}
    for each in decisions:
        homes.setdefault(each.prompt.keys(BLOCK)[0], []).append(each.alias)
    pairs = [pair for visits in homes.values() for pair in pairwise(visits)]
    return sum(earlier != later for earlier, later in pairs) / len(pairs)


@pytest.mark.parametrize("per_s", [2.0, 20.0, 100.0])
def test_a_hot_system_prompt_is_computed_once_per_engine_and_spreads(per_s: float) -> None:
    """200 chats share 2,000 tokens, at 2 to 100 in a second on four engines.

    Right: no engine computes the shared part twice. Where one engine could not do it all, nobody
    gets more than 1.3 of the mean work.
    """
    stage = Stage([Speed()] * 4)
    system = stage.fresh(2000)
    at_s = 0.0
    for _ in range(200):
        at_s += stage.chance.expovariate(per_s)
        stage.send_at(at_s, system + stage.fresh(stage.chance.randrange(50, 600)))
    decisions = stage.run()

    copies = Counter(each.alias for each in decisions if each.computed_tokens > 2000)
    assert max(copies.values()) == 1
    if per_s > 50:
        done = work(decisions)
        assert max(done.values()) / (sum(done.values()) / 4) <= 1.3


@pytest.mark.parametrize("per_s", [0.5, 1.5], ids=["idle", "busy"])
@pytest.mark.parametrize("step_s", [STEP_S, 4 * STEP_S], ids=["slow-prompts", "slow-in-all"])
def test_a_slow_engine_gets_what_it_can_do(per_s: float, step_s: float) -> None:
    """One of four engines is four times slower, in everything or in prompts alone.

    Right, once that is learned: it begins at most half as many sessions as each of the others, and
    sessions stay where they began.
    """
    stage = Stage([Speed(s_per_token=4 * FAST, step_s=step_s), *[Speed()] * 3])
    chats(stage, sessions=120, turns=6, per_s=per_s, first_tokens=4000)
    decisions = stage.run()
    learned = sorted(decisions, key=lambda each: each.at_s)[100:]

    first_turns = [each for each in learned if each.prompt.tokens == 4000]
    shares = share(first_turns)
    assert shares.get("e0", 0.0) <= min(shares[f"e{number}"] for number in (1, 2, 3)) / 2
    assert moves(learned) <= 0.05


def test_of_a_pair_the_fast_engine_computes_what_is_long() -> None:
    """One engine computes prompts three times faster than the other.

    Right, once that is learned: it computes about three quarters of all tokens, and warm sessions
    stay at the slow one all the same.
    """
    stage = Stage([Speed(s_per_token=3 * FAST), Speed()])
    chats(stage, sessions=150, turns=5, per_s=1.2, first_tokens=6000)
    decisions = stage.run()
    learned = sorted(decisions, key=lambda each: each.at_s)[100:]

    done = work(learned)
    assert 0.65 <= done["e1"] / sum(done.values()) <= 0.95
    assert moves(learned) <= 0.05
    assert any(each.alias == "e0" and each.computed_tokens < 200 for each in learned)


@pytest.mark.parametrize("pause_s", [0.0, 5.0, 60.0])
def test_paced_sessions_spread_over_idle_engines_and_stay(pause_s: float) -> None:
    """20 sessions take turns, one request after another, so nothing is ever in flight.

    Right: sessions stay, and neither engine does more than 60 % of the work.
    """
    stage = Stage([Speed()] * 2)
    common = stage.fresh(BLOCK)
    sessions = [common + stage.fresh(400) for _ in range(20)]
    left = [20] * 20

    def next_one() -> None:
        open_ones = [number for number, turns in enumerate(left) if turns]
        if not open_ones:
            return
        number = stage.chance.choice(open_ones)
        left[number] -= 1
        token_ids = sessions[number]
        sessions[number] = token_ids + stage.fresh(100)
        stage.send_at(stage.now_s + pause_s, token_ids, then=next_one)

    next_one()
    decisions = stage.run()

    done = work(decisions)
    homes: dict[BlockKey, list[str]] = {}
    for each in decisions:
        homes.setdefault(each.prompt.keys(BLOCK)[1], []).append(each.alias)
    moved = sum(a != b for visits in homes.values() for a, b in pairwise(visits))
    assert len(decisions) == 400
    assert max(done.values()) / sum(done.values()) <= 0.6
    assert moved <= 8


@pytest.mark.parametrize(("prefixes", "most_copies"), [(1, 4), (8, 10)])
def test_a_burst_of_siblings_shares_few_copies(prefixes: int, most_copies: int) -> None:
    """64 at once on four engines; each has 8,000 tokens in common with its siblings, 200 of its own.

    Right: each engine takes its share. Of one prefix that is a copy each: 64 times 200 tokens are more
    than the prefix. Of eight, in any order, it is hardly more than one of each: who doesn't see where
    siblings were sent a moment ago computes each of them nearly everywhere.
    """
    stage = Stage([Speed()] * 4)
    shared = [stage.fresh(8000) for _ in range(prefixes)]
    turns = [number % prefixes for number in range(64)]
    stage.chance.shuffle(turns)
    for number in turns:
        stage.send_at(1.0, shared[number] + stage.fresh(200))
    decisions = stage.run()

    copies = [each for each in decisions if each.computed_tokens > 8000]
    assert len({(each.alias, each.prompt.keys(BLOCK)[0]) for each in copies}) == len(copies)
    assert len(copies) <= most_copies
    assert max(share(decisions).values()) <= 0.3


def test_a_few_siblings_wait_for_one_another() -> None:
    """8 at once with 8,000 tokens in common and 40 of their own.

    Right: two engines compute what they share. On all four it would be no sooner, and twice the work.
    """
    stage = Stage([Speed()] * 4)
    shared = stage.fresh(8000)
    for _ in range(8):
        stage.send_at(1.0, shared + stage.fresh(40))
    decisions = stage.run()

    assert sum(each.computed_tokens > 8000 for each in decisions) <= 2


def test_nobody_waits_behind_a_long_prompt() -> None:
    """40,000 tokens, and at the same moment 24 prompts of 1,000; nothing is learned of anybody.

    Right: those go to the three other engines, since none of these has as much to do.
    """
    stage = Stage([Speed()] * 4)
    stage.send_at(0.0, stage.fresh(40_000))
    for _ in range(24):
        stage.send_at(0.0, stage.fresh(1000))
    decisions = stage.run()

    first = decisions[0]
    beside = [each.alias for each in decisions if each.alias == first.alias]
    assert first.prompt.tokens == 40_000
    assert len(beside) - 1 <= 1


def test_a_cold_fleet_spreads_by_work_and_keeps_sessions() -> None:
    """24 unlike prompts at once, and nothing is learned of anybody.

    Right: six each, give or take one, and every second turn goes where its first went.
    """
    stage = Stage([Speed()] * 4)
    prompts = [stage.fresh(3000) for _ in range(24)]
    for token_ids in prompts:
        stage.send_at(0.0, token_ids)
        stage.send_at(3.0, token_ids + stage.fresh(100))
    decisions = stage.run()

    firsts = Counter(each.alias for each in decisions if each.prompt.tokens == 3000)
    assert sorted(firsts.values()) == pytest.approx([6, 6, 6, 6], abs=1)
    assert moves(decisions) == 0
