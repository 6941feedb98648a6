"""The fast virtual engine beside the simulator's engine core, which computes every step."""

import asyncio
import random
from array import array
from dataclasses import dataclass, field

import pytest

from benchmarks.routing import virtual_time
from indexer.core.events import decode_batch
from indexer.core.index import BlocksDropped, BlocksHeld, Change, Prompt
from indexer.core.rank_blocks import RankBlocks
from indexer.core.types import BlockKey, InstanceId, RankId
from kvlb.bench.calls import MODEL, NAMESPACE
from kvlb.bench.clock import VirtualClock
from kvlb.bench.engine import Job, VirtualEngine
from simulator.core.engine import EngineCore
from simulator.core.generation import FixedTokens
from simulator.core.settings import EngineSettings
from simulator.core.transfer import SideChannel, TransferDirectory
from simulator.core.types import EngineRequest, KvEvent, TokenOutput
from simulator.core.wire import EventEncoder


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request."""

    at_s: float
    prompt: "array[int]"
    answer: "array[int]"


@dataclass(kw_only=True)
class Seen:
    """What an engine did: first and last tokens with their times, hits, and its cache over time."""

    firsts: dict[int, float] = field(default_factory=dict)
    ends: dict[int, float] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)
    held: list[tuple[float, frozenset[BlockKey]]] = field(default_factory=list)
    preemptions: int = 0
    steps: int = 0

    def change(self, now_s: float, changes: list[Change]) -> None:
        held = set(self.held[-1][1] if self.held else ())
        for change in changes:
            if isinstance(change, BlocksHeld):
                held.update(change.keys)
            elif isinstance(change, BlocksDropped):
                held.difference_update(change.keys)
        if not self.held or held != self.held[-1][1]:
            self.held.append((now_s, frozenset(held)))


def asks(seed: int, count: int, pace: float) -> list[Ask]:
    """Requests of which many continue an earlier one, answer included, or share its beginning."""
    chance = random.Random(seed)  # noqa: S311 - a workload
    made: list[Ask] = []
    now_s = 0.0

    def tokens(number: int) -> "array[int]":
        return array("I", (chance.randrange(1000, 9000) for _ in range(number)))

    for _ in range(count):
        now_s += chance.expovariate(pace)
        begin = array("I")
        if made and chance.random() < 0.7:
            earlier = chance.choice(made)
            begin = earlier.prompt + earlier.answer
            begin = begin[: chance.choice([len(begin), chance.randrange(len(begin))])]
        begin = begin[:500]
        prompt = begin + tokens(chance.randrange(1, 120))
        if made and chance.random() < 0.05:
            prompt = made[-1].prompt
        made.append(Ask(at_s=now_s, prompt=prompt, answer=tokens(chance.choice([1, 2, 30, 150]))))
    return made


def run_core(settings: EngineSettings, requests: list[Ask]) -> Seen:
    """Step by step, events on the wire and all."""
    clock = virtual_time.VirtualClock()
    seen = Seen()
    blocks = RankBlocks(rank=RankId(InstanceId("e"), 0), model=MODEL, epoch=1)
    encoder = EventEncoder(settings.release)
    seqs = iter(range(10**9))

    def publish(events: list[KvEvent]) -> None:
        payload = encoder.encode_batch(events, unix_s=clock.now_s, rank=0)
        update = blocks.apply(next(seqs), decode_batch(payload))
        seen.change(clock.now_s, list(update.changes))

    core = EngineCore(
        settings,
        none_hash=b"",
        channel=SideChannel(engine_id="e", host="e", port=1),
        directory=TransferDirectory(),
    )
    rank = virtual_time.VirtualRank(core, clock, publish)

    def send(number: int, ask: Ask) -> None:
        def on_output(output: TokenOutput) -> None:
            seen.firsts.setdefault(number, clock.now_s)
            if output.finish_reason is not None:
                seen.ends[number] = clock.now_s
                seen.cached[number] = output.cached_tokens

        request = EngineRequest(
            request_id=f"r{number}",
            prompt_token_ids=ask.prompt,
            sampler=FixedTokens(ask.answer),
            max_tokens=len(ask.answer),
            ignore_eos=True,
        )
        clock.at(ask.at_s, lambda: rank.submit(request, on_output))

    for number, ask in enumerate(requests):
        send(number, ask)
    asyncio.run(clock.run())
    seen.preemptions = core.statistics.preemptions
    seen.steps = core.statistics.steps
    return seen


def run_fast(settings: EngineSettings, requests: list[Ask]) -> Seen:
    """The same by `VirtualEngine`."""
    clock = VirtualClock()
    seen = Seen()
    engine = VirtualEngine(settings, clock, lambda changes: seen.change(clock.now_s, changes))

    def send(number: int, ask: Ask) -> None:
        def on_first(job: Job) -> None:
            seen.firsts[number] = clock.now_s

        def on_end(job: Job) -> None:
            seen.ends[number] = clock.now_s
            seen.cached[number] = job.cached_tokens or 0

        job = Job(
            keys=Prompt(NAMESPACE, ask.prompt + ask.answer).keys(settings.block_size),
            prompt_tokens=len(ask.prompt),
            output_tokens=len(ask.answer),
            on_first=on_first,
            on_end=on_end,
        )
        clock.at(ask.at_s, lambda: engine.submit(job))

    for number, ask in enumerate(requests):
        send(number, ask)
    clock.run()
    seen.preemptions = engine.preemptions
    return seen


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("pace", "num_blocks", "max_num_seqs", "block_size"),
    [
        pytest.param(2.0, 200, 64, 16, id="idle"),
        pytest.param(20.0, 120, 64, 16, id="memory full"),
        pytest.param(8.0, 120, 64, 16, id="memory nearly full"),
        pytest.param(20.0, 1000, 4, 16, id="seats taken"),
        pytest.param(20.0, 60, 64, 64, id="large blocks"),
    ],
)
def test_every_moment_is_that_of_the_engine_core(
    seed: int, pace: float, num_blocks: int, max_num_seqs: int, block_size: int
) -> None:
    """To the last bit: times, hits, preemptions, and what the cache holds when."""
    settings = EngineSettings(
        model=MODEL,
        block_size=block_size,
        num_blocks=num_blocks,
        max_model_len=(num_blocks - 1) * block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=256,
        prefill_tokens_per_s=2000.0,
    )
    requests = asks(seed, 120, pace)

    core, fast = run_core(settings, requests), run_fast(settings, requests)

    assert len(core.ends) == len(requests)
    assert fast.firsts == core.firsts
    assert fast.ends == core.ends
    assert fast.cached == core.cached
    assert fast.preemptions == core.preemptions
    assert fast.held == core.held


def test_full_memory_makes_requests_give_way() -> None:
    """What is compared above includes preemption."""
    settings = EngineSettings(
        model=MODEL,
        block_size=16,
        num_blocks=120,
        max_model_len=119 * 16,
        max_num_batched_tokens=256,
        prefill_tokens_per_s=2000.0,
    )

    assert run_fast(settings, asks(0, 120, 20.0)).preemptions > 10
