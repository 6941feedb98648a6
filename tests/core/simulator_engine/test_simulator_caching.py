"""What a simulated rank finds in its cache, and what its events and counters say of it."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.core.settings import EngineSettings
from simulator.core.types import AllBlocksCleared, BlockRemoved, BlockStored

MakeBench = Callable[..., Any]
Change = Callable[..., EngineSettings]


def test_reset_is_told_with_the_next_step(make_bench: MakeBench) -> None:
    """The clear comes before the stores of the next request; the old prefix is gone."""
    bench = make_bench()
    bench.ask("a", range(8))
    assert bench.core.reset_prefix_cache()
    bench.events.clear()

    assert bench.ask("b", range(9)).cached_tokens == 0
    assert [type(event) for event in bench.events] == [AllBlocksCleared, BlockStored]


def test_events_can_be_off(make_bench: MakeBench, change: Change) -> None:
    """Without events nothing is told, and caching works all the same."""
    bench = make_bench(change(events=False))
    bench.ask("a", range(8))

    assert bench.ask("b", range(9)).cached_tokens == 8
    assert bench.events == []


def test_requests_that_need_all_positions_skip_the_cache(make_bench: MakeBench) -> None:
    """Nothing is read, everything is stored once more."""
    bench = make_bench()
    bench.ask("a", range(9))

    assert bench.ask("b", range(9), reads_cache=False).cached_tokens == 0
    assert [len(event.hashes) for event in bench.stored()] == [2, 2]


def test_salts_and_adapters_do_not_share_blocks(make_bench: MakeBench) -> None:
    """Equal tokens under another salt or adapter are other blocks (F08, F09)."""
    bench = make_bench()
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
def test_full_report_announces_the_reused_prefix_again(
    version: str, announcements: int, make_bench: MakeBench, change: Change
) -> None:
    """`kv_cache_report_mode` full repeats what is reused, without a new block."""
    bench = make_bench(change(version=version))
    bench.ask("a", range(9))
    bench.ask("b", range(9), reports_full=True)

    assert [event.hashes for event in bench.stored()] == [bench.stored()[0].hashes] * announcements


def test_full_report_of_a_cold_prompt_repeats_nothing(make_bench: MakeBench) -> None:
    """Nothing reused is nothing to repeat."""
    bench = make_bench()
    bench.ask("a", range(9), reports_full=True)

    assert len(bench.stored()) == 1


def test_counters_split_prompts_into_cached_and_computed(make_bench: MakeBench) -> None:
    """Queries and hits count tokens, once per request."""
    bench = make_bench()
    bench.ask("a", range(9))
    bench.ask("b", range(9))

    counts = bench.core.statistics
    assert (counts.prefix_cache_queries_tokens, counts.prefix_cache_hits_tokens) == (18, 8)
    assert (counts.prompt_tokens, counts.computed_prompt_tokens) == (18, 10)
    assert counts.generation_tokens == 2


prompts = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=24), min_size=1, max_size=12)


@given(prompts, st.integers(9, 40))
def test_cached_tokens_are_what_the_events_promise(
    make_bench: MakeBench, change: Change, asked: list[list[int]], num_blocks: int
) -> None:
    """Counting stores up and removals down predicts every serial hit exactly."""
    bench = make_bench(change(num_blocks=num_blocks, max_model_len=32))
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
