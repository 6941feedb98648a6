"""A fleet in virtual time, for situations in which a router is easily wrong.

The balancer's own router, ledger and policy decide. Engines compute one prompt after another at a
stated speed, keep what was used last, and tell of it once it is computed. Tests say what is right:
decisions, never times.
"""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count, pairwise
from random import Random
from typing import Any

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
MODELS = ServedModels(base="m", aliases=frozenset({"m"}), adapters=frozenset(), cards=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """What an engine is like."""

    s_per_token: float = 5e-5
    """Of a prompt: 20,000 tokens in a second."""
    step_s: float = 0.01
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


class Decisions:
    """All of a run, or some of them."""

    def __init__(self, made: Iterable[Decision]) -> None:
        self.made = list(made)

    def after(self, learning: int) -> "Decisions":
        """Without the first so many sent, from which speeds are learned."""
        return Decisions(sorted(self.made, key=lambda each: each.at_s)[learning:])

    def work(self) -> Counter[str]:
        """Tokens computed, by engine."""
        found: Counter[str] = Counter()
        for each in self.made:
            found[each.alias] += each.computed_tokens
        return found

    def moves(self, *, first_own_block: int = 0) -> list[bool]:
        """Of each turn but a session's first: another engine got it than the turn before.

        A session is known by its tokens up to its first block of its own.
        """
        homes: dict[BlockKey, list[str]] = {}
        for each in self.made:
            homes.setdefault(each.prompt.keys(BLOCK)[first_own_block], []).append(each.alias)
        pairs = [pair for visits in homes.values() for pair in pairwise(visits)]
        return [earlier != later for earlier, later in pairs]


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

    def chats(self, *, sessions: int, turns: int, per_s: float, first_tokens: int) -> None:
        """Sessions that begin at random moments; each turn adds to the one before, after a pause."""
        begin_s = 0.0
        for _ in range(sessions):
            begin_s += self.chance.expovariate(per_s)
            self._turn(begin_s, self.fresh(first_tokens), turns)

    def _turn(self, at_s: float, token_ids: list[int], left: int) -> None:
        def again() -> None:
            if left > 1:
                pause_s = self.chance.uniform(0.5, 2.0)
                self._turn(self.now_s + pause_s, token_ids + self.fresh(100), left - 1)

        self.send_at(at_s, token_ids, then=again)

    def run(self) -> Decisions:
        """Until nothing is left to do."""

        async def play() -> None:
            while self._agenda:
                self.now_s, _, act = heappop(self._agenda)
                waiting = act()
                if asyncio.iscoroutine(waiting):
                    await waiting

        asyncio.run(play())
        return Decisions(self.decisions)

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


@pytest.fixture
def new_stage() -> Callable[..., Stage]:
    """So many engines, of which the first may have a speed of its own."""

    def build(engines: int, **first: Any) -> Stage:
        return Stage([Speed(**first), *[Speed()] * (engines - 1)])

    return build
