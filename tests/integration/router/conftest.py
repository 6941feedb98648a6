"""A router whose index answers as told, two fleets, and what is asked of them."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from time import monotonic
from typing import Any

import pytest

from balancer.connectors.contract import Connector
from balancer.core.fleet.snapshot import Fleet, Instance, Role
from balancer.core.load.local_ledger import LocalLedger
from balancer.core.reliability.vetting import Vetting
from balancer.core.request import Endpoint, GenerateRequest, PromptView
from balancer.core.routing.policies import named_policy
from balancer.core.settings.routing import PdSettings, RoutingSettings
from balancer.routing.router import Router
from indexer.core.hashing import Namespace
from indexer.core.index import PrefixMatch, Prompt
from indexer.core.model_cards import ServedModels
from indexer.core.types import InstanceId, RankId, Tier, Trust

MODELS = ServedModels(base="m", aliases=frozenset({"m"}), adapters=frozenset(), cards=())


@dataclass(slots=True)
class ScriptedIndex:
    """Answers what it was told, as slowly or badly as it was told."""

    held_tokens: dict[RankId, int] = field(default_factory=dict)
    block_size: int | None = 16
    epochs: dict[RankId, int] = field(default_factory=dict)
    trust: Trust = Trust.EXACT
    delay_s: float = 0.0
    error: Exception | None = None

    async def match(self, prompt: Prompt) -> dict[RankId, PrefixMatch]:
        await asyncio.sleep(self.delay_s)
        if self.error:
            raise self.error
        return {
            rank: PrefixMatch(
                tokens_by_tier={Tier.GPU: min(tokens, prompt.tokens - 1)},
                block_size=self.block_size,
                trust=self.trust,
                epoch=self.epochs.get(rank, 1),
            )
            for rank, tokens in self.held_tokens.items()
        }


@dataclass(slots=True)
class Bench:
    """A router with its surroundings in reach."""

    index: ScriptedIndex
    ledger: LocalLedger
    lookups: list[str]
    build: Callable[..., Router]


@pytest.fixture
def bench() -> Bench:
    """Its index holds nothing until it is told."""
    index, ledger, lookups = ScriptedIndex(), LocalLedger(monotonic), []

    def build(
        routing: RoutingSettings | None = None,
        pd: PdSettings | None = None,
        policy: Any = "kvlb",
        known: Mapping[str, Connector] | None = None,
        ledger: LocalLedger = ledger,
        index: Any = index,
        vetting: Vetting | None = None,
    ) -> Router:
        return Router(
            index=index,
            ledger=ledger,
            policy=named_policy(policy),
            settings=routing or RoutingSettings(),
            pd=pd,
            connectors=known,
            random=Random(1).random,  # noqa: S311 - a test's dice
            clock=monotonic,
            on_lookup=lambda outcome, _: lookups.append(outcome),
            vetting=vetting,
        )

    return Bench(index, ledger, lookups, build)


def _instance(alias: str, role: Role = Role.MIXED) -> Instance:
    return Instance(
        id=InstanceId(f"http://{alias}:8000"),
        alias=alias,
        role=role,
        models=MODELS,
        connector="none" if role is Role.MIXED else "nixl",
        healthy=True,
    )


@pytest.fixture
def instance() -> Callable[..., Instance]:
    """Describes an instance of one rank."""
    return _instance


@pytest.fixture
def rank() -> Callable[[str], RankId]:
    """The one rank of the instance with this alias."""
    return lambda alias: RankId(InstanceId(f"http://{alias}:8000"), 0)


@pytest.fixture
def pair() -> Fleet:
    """Two mixed instances."""
    return Fleet(instances=(_instance("a"), _instance("b")))


@pytest.fixture
def pd_fleet() -> Fleet:
    """Two prefill instances and one that decodes."""
    return Fleet(
        instances=(
            _instance("p0", Role.PREFILL),
            _instance("p1", Role.PREFILL),
            _instance("d0", Role.DECODE),
        )
    )


@pytest.fixture
def ask() -> Callable[..., GenerateRequest]:
    """A chat, as far as routing looks at it."""

    def make(model: str = "m", body: Mapping[str, Any] | None = None) -> GenerateRequest:
        return GenerateRequest(
            request_id="r",
            endpoint=Endpoint.CHAT,
            body={"stream": True, **(body or {})},
            raw_body=b"{}",
            headers=(),
            model=model,
            base_model=model,
            lora=None,
        )

    return make


@pytest.fixture
def view() -> Callable[..., PromptView]:
    """A prompt of so many tokens; what begins elsewhere shares nothing with it."""

    def make(tokens: int = 4000, first: int = 0) -> PromptView:
        prompt = Prompt(Namespace(model="m"), range(first, first + tokens))
        return PromptView(prompts=(prompt,), source="ids")

    return make
