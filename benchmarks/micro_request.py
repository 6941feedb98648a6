"""What deciding costs per request: `python -m benchmarks.micro_request` prints two markdown tables.

Deciding is all that lies between a decoded body and the leg on its way, and what its end books: the
prompt's tokens, its keys, the lookup, the plan, the booking, the report on the index. Two mixed
instances with events, prompts as in `benchmarks.overhead`, eight requests in flight. The second table
has the booking alone, beside a plain count of block keys.
"""

import asyncio
import gc
import json
import platform
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from time import process_time

from balancer.core.fleet.snapshot import Fleet, Instance
from balancer.core.http.generate import read_generate
from balancer.core.load.chain_tree import ChainTree
from balancer.core.load.local_ledger import LocalLedger
from balancer.core.prompt.known_ids import IdTexts
from balancer.core.record import LegRecord
from balancer.core.request import Endpoint, GenerateRequest, PromptView
from balancer.core.routing.policies import named_policy
from balancer.core.settings.control import TokensSettings
from balancer.core.settings.routing import PolicyName, RoutingSettings
from balancer.routing.reporting import Reporting
from balancer.routing.route import Route
from balancer.routing.router import Router
from balancer.tokens.pool import TokenPool
from balancer.tokens.reader import PromptReader
from benchmarks.overhead.engine import (
    MODEL,
    PROMPTS,
    SHORT_PROMPT_TOKENS,
    held_tokens,
    long_prompts,
)
from indexer.core.hashing import Namespace
from indexer.core.index import BlocksHeld, GroupKind, GroupSpec, Prompt, RankUpdate
from indexer.core.model_cards import ServedModels
from indexer.core.types import BlockKey, InstanceId, RankId, Tier
from indexer.memory_index import MemoryIndex

BLOCK_SIZE = 16
IN_FLIGHT = 8
ROUNDS = 200
FLEET = Fleet(
    instances=tuple(
        Instance(
            id=InstanceId(f"http://engine-{number}:8000"),
            alias=f"engine{number}",
            models=ServedModels(
                base=MODEL, aliases=frozenset({MODEL}), adapters=frozenset(), cards=()
            ),
            healthy=True,
        )
        for number in range(2)
    )
)


