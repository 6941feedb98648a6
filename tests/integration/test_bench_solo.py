"""Runs of one engine that go on from a checkpoint, beside the same runs from the start."""

import random

import pytest

from indexer.core.types import BlockKey
from kvlb.bench.calls import MODEL, Call, KeyedPrompt
from kvlb.bench.clock import VirtualClock
from kvlb.bench.engine import Job, VirtualEngine
from kvlb.bench.solo import Arrival, serve
from simulator.core.settings import EngineSettings

BLOCK = 16
SETTINGS = EngineSettings(
    model=MODEL,
    block_size=BLOCK,
    num_blocks=120,
    max_model_len=119 * BLOCK,
    max_num_batched_tokens=256,
    prefill_tokens_per_s=2000.0,
)
CALLS = 120


def arrivals(seed: int, pace: float) -> list[Arrival]:
    """Many continue an earlier one, or share its beginning; some come at the same moment."""
    chance = random.Random(seed)  # noqa: S311 - a workload
    chains: list[tuple[BlockKey, ...]] = []
    made: list[Arrival] = []
    now_s = 0.0
    for number in range(CALLS):
        now_s += chance.choice([0.0, chance.expovariate(pace)])
        begin = chance.choice(chains)[: chance.randrange(30)] if chains else ()
        prompt_tokens = len(begin) * BLOCK + chance.randrange(1, 120)
        output_tokens = chance.choice([1, 2, 30, 150])
        blocks = (prompt_tokens + output_tokens) // BLOCK
        own = (BlockKey(number * 1000 + block) for block in range(blocks))
        keys = tuple([*begin, *own][:blocks])
        chains.append(keys)
        prompt = KeyedPrompt(prompt_tokens, keys[: prompt_tokens // BLOCK], BLOCK)
        call = Call(at_s=now_s, prompt=prompt, keys=keys, output_tokens=output_tokens)
        made.append(Arrival(now_s, call))
    return made


def figures_on_a_shared_clock(calls: list[Arrival], numbers: list[int]) -> tuple[int, float, int]:
    """Uncached tokens and waited seconds, by an engine that runs until nothing is left."""
    clock = VirtualClock()
    engine = VirtualEngine(SETTINGS, clock, lambda _: None)
    jobs = []
    waited_s = 0.0

    def on_first(_: Job) -> None:
        nonlocal waited_s
        waited_s += clock.now_s

    for number in numbers:
        call = calls[number].call
        job = Job(
            keys=call.keys,
            prompt_tokens=call.prompt.tokens,
            output_tokens=call.output_tokens,
            on_first=on_first,
            on_end=lambda _: None,
        )
        waited_s -= calls[number].at_s
        jobs.append(job)
        clock.at(calls[number].at_s, lambda job=job: engine.submit(job))  # type: ignore[misc]
    clock.run()
    uncached = sum(job.prompt_tokens - (job.cached_tokens or 0) for job in jobs)
    return uncached, waited_s, engine.preemptions


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "pace",
    [pytest.param(0.5, id="idle"), pytest.param(6.0, id="busy"), pytest.param(40.0, id="full")],
)
def test_a_run_that_goes_on_is_that_from_the_start(seed: int, pace: float) -> None:
    """To the last bit, whichever calls are taken out or put in, again and again."""
    calls = arrivals(seed, pace)
    chance = random.Random(seed)  # noqa: S311 - moves
    numbers = [number for number in range(CALLS) if chance.random() < 0.7]
    kept = serve(SETTINGS, calls, numbers, every=10)
    begun = 0

    for _ in range(15):
        changed = sorted(chance.sample(range(CALLS), 3))
        numbers = sorted({*numbers} ^ {*changed})
        checkpoints = kept.before(changed[0])
        kept = serve(SETTINGS, calls, numbers, every=10, checkpoints=checkpoints)
        begun += bool(checkpoints)

        uncached, waited_s, _ = figures_on_a_shared_clock(calls, numbers)
        assert (kept.uncached_tokens, kept.ttft_s) == (uncached, waited_s)
    assert begun > 5


def test_the_calls_fill_the_memory() -> None:
    """What is compared above includes preemption."""
    calls = arrivals(0, 40.0)

    assert figures_on_a_shared_clock(calls, [*range(CALLS)])[2] > 10


def test_what_a_change_leaves_as_it_is() -> None:
    """A checkpoint before the changed call itself is one, since that comes behind it."""
    made = serve(SETTINGS, arrivals(0, 6.0), [*range(CALLS)], every=10)

    assert [each.number for each in made.checkpoints] == [*range(10, CALLS, 10)]
    assert [each.number for each in made.before(20)] == [10, 20]
    assert [each.number for each in made.before(19)] == [10]
