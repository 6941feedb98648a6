"""How deciding grows with ranks and prompts: `python -m benchmarks.decision` prints a markdown table.

From a prompt's packed tokens to the booked leg, index in memory: hashed, looked up in tables that real
events have filled, every rank's cost, chosen, booked. Each rank holds a random part of every
conversation, knows its capacity, and has legs in flight, of which the oldest ends after each decision.
No prompt is decided twice: each is a random part of a conversation, and tokens of its own from there on.
"""

import asyncio
import gc
import platform
from collections import deque
from time import monotonic, process_time

from balancer.core.fleet.snapshot import Fleet, Instance
from balancer.core.load.local_ledger import LocalLedger
from balancer.core.request import Endpoint, GenerateRequest, PromptView
from balancer.core.routing.policies import named_policy
from balancer.core.settings.routing import RoutingSettings
from balancer.routing.route import Route
from balancer.routing.router import Router
from benchmarks import index_workload
from benchmarks.index_workload import MODEL, draw_from, prompt_frames, prompt_of, prompt_tokens
from indexer.core.model_cards import ServedModels
from indexer.core.types import InstanceId
from kvlb.event_loop import spare_startup_objects

RANKS = (2, 16, 64, 256)
PROMPTS = (1_024, 8_192, 32_768, 131_072)
ROUNDS = 500
LEGS_PER_RANK = 4
CONVERSATIONS = 4
CAPACITY_TOKENS = 1_000_000
MODELS = ServedModels(base=MODEL, aliases=frozenset({MODEL}), adapters=frozenset(), cards=())


def fleet_of(ranks: int) -> Fleet:
    """One instance with so many ranks."""
    instance = Instance(
        id=InstanceId("http://engine:8000"),
        alias="engine",
        models=MODELS,
        ranks=tuple(range(ranks)),
        rank_cache_tokens=CAPACITY_TOKENS,
        healthy=True,
    )
    return Fleet(instances=(instance,))


async def measure_s(ranks: int, tokens: int) -> list[float]:
    """CPU seconds of each decision, least first."""
    engines, fleet, draw = index_workload.Fleet(ranks), fleet_of(ranks), draw_from(5)
    held = [prompt_tokens(tokens, seed=tokens + number) for number in range(CONVERSATIONS)]
    for number, ids in enumerate(held):
        for rank in engines.ranks:
            for frame in prompt_frames(ids[: draw.randrange(tokens + 1)], seed=number):
                await engines.write(rank, frame)
    router = Router(
        index=engines.index,
        ledger=LocalLedger(monotonic),
        policy=named_policy("kvlb"),
        settings=RoutingSettings(),
        random=draw.random,
        clock=monotonic,
    )
    request = GenerateRequest(
        request_id="r",
        endpoint=Endpoint.COMPLETIONS,
        body={"max_tokens": 64},
        raw_body=b"",
        headers=(),
        model=MODEL,
        base_model=MODEL,
        lora=None,
    )
    legs: deque[Route] = deque()
    taken_s = []
    spare_startup_objects()
    for number in range(ROUNDS + LEGS_PER_RANK * ranks):
        begun = draw.choice(held)[: draw.randrange(tokens)]
        own = prompt_tokens(tokens - len(begun), seed=-1 - number)
        view = PromptView(prompts=(prompt_of(begun + own),), source="ids")
        started_s = process_time()
        legs.append(await router.route(fleet, request, view))
        taken_s.append(process_time() - started_s)
        legs[-1].decode_guard.first_token()
        if number >= LEGS_PER_RANK * ranks:
            ended = legs.popleft()
            ended.decode_guard.generated(64)
            ended.__exit__(None, None, None)
    gc.unfreeze()
    return sorted(taken_s[-ROUNDS:])


def main() -> None:
    """Print the table."""
    print("| ranks | prompt tokens | CPU p50, ms | CPU p99, ms |")
    print("| ---: | ---: | ---: | ---: |")
    for ranks in RANKS:
        for tokens in PROMPTS:
            taken_s = asyncio.run(measure_s(ranks, tokens))
            p50, p99 = (1e3 * taken_s[int(share * ROUNDS)] for share in (0.5, 0.99))
            print(f"| {ranks} | {tokens:,} | {p50:.2f} | {p99:.2f} |", flush=True)
    print(f"\nPython {platform.python_version()}, {platform.machine()}.")


if __name__ == "__main__":
    main()