@dataclass(slots=True)
class Stages:
    """CPU seconds of every round, by stage."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    started_s: float = 0.0

    def start(self) -> None:
        self.started_s = process_time()

    def end(self, stage: str) -> None:
        now_s = process_time()
        self.seconds.setdefault(stage, []).append(now_s - self.started_s)
        self.started_s = process_time()

    def micros(self) -> dict[str, float]:
        """Per request, of a quiet round: a tenth of them took no longer."""
        return {
            stage: sorted(each)[len(each) // 10] / IN_FLIGHT * 1e6
            for stage, each in self.seconds.items()
        }


class Bench:
    """One policy before two engines."""

    def __init__(self, policy: PolicyName, prompts: Sequence[Sequence[int]]) -> None:
        self.ledger = LocalLedger(process_time)
        self.index = MemoryIndex()
        self.prompts = prompts
        self.router = Router(
            index=self.index,
            ledger=self.ledger,
            policy=named_policy(policy),
            settings=RoutingSettings(),
            random=lambda: 0.5,
            clock=process_time,
        )
        no_tokenizers = TokenPool({}, workers=1, cache_bytes=0, strftime_now=lambda _: "")
        self.reader = PromptReader(
            settings=TokensSettings(), pool=no_tokenizers, engine=None, clock=process_time
        )
        self.reporting = Reporting(None, clock=process_time, on_outcome=lambda _leg, _outcome: None)
        self.bodies = [
            json.dumps({"model": MODEL, "prompt": each, "max_tokens": 16}).encode()
            for each in prompts
        ]

    async def fill(self) -> None:
        """What each engine holds of the prompts."""
        group = GroupSpec(group=0, kind=GroupKind.FULL, block_size=BLOCK_SIZE)
        for engine, instance in enumerate(FLEET.instances):
            held = [
                BlocksHeld(0, Tier.GPU, Prompt(Namespace(model=MODEL), prompt[:tokens]).keys(16))
                for number, prompt in enumerate(self.prompts)
                if (tokens := held_tokens(number, prompt, engine))
            ]
            await self.index.apply(
                RankUpdate(
                    rank=RankId(instance.id, 0),
                    model=MODEL,
                    epoch=1,
                    seq=0,
                    changes=[group, *held],
                )
            )

    async def round(self, number: int, stages: Stages) -> None:
        """Some requests, each stage of all of them before the next."""
        first = number * IN_FLIGHT
        bodies = [self.bodies[(first + each) % PROMPTS] for each in range(IN_FLIGHT)]
        stages.start()
        requests = [_read(body, self.reader.texts) for body in bodies]
        stages.end("decode the body")
        views = [await self.reader.read(FLEET, each) for each in requests]
        stages.end("pack the tokens")
        for view in views:
            view.prompts[0].keys(BLOCK_SIZE)
        stages.end("hash the blocks")
        for view in views:
            await self.index.match(view.prompts[0])
        stages.end("look them up")
        asked = list(zip(requests, views, strict=True))
        for request, view in asked:
            await self.router.explain(FLEET, request, view)
        stages.end("look up, plan")
        routes = [await self.router.route(FLEET, request, view) for request, view in asked]
        stages.end("look up, plan, book")
        for route, view in zip(routes, views, strict=True):
            self._finish(route, view)
        stages.end("report, end")

    def _finish(self, route: Route, view: PromptView) -> None:
        chosen = route.plan.decode.candidate
        leg = LegRecord(
            kind="decode",
            alias=chosen.instance.alias,
            overlap_tokens=chosen.predicted_tokens,
            started_s=0.0,
            prompt_tokens=view.prompt_tokens,
            cached_tokens=chosen.overlap_tokens,
            completion_tokens=16,
        )
        self.reporting.on_leg_end(route.forecast("decode", loads=False), leg)
        route.decode_guard.generated(16)
        route.decode_guard.cached(chosen.overlap_tokens)
        route.__exit__(None, None, None)


def _read(body: bytes, texts: IdTexts) -> GenerateRequest:
    return read_generate(Endpoint.COMPLETIONS, body, FLEET, request_id="r", texts=texts)


async def measure_stages(policy: PolicyName, prompts: Sequence[Sequence[int]]) -> dict[str, float]:
    """Microseconds of CPU per request, by stage."""
    bench, stages = Bench(policy, prompts), Stages()
    await bench.fill()
    gc.collect()
    gc.freeze()  # as the command does once it has started
    for number in range(ROUNDS):
        await bench.round(number, stages)
    micros = stages.micros()
    looked_up, planned, booked = (
        micros.pop(name) for name in ("look them up", "look up, plan", "look up, plan, book")
    )
    ending = micros.pop("report, end")
    return micros | {
        "look them up": looked_up,
        "plan": planned - looked_up,
        "book": booked - planned,
        "report, end": ending,
    }


def measure_booking(book: Callable[[Sequence[Sequence[BlockKey]]], None], blocks: int) -> float:
    """Microseconds to take a prompt in and out, of which half is shared with many others."""
    shared = [BlockKey(number) for number in range(blocks // 2)]
    chains = [
        [*shared, *(BlockKey((1 + chain) << 32 | each) for each in range(blocks // 2))]
        for chain in range(64)
    ]
    seconds = []
    for _ in range(20):
        started_s = process_time()
        book(chains)
        seconds.append(process_time() - started_s)
    return min(seconds) / len(chains) * 1e6


def book_chains(chains: Sequence[Sequence[BlockKey]]) -> None:
    """As the ledger does."""
    tree = ChainTree({}, RankId(InstanceId("http://e0:8000"), 0))
    for end in [tree.add(each) for each in chains]:
        tree.drop(end)


def count_keys(chains: Sequence[Sequence[BlockKey]]) -> None:
    """One counter of keys, in C where it can be."""
    counts: Counter[BlockKey] = Counter()
    for each in chains:
        counts.update(each)
    for each in chains:
        counts.subtract(each)


def _run(work: Awaitable[dict[str, float]]) -> dict[str, float]:
    async def wait() -> dict[str, float]:
        return await work

    return asyncio.run(wait())


def main() -> None:
    """Print the tables."""
    short = [
        [number * 100 + each for each in range(SHORT_PROMPT_TOKENS)] for number in range(PROMPTS)
    ]
    plain = _run(measure_stages("round_robin", short))
    full = _run(measure_stages("kvlb", long_prompts()))
    print("| CPU µs per request | round_robin, 16 token ids | kvlb, 4,000 token ids |")
    print("| --- | ---: | ---: |")
    for stage in plain:
        print(f"| {stage} | {plain[stage]:.1f} | {full[stage]:.1f} |")
    print(f"| all | {sum(plain.values()):.1f} | {sum(full.values()):.1f} |")
    print("\n| µs to book a prompt, in and out | as chains | as counted keys |")
    print("| --- | ---: | ---: |")
    for blocks in (250, 6_250):
        chains, keys = (measure_booking(each, blocks) for each in (book_chains, count_keys))
        print(f"| {blocks:,} blocks, half of them shared | {chains:.1f} | {keys:.1f} |")
    print(f"\nPython {platform.python_version()}, {platform.machine()}.")


if __name__ == "__main__":
    main()
