"""What a simulated rank computes and in which order: chunks, seats, blocks, victims."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.core.settings import EngineSettings

MakeBench = Callable[..., Any]
Change = Callable[..., EngineSettings]


@pytest.mark.parametrize(
    ("tokens", "cached"),
    [
        pytest.param(11, 8, id="below-a-boundary"),
        pytest.param(12, 8, id="at-a-boundary-the-last-token-is-computed"),
        pytest.param(13, 12, id="above-a-boundary"),
    ],
)
def test_repeated_prompt_hits_all_but_its_last_token(
    tokens: int, cached: int, make_bench: MakeBench
) -> None:
    """A hit is at most n - 1 tokens, floored to whole blocks."""
    bench = make_bench()
    bench.ask("first", range(tokens))

    assert bench.ask("second", range(tokens)).cached_tokens == cached


def test_recomputed_last_block_is_a_second_copy(make_bench: MakeBench) -> None:
    """A block-aligned prompt that is repeated announces its last block again."""
    bench = make_bench()
    bench.ask("first", range(8))
    bench.ask("second", range(8))

    first, second = bench.stored()
    assert second.hashes == first.hashes[1:]
    assert second.parent == first.hashes[0]


def test_generated_tokens_fill_blocks_and_the_last_has_none(make_bench: MakeBench) -> None:
    """Blocks of prompt and answer are announced; the token sampled last has no KV."""
    bench = make_bench()
    bench.ask("a", range(6), max_tokens=6)

    assert [event.token_ids for event in bench.stored()] == [[0, 1, 2, 3], [4, 5, 1000, 1001]]
    assert bench.ask("b", [*range(6), *range(1000, 1006), 7]).cached_tokens == 8
    assert bench.ask("c", [*range(6), *range(1000, 1008)]).cached_tokens == 12


def test_long_prompt_is_computed_in_chunks(make_bench: MakeBench) -> None:
    """A prompt beyond the budget takes several steps, each announcing the blocks it fills."""
    bench = make_bench()
    bench.ask("a", range(150))

    assert [len(event.hashes) for event in bench.stored()] == [16, 16, 5]
    assert bench.now_s == pytest.approx(3 * 0.010 + 150 / 1000)


def test_decodes_go_on_while_a_prompt_is_computed(make_bench: MakeBench) -> None:
    """One step serves running requests first and fills the rest with prompt tokens."""
    bench = make_bench()
    bench.add("decoding", range(4), max_tokens=3)
    bench.step()
    bench.add("prompt", range(100, 200))

    result = bench.step()

    assert result.scheduled_tokens == 64
    assert [output.request_id for output in result.outputs] == ["decoding"]
    assert result.duration_s == pytest.approx(0.010 + 63 / 1000)


def test_seats_limit_how_many_run(make_bench: MakeBench, change: Change) -> None:
    """Beyond `max_num_seqs` a request waits until another has finished."""
    bench = make_bench(change(max_num_seqs=1))
    bench.add("a", range(4), max_tokens=2)
    bench.add("b", range(4), max_tokens=2)
    bench.step()

    assert (bench.core.load().running, bench.core.load().waiting) == (1, 1)
    bench.run()
    assert [output.request_id for output in bench.outputs] == ["a", "a", "b", "b"]


def test_budget_spent_on_running_requests_admits_nobody(
    make_bench: MakeBench, change: Change
) -> None:
    """When decodes and chunks use up the step, the queue waits."""
    bench = make_bench(change(max_num_batched_tokens=2))
    bench.add("a", range(2), max_tokens=3)
    bench.step()
    bench.add("b", range(20, 24))
    bench.add("c", range(30, 34))

    assert bench.step().scheduled_tokens == 2
    assert bench.core.load().waiting == 1


def test_least_recently_used_blocks_go_first_and_tails_before_heads(
    make_bench: MakeBench, change: Change
) -> None:
    """Eviction takes the oldest request's blocks from its end."""
    bench = make_bench(change(num_blocks=7))
    bench.ask("old", range(8))
    bench.ask("new", range(100, 108))
    bench.ask("third", range(200, 216))

    old = bench.stored()[0]
    assert [event.hash for event in bench.removed()] == [old.hashes[1], old.hashes[0]]
    assert bench.ask("new again", [*range(100, 108), 1]).cached_tokens == 8


def test_a_request_that_finds_no_block_waits(make_bench: MakeBench, change: Change) -> None:
    """The head of the queue waits for blocks and nobody passes it."""
    bench = make_bench(change(num_blocks=5))
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


def test_the_last_admitted_gives_way_when_blocks_run_out(
    make_bench: MakeBench, change: Change
) -> None:
    """It loses its blocks, waits again, and in the end says the same as if it hadn't."""
    bench = make_bench(change(num_blocks=6))
    bench.add("a", range(8), max_tokens=6)
    bench.add("b", range(100, 108), max_tokens=6)
    bench.run()

    assert bench.core.statistics.preemptions > 0
    for request_id in ("a", "b"):
        tokens = [out.token_id for out in bench.outputs if out.request_id == request_id]
        assert tokens == list(range(1000, 1006))


def test_a_request_may_be_its_own_victim(make_bench: MakeBench, change: Change) -> None:
    """If the request that needs a block was admitted last, it is the one to wait."""
    bench = make_bench(change(num_blocks=6))
    bench.add("a", range(13), max_tokens=2)
    bench.add("b", range(100, 104), max_tokens=2)
    bench.step()
    result = bench.step()

    assert [output.request_id for output in result.outputs] == ["a"]
    assert bench.core.load().waiting == 1
    bench.run()
    assert bench.core.statistics.finished == {"length": 2}


def test_step_without_work_takes_no_time(make_bench: MakeBench) -> None:
    """An idle engine neither computes nor wakes by itself."""
    result = make_bench().step()

    assert (result.duration_s, result.scheduled_tokens, result.wake_s) == (0.0, 0, None)


@pytest.mark.parametrize("steps", [0, 1], ids=["waiting", "running"])
def test_aborted_request_frees_its_blocks(steps: int, make_bench: MakeBench) -> None:
    """A request can be dropped wherever it is; its cached blocks stay findable."""
    bench = make_bench()
    bench.add("a", range(8), max_tokens=50)
    for _ in range(steps):
        bench.step()

    assert not bench.core.abort("unknown")
    assert bench.core.abort("a")
    assert not bench.core.has_work
    assert bench.core.load().cache_usage == 0
    assert not bench.core.abort("a")
    assert bench.core.statistics.finished == {"abort": 1}


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 8)), min_size=1, max_size=8))
def test_everything_ends_and_gives_its_blocks_back(
    make_bench: MakeBench, change: Change, shapes: list[tuple[int, int]]
) -> None:
    """However requests compete, each gets all its tokens and no block stays in use."""
    bench = make_bench(change(num_blocks=8, max_model_len=28, max_num_batched_tokens=8))
    for number, (prompt_tokens, max_tokens) in enumerate(shapes):
        bench.add(str(number), range(number, number + prompt_tokens), max_tokens=max_tokens)
    bench.run()

    assert bench.core.load().cache_usage == 0
    for number, (_prompt_tokens, max_tokens) in enumerate(shapes):
        tokens = [out.token_id for out in bench.outputs if out.request_id == str(number)]
        assert tokens == list(range(1000, 1000 + max_tokens))
