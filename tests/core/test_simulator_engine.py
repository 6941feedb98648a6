"""The scheduler of a simulated rank in virtual time."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.core.engine import EngineCore
from simulator.core.generation import FixedTokens
from simulator.core.settings import EngineSettings
from simulator.core.transfer import SideChannel, TransferDirectory
from simulator.core.types import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EngineRequest,
    KvEvent,
    StepResult,
    TokenOutput,
)

SETTINGS = EngineSettings(
    block_size=4,
    num_blocks=101,
    max_num_batched_tokens=64,
    prefill_tokens_per_s=1000.0,
    inter_token_ms=10.0,
)


class Bench:
    """A core with a clock that follows its steps."""

    def __init__(self, settings: EngineSettings = SETTINGS) -> None:
        self.now_s = 0.0
        self.events: list[KvEvent] = []
        self.outputs: list[TokenOutput] = []
        self.core = EngineCore(
            settings,
            none_hash=b"seed",
            channel=SideChannel(engine_id="engine", host="host", port=1),
            directory=TransferDirectory(),
        )

    def add(self, request_id: str, prompt: Sequence[int], **changes: Any) -> None:
        fields: dict[str, Any] = {
            "request_id": request_id,
            "prompt_token_ids": prompt,
            "sampler": FixedTokens(range(1000, 2000)),
            "max_tokens": 1,
        }
        self.core.add(EngineRequest(**(fields | changes)), self.now_s)

    def step(self) -> StepResult:
        result = self.core.step(self.now_s)
        self.now_s += result.duration_s
        self.events.extend(result.events)
        self.outputs.extend(result.outputs)
        return result

    def run(self) -> None:
        while self.core.has_work:
            self.step()

    def ask(self, request_id: str, prompt: Sequence[int], **changes: Any) -> TokenOutput:
        """Run one request to its end and return its last output."""
        self.add(request_id, prompt, **changes)
        self.run()
        return self.outputs[-1]

    def stored(self) -> list[BlockStored]:
        return [event for event in self.events if isinstance(event, BlockStored)]

    def removed(self) -> list[BlockRemoved]:
        return [event for event in self.events if isinstance(event, BlockRemoved)]


def change(**changes: Any) -> EngineSettings:
    return msgspec.structs.replace(SETTINGS, **changes)


@pytest.mark.parametrize(
    ("tokens", "cached"),
    [
        pytest.param(11, 8, id="below-a-boundary"),
        pytest.param(12, 8, id="at-a-boundary-the-last-token-is-computed"),
        pytest.param(13, 12, id="above-a-boundary"),
    ],
)
def test_repeated_prompt_hits_all_but_its_last_token(tokens: int, cached: int) -> None:
    """A hit is at most n - 1 tokens, floored to whole blocks."""
    bench = Bench()
    bench.ask("first", range(tokens))

    assert bench.ask("second", range(tokens)).cached_tokens == cached


def test_recomputed_last_block_is_a_second_copy() -> None:
    """A block-aligned prompt that is repeated announces its last block again."""
    bench = Bench()
    bench.ask("first", range(8))
    bench.ask("second", range(8))

    first, second = bench.stored()
    assert second.hashes == first.hashes[1:]
    assert second.parent == first.hashes[0]


def test_generated_tokens_fill_blocks_and_the_last_has_none() -> None:
    """Blocks of prompt and answer are announced; the token sampled last has no KV."""
    bench = Bench()
    bench.ask("a", range(6), max_tokens=6)

    assert [event.token_ids for event in bench.stored()] == [[0, 1, 2, 3], [4, 5, 1000, 1001]]
    assert bench.ask("b", [*range(6), *range(1000, 1006), 7]).cached_tokens == 8
    assert bench.ask("c", [*range(6), *range(1000, 1008)]).cached_tokens == 12


def test_long_prompt_is_computed_in_chunks() -> None:
    """A prompt beyond the budget takes several steps, each announcing the blocks it fills."""
    bench = Bench()
    bench.ask("a", range(150))

    assert [len(event.hashes) for event in bench.stored()] == [16, 16, 5]
    assert bench.now_s == pytest.approx(3 * 0.010 + 150 / 1000)


def test_decodes_go_on_while_a_prompt_is_computed() -> None:
    """One step serves running requests first and fills the rest with prompt tokens."""
    bench = Bench()
    bench.add("decoding", range(4), max_tokens=3)
    bench.step()
    bench.add("prompt", range(100, 200))

    result = bench.step()

    assert result.scheduled_tokens == 64
    assert [output.request_id for output in result.outputs] == ["decoding"]
    assert result.duration_s == pytest.approx(0.010 + 63 / 1000)


def test_seats_limit_how_many_run() -> None:
    """Beyond `max_num_seqs` a request waits until another has finished."""
    bench = Bench(change(max_num_seqs=1))
    bench.add("a", range(4), max_tokens=2)
    bench.add("b", range(4), max_tokens=2)
    bench.step()

    assert (bench.core.load().running, bench.core.load().waiting) == (1, 1)
    bench.run()
    assert [output.request_id for output in bench.outputs] == ["a", "a", "b", "b"]


def test_budget_spent_on_running_requests_admits_nobody() -> None:
    """When decodes and chunks use up the step, the queue waits."""
    bench = Bench(change(max_num_batched_tokens=2))
    bench.add("a", range(2), max_tokens=3)
    bench.step()
    bench.add("b", range(20, 24))
    bench.add("c", range(30, 34))

    assert bench.step().scheduled_tokens == 2
    assert bench.core.load().waiting == 1


def test_least_recently_used_blocks_go_first_and_tails_before_heads() -> None:
    """Eviction takes the oldest request's blocks from its end."""
    bench = Bench(change(num_blocks=7))
    bench.ask("old", range(8))
    bench.ask("new", range(100, 108))
    bench.ask("third", range(200, 216))

    old = bench.stored()[0]
    assert [event.hash for event in bench.removed()] == [old.hashes[1], old.hashes[0]]
    assert bench.ask("new again", [*range(100, 108), 1]).cached_tokens == 8


