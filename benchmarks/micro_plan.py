"""How long a plan takes: `python -m benchmarks.micro_plan` prints a markdown table.

A plan here is everything between the index's answer and the booking: candidates with their loads
and predictions, estimates of both ways and sorts. Prompts have 4,096 tokens; a tenth of the ranks hold
some of it, and every rank has legs in flight.
"""

import platform
import random
from statistics import median
from time import process_time

from balancer.core.fleet.snapshot import Instance, Role
from balancer.core.load.ledger import LegWork
from balancer.core.load.local_ledger import LocalLedger
from balancer.core.routing.candidates import CandidateSource, PromptMatches
from balancer.core.routing.cost import RequestShape
from balancer.core.routing.planner import Planner
from balancer.core.routing.policies import LeastCost, seeded_draw
from balancer.core.routing.prefill_policy import SplitFacts
from balancer.core.settings.routing import PdSettings
from indexer.core.hashing import Namespace
from indexer.core.index import PrefixMatch, Prompt
from indexer.core.model_cards import ServedModels
from indexer.core.types import InstanceId, RankId, Tier, Trust

ROUNDS = 300
PROMPT_TOKENS = 4096
BLOCK_SIZE = 16
SIZES = ((2, 2), (8, 8), (64, 64))

MODELS = ServedModels(base="m", aliases=frozenset({"m"}), adapters=frozenset(), cards=())


def instances(count: int, role: Role) -> list[Instance]:
    """`count` available instances of one rank each."""
    return [
        Instance(
            id=InstanceId(f"http://{role}-{number}:8000"),
            alias=f"{role}{number}",
            role=role,
            models=MODELS,
            connector="nixl",
            healthy=True,
        )
        for number in range(count)
    ]


def measure_plan_s(prefill_count: int, decode_count: int) -> float:
    """Median CPU seconds of one plan."""
    chance = random.Random(7)  # noqa: S311 - a benchmark's workload
    now_s = 0.0
    ledger = LocalLedger(clock=lambda: now_s)
    prefill, decode = (
        instances(prefill_count, Role.PREFILL),
        instances(decode_count, Role.DECODE),
    )
    ranks = [RankId(each.id, 0) for each in (*prefill, *decode)]
    prompt = Prompt(Namespace(model="m"), range(PROMPT_TOKENS))
    for rank in ranks:
        for _ in range(4):
            ledger.hold(
                LegWork(
                    rank=rank,
                    kind="whole",
                    prompt_tokens=PROMPT_TOKENS,
                    uncached_tokens=chance.randrange(PROMPT_TOKENS),
                    work_s=0.1,
                    keys=prompt.keys(BLOCK_SIZE)[: chance.randrange(256)],
                )
            )
    matches = PromptMatches(
        prompts=(prompt,),
        by_rank=(
            {
                rank: PrefixMatch(
                    tokens_by_tier={Tier.GPU: chance.choice([0] * 9 + [2048])},
                    block_size=BLOCK_SIZE,
                    trust=Trust.EXACT,
                    epoch=1,
                )
                for rank in ranks
            },
        ),
        block_sizes=dict.fromkeys(ranks, BLOCK_SIZE),
    )
    source = CandidateSource(matches=matches, ledger=ledger)
    planner = Planner(policy=LeastCost(), pd=PdSettings(), transfer=ledger.transfer)
    shape = RequestShape(prompt_tokens=PROMPT_TOKENS)
    facts = SplitFacts(prompt_tokens=PROMPT_TOKENS, rates_known=True)
    seconds: list[float] = []
    for number in range(ROUNDS):
        now_s += 0.001
        started_s = process_time()
        planner.plan(
            shape,
            facts,
            source.load_answering(decode, frozenset()),
            source.load(prefill, frozenset())[0],
            seeded_draw(number),
        )
        seconds.append(process_time() - started_s)
    return median(seconds)


def main() -> None:
    """Print the table."""
    print("| prefill + decode ranks | one plan, median ms of CPU |")
    print("| --- | --- |")
    for prefill_count, decode_count in SIZES:
        plan_s = measure_plan_s(prefill_count, decode_count)
        print(f"| {prefill_count} + {decode_count} | {plan_s * 1000:.3f} |")
    print(f"\nPython {platform.python_version()}, {platform.machine()}.")


if __name__ == "__main__":
    main()
