"""What ends an answer of a simulated rank."""

from collections.abc import Callable
from typing import Any

from simulator.core.generation import FixedTokens
from simulator.core.settings import EngineSettings

MakeBench = Callable[..., Any]
Change = Callable[..., EngineSettings]


def test_end_of_text_stops_the_answer(make_bench: MakeBench) -> None:
    """The end token is delivered with the reason and no stop token."""
    output = make_bench().ask("a", range(4), sampler=FixedTokens([7]), max_tokens=9)

    assert (output.token_id, output.finish_reason, output.stop_reason) == (258, "stop", None)


def test_stop_token_stops_the_answer_and_is_named(make_bench: MakeBench) -> None:
    """A listed id ends the answer and is the stop reason."""
    output = make_bench().ask("a", range(4), max_tokens=9, stop_token_ids=frozenset({1002}))

    assert (output.token_id, output.finish_reason, output.stop_reason) == (1002, "stop", 1002)


def test_nothing_stops_before_min_tokens(make_bench: MakeBench) -> None:
    """Stop tokens and the end count only from `min_tokens` on."""
    bench = make_bench()
    output = bench.ask(
        "a", range(4), max_tokens=9, min_tokens=4, stop_token_ids=frozenset({1002, 1004})
    )

    assert output.token_id == 1004


def test_ignored_end_goes_on_to_the_limit(make_bench: MakeBench) -> None:
    """With `ignore_eos` the answer is as long as allowed."""
    bench = make_bench()
    output = bench.ask("a", range(4), sampler=FixedTokens([258]), max_tokens=3, ignore_eos=True)

    assert output.finish_reason == "length"
    assert len(bench.outputs) == 3


def test_context_limit_ends_the_answer(make_bench: MakeBench, change: Change) -> None:
    """Prompt and answer never exceed the context."""
    bench = make_bench(change(max_model_len=8))
    bench.ask("a", range(5), max_tokens=100)

    assert len(bench.outputs) == 3