def test_a_request_that_finds_no_block_waits() -> None:
    """The head of the queue waits for blocks and nobody passes it."""
    bench = Bench(change(num_blocks=5))
    bench.add("a", range(12), max_tokens=3)
    bench.add("b", range(100, 108))
    bench.add("c", range(200, 202))
    bench.step()

    assert bench.core.load().waiting == 2
    bench.run()
    assert [output.request_id for output in bench.outputs if output.finish_reason] == [
        "a",
        "b",
        "c",
    ]


def test_the_last_admitted_gives_way_when_blocks_run_out() -> None:
    """It loses its blocks, waits again, and in the end says the same as if it hadn't."""
    bench = Bench(change(num_blocks=6))
    bench.add("a", range(8), max_tokens=6)
    bench.add("b", range(100, 108), max_tokens=6)
    bench.run()

    assert bench.core.statistics.preemptions > 0
    for request_id in ("a", "b"):
        tokens = [out.token_id for out in bench.outputs if out.request_id == request_id]
        assert tokens == list(range(1000, 1006))


def test_a_request_may_be_its_own_victim() -> None:
    """If the request that needs a block was admitted last, it is the one to wait."""
    bench = Bench(change(num_blocks=6))
    bench.add("a", range(13), max_tokens=2)
    bench.add("b", range(100, 104), max_tokens=2)
    bench.step()
    result = bench.step()

    assert [output.request_id for output in result.outputs] == ["a"]
    assert bench.core.load().waiting == 1
    bench.run()
    assert bench.core.statistics.finished == {"length": 2}


def test_step_without_work_takes_no_time() -> None:
    """An idle engine neither computes nor wakes by itself."""
    result = Bench().step()

    assert (result.duration_s, result.scheduled_tokens, result.wake_s) == (0.0, 0, None)


def test_end_of_text_stops_the_answer() -> None:
    """The end token is delivered with the reason and no stop token."""
    output = Bench().ask("a", range(4), sampler=FixedTokens([7]), max_tokens=9)

    assert (output.token_id, output.finish_reason, output.stop_reason) == (258, "stop", None)


def test_stop_token_stops_the_answer_and_is_named() -> None:
    """A listed id ends the answer and is the stop reason."""
    output = Bench().ask("a", range(4), max_tokens=9, stop_token_ids=frozenset({1002}))

    assert (output.token_id, output.finish_reason, output.stop_reason) == (1002, "stop", 1002)


def test_nothing_stops_before_min_tokens() -> None:
    """Stop tokens and the end count only from `min_tokens` on."""
    bench = Bench()
    output = bench.ask(
        "a", range(4), max_tokens=9, min_tokens=4, stop_token_ids=frozenset({1002, 1004})
    )

    assert output.token_id == 1004


def test_ignored_end_goes_on_to_the_limit() -> None:
    """With `ignore_eos` the answer is as long as allowed."""
    bench = Bench()
    output = bench.ask("a", range(4), sampler=FixedTokens([258]), max_tokens=3, ignore_eos=True)

    assert output.finish_reason == "length"
    assert len(bench.outputs) == 3


def test_context_limit_ends_the_answer() -> None:
    """Prompt and answer never exceed the context."""
    bench = Bench(change(max_model_len=8))
    bench.ask("a", range(5), max_tokens=100)

    assert len(bench.outputs) == 3


@pytest.mark.parametrize("steps", [0, 1], ids=["waiting", "running"])
def test_aborted_request_frees_its_blocks(steps: int) -> None:
    """A request can be dropped wherever it is; its cached blocks stay findable."""
    bench = Bench()
    bench.add("a", range(8), max_tokens=50)
    for _ in range(steps):
        bench.step()

    assert not bench.core.abort("unknown")
    assert bench.core.abort("a")
    assert not bench.core.has_work
    assert bench.core.load().cache_usage == 0
    assert not bench.core.abort("a")
    assert bench.core.statistics.finished == {"abort": 1}


