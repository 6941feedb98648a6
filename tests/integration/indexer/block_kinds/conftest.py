"""Two engines, an indexer that follows them, a router that reads what it wrote, and blocks of all kinds."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from random import Random
from time import monotonic
from typing import Any

import pytest

from balancer.core.fleet.snapshot import Fleet, Instance
from balancer.core.load.local_ledger import LocalLedger
from balancer.core.request import Endpoint, GenerateRequest, PromptView
from balancer.core.routing.plan import Candidate
from balancer.core.routing.policies import named_policy
from balancer.core.settings.routing import RoutingSettings
from balancer.routing.router import Router
from indexer.config import InstanceSource
from indexer.core.hashing import Namespace
from indexer.core.index import Prompt
from indexer.core.model_cards import ServedModels
from indexer.core.types import InstanceId, RankId, Trust

SIZE = 16
E0, E1 = "http://e0:8000", "http://e1:8000"
R0, R1 = RankId(InstanceId(E0), 0), RankId(InstanceId(E1), 0)
MODELS = ServedModels(
    base="tiny", aliases=frozenset({"tiny"}), adapters=frozenset({"ad1", "ad2"}), cards=()
)


class Bench:
    """Two engines, an indexer that follows them, and a router that reads what it wrote."""

    def __init__(self, engines: Sequence[Any], service: Any, index: Any, ranks: int) -> None:
        self.engines = engines
        self.service = service
        self._router = Router(
            index=index,
            ledger=LocalLedger(monotonic),
            policy=named_policy("kvlb"),
            settings=RoutingSettings(lookup_timeout_s=5.0),
            random=Random(1).random,  # noqa: S311 - a test's dice
            clock=monotonic,
        )
        self._fleet = Fleet(
            instances=tuple(
                Instance(
                    id=InstanceId(url),
                    alias=url[7:9],
                    models=MODELS,
                    ranks=tuple(range(4, 4 + ranks)) if ranks > 1 else (0,),
                    rank_base=4 if ranks > 1 else 0,
                    healthy=True,
                )
                for url in (E0, E1)
            )
        )

    async def publish(self, *events: Any, on: int = 0) -> None:
        """Let one engine publish a batch, and wait until the index has it."""
        seq = self.engines[on].publish(*events)
        await self.service.caught_up((R0, R1)[on], seq)

    def trust(self, on: int = 0) -> Trust:
        trust: Trust = self.service.rank_status((R0, R1)[on]).trust
        return trust

    async def ask(
        self,
        tokens: Sequence[int],
        *,
        lora: str | None = None,
        salt: str | None = None,
        creditable_tokens: int | None = None,
    ) -> tuple[RankId, Mapping[RankId, Candidate]]:
        """The rank a prompt would go to, and every candidate."""
        request = GenerateRequest(
            request_id="r",
            endpoint=Endpoint.COMPLETIONS,
            body={},
            raw_body=b"{}",
            headers=(),
            model=lora or "tiny",
            base_model="tiny",
            lora=lora,
        )
        namespace = Namespace(model="tiny", lora=lora, cache_salt=salt)
        prompt = Prompt(namespace, tokens, creditable_tokens=creditable_tokens)
        plan = await self._router.explain(
            self._fleet, request, PromptView(prompts=(prompt,), source="ids")
        )
        considered = {each.candidate.rank: each.candidate for each in plan.considered}
        return plan.decode.candidate.rank, considered

    async def overlap(self, tokens: Sequence[int], rank: RankId = R0, **more: Any) -> int:
        """Tokens that `rank` is credited with; whoever is credited with most is chosen."""
        chosen, candidates = await self.ask(tokens, **more)
        most = max(each.overlap_tokens for each in candidates.values())
        assert candidates[chosen].overlap_tokens == most
        return candidates[rank].overlap_tokens


Benching = Callable[..., AbstractAsyncContextManager[Bench]]


@pytest.fixture
def benching(publishing: Any, indexing: Any) -> Benching:
    """Make a bench that works inside `async with`."""

    @asynccontextmanager
    async def run(**settings: Any) -> AsyncIterator[Bench]:
        async with publishing() as first, publishing() as second:
            sources = [
                InstanceSource(
                    url=url, events=each.events, replay=each.replay, model="tiny", ranks=1
                )
                for url, each in ((E0, first), (E1, second))
            ]
            async with indexing(*sources, **settings) as (service, index):
                for rank, each in ((R0, first), (R1, second)):
                    await each.subscribed()
                    await service.until(rank, lambda now: now.trust is Trust.EXACT)
                yield Bench((first, second), service, index, ranks=1)

    return run


@pytest.fixture
def make_bench() -> Callable[..., Bench]:
    """For a test that runs its own indexer."""
    return Bench


def _tokens(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))


@pytest.fixture
def tokens() -> Callable[..., list[int]]:
    """The prompt 0, 1, 2, ..., or a part of it."""
    return _tokens


def _stored(
    *hashes: int | bytes,
    parent: int | bytes | None = None,
    first: int = 0,
    size: int = SIZE,
    **more: Any,
) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": _tokens(len(hashes) * size, first * size),
        "block_size": size,
        "medium": "GPU",
        **more,
    }


@pytest.fixture
def stored() -> Callable[..., dict[str, Any]]:
    """Blocks number `first` and on of the prompt 0, 1, 2, ..."""
    return _stored


@pytest.fixture
def copied() -> Callable[..., dict[str, Any]]:
    """A placeholder: a copy of known blocks, without tokens."""

    def event(*hashes: int, medium: str) -> dict[str, Any]:
        return _stored(*hashes, token_ids=[], block_size=0, medium=medium)

    return event


@pytest.fixture
def removed() -> Callable[..., dict[str, Any]]:
    """These blocks left."""

    def event(*hashes: int, **more: Any) -> dict[str, Any]:
        return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU", **more}

    return event