def test_reset_is_told_with_the_next_step() -> None:
    """The clear comes before the stores of the next request; the old prefix is gone."""
    bench = Bench()
    bench.ask("a", range(8))
    assert bench.core.reset_prefix_cache()
    bench.events.clear()

    assert bench.ask("b", range(9)).cached_tokens == 0
    assert [type(event) for event in bench.events] == [AllBlocksCleared, BlockStored]


def test_events_can_be_off() -> None:
    """Without events nothing is told, and caching works all the same."""
    bench = Bench(change(events=False))
    bench.ask("a", range(8))

    assert bench.ask("b", range(9)).cached_tokens == 8
    assert bench.events == []


def test_requests_that_need_all_positions_skip_the_cache() -> None:
    """Nothing is read, everything is stored once more."""
    bench = Bench()
    bench.ask("a", range(9))

    assert bench.ask("b", range(9), reads_cache=False).cached_tokens == 0
    assert [len(event.hashes) for event in bench.stored()] == [2, 2]


def test_salts_and_adapters_do_not_share_blocks() -> None:
    """Equal tokens under another salt or adapter are other blocks (F08, F09)."""
    bench = Bench()
    bench.ask("plain", range(9))

    assert bench.ask("salted", range(9), cache_salt="s").cached_tokens == 0
    assert bench.ask("adapter", range(9), lora_name="l", lora_id=1).cached_tokens == 0
    assert bench.ask("both", range(9), lora_name="l", lora_id=1, cache_salt="s").cached_tokens == 0
    assert bench.ask("salted again", range(9), cache_salt="s").cached_tokens == 8
    assert [event.extra_keys for event in bench.stored()] == [
        (None, None),
        (("s",), None),
        (("l",), ("l",)),
        (("l", "s"), ("l",)),
    ]


@pytest.mark.parametrize(
    ("version", "announcements"),
    [pytest.param("0.25", 1, id="before"), pytest.param("0.26", 2, id="since-0.26")],
)
def test_full_report_announces_the_reused_prefix_again(version: str, announcements: int) -> None:
    """`kv_cache_report_mode` full repeats what is reused, without a new block."""
    bench = Bench(change(version=version))
    bench.ask("a", range(9))
    bench.ask("b", range(9), reports_full=True)

    assert [event.hashes for event in bench.stored()] == [bench.stored()[0].hashes] * announcements


def test_full_report_of_a_cold_prompt_repeats_nothing() -> None:
    """Nothing reused is nothing to repeat."""
    bench = Bench()
    bench.ask("a", range(9), reports_full=True)

    assert len(bench.stored()) == 1


def test_counters_split_prompts_into_cached_and_computed() -> None:
    """Queries and hits count tokens, once per request."""
    bench = Bench()
    bench.ask("a", range(9))
    bench.ask("b", range(9))

    counts = bench.core.statistics
    assert (counts.prefix_cache_queries_tokens, counts.prefix_cache_hits_tokens) == (18, 8)
    assert (counts.prompt_tokens, counts.computed_prompt_tokens) == (18, 10)
    assert counts.generation_tokens == 2


prompts = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=24), min_size=1, max_size=12)


@given(prompts, st.integers(9, 40))
def test_cached_tokens_are_what_the_events_promise(asked: list[list[int]], num_blocks: int) -> None:
    """Counting stores up and removals down predicts every serial hit exactly."""
    bench = Bench(change(num_blocks=num_blocks, max_model_len=32))
    held: dict[tuple[int, ...], int] = {}
    chain_of: dict[bytes | None, tuple[int, ...]] = {None: ()}
    for number, prompt in enumerate(asked):
        predicted = 0
        while predicted + 4 < len(prompt) and held.get(tuple(prompt[: predicted + 4]), 0) > 0:
            predicted += 4
        bench.events.clear()

        assert bench.ask(str(number), prompt, max_tokens=3).cached_tokens == predicted
        for event in bench.events:
            if isinstance(event, BlockStored):
                for index, block_hash in enumerate(event.hashes):
                    parent = event.hashes[index - 1] if index else event.parent
                    tokens = tuple(event.token_ids[index * 4 : index * 4 + 4])
                    chain_of[block_hash] = chain_of[parent] + tokens
                    held[chain_of[block_hash]] = held.get(chain_of[block_hash], 0) + 1
            elif isinstance(event, BlockRemoved):
                held[chain_of[event.hash]] -= 1


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 8)), min_size=1, max_size=8))
def test_everything_ends_and_gives_its_blocks_back(shapes: list[tuple[int, int]]) -> None:
    """However requests compete, each gets all its tokens and no block stays in use."""
    bench = Bench(change(num_blocks=8, max_model_len=28, max_num_batched_tokens=8))
    for number, (prompt_tokens, max_tokens) in enumerate(shapes):
        bench.add(str(number), range(number, number + prompt_tokens), max_tokens=max_tokens)
    bench.run()

    assert bench.core.load().cache_usage == 0
    for number, (_prompt_tokens, max_tokens) in enumerate(shapes):
        tokens = [out.token_id for out in bench.outputs if out.request_id == str(number)]
        assert tokens == list(range(1000, 1000 + max_tokens))
