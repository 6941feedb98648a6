"""`kvlb.replay.core.prompts`: prompts share the blocks that the trace says they share."""

from itertools import takewhile
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlb.replay.core.prompts import (
    CHAT,
    COMPLETIONS,
    FIRST_TOKEN,
    PromptShape,
    PromptWriter,
    block_text,
    block_tokens,
)
from kvlb.replay.core.trace_rows import (
    BlockPrompt,
    ChatPrompt,
    TextPrompt,
    TracePrompt,
    TraceRequest,
)

SHAPE = PromptShape(model="m", block_tokens=8)


def write(prompt: TracePrompt, shape: PromptShape = SHAPE) -> tuple[str, dict[str, Any]]:
    """Path and decoded body."""
    request = TraceRequest(line=1, at_s=0.0, prompt=prompt, output_tokens=5)
    written = PromptWriter(shape).write(request)
    body: dict[str, Any] = msgspec.json.decode(written.body)
    return written.path, body


def blocks(ids: list[int], tokens: int, shape: PromptShape = SHAPE) -> Any:
    return write(BlockPrompt(hash_ids=ids, input_tokens=tokens), shape)[1]["prompt"]


def test_body_asks_for_a_stream_with_usage() -> None:
    """Of exactly as many tokens as the trace says."""
    path, body = write(TextPrompt(text='say "x"'))

    assert path == COMPLETIONS
    assert body == {
        "model": "m",
        "prompt": 'say "x"',
        "max_tokens": 5,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }


def test_natural_output_leaves_out_what_only_vllm_knows() -> None:
    """Other endpoints refuse unknown fields."""
    shape = PromptShape(model="m", exact_output=False)

    assert "ignore_eos" not in write(TextPrompt(text="x"), shape)[1]


def test_chat_is_sent_as_chat() -> None:
    """With its messages as they are."""
    messages = [{"role": "user", "content": "é"}]
    path, body = write(ChatPrompt(messages=messages))

    assert (path, body["messages"], "prompt" in body) == (CHAT, messages, False)


def test_block_prompt_is_its_blocks_cut_to_length() -> None:
    """The last one is partial."""
    first, second = (block_tokens(each, tokens=8, seed=0, vocabulary=32_000) for each in (3, 9))

    assert blocks([3, 9], 13) == first + second[:5]


def test_prompt_longer_than_its_blocks_ends_with_them() -> None:
    """Some rows of public traces are."""
    assert len(blocks([3], 12)) == 8


def test_blocks_beyond_the_length_are_left_out() -> None:
    """A row may name more than it needs."""
    assert blocks([3, 9], 8) == blocks([3], 8)


def test_text_blocks_have_so_many_characters() -> None:
    """At two and a half per token, here."""
    shape = PromptShape(model="m", block_tokens=8, chars_per_token=2.5)
    text = blocks([3, 9], 13, shape)

    assert text == block_text(3, chars=20, seed=0) + block_text(9, chars=20, seed=0)[:12]
    assert text.isascii()


@given(st.integers(0, 2**63), st.integers(0, 5), st.integers(1001, 200_000))
def test_block_tokens_are_in_the_vocabulary(block: int, seed: int, vocabulary: int) -> None:
    """And above the special ones."""
    tokens = block_tokens(block, tokens=16, seed=seed, vocabulary=vocabulary)

    assert all(FIRST_TOKEN <= each < vocabulary for each in tokens)


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=6),
    st.lists(st.integers(0, 3), min_size=1, max_size=6),
)
def test_common_prefix_of_prompts_is_that_of_their_ids(left: list[int], right: list[int]) -> None:
    """Equal leading ids, equal leading blocks, and no more."""
    shared = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))))
    prompts = zip(blocks(left, 8 * len(left)), blocks(right, 8 * len(right)), strict=False)

    assert len(list(takewhile(lambda pair: pair[0] == pair[1], prompts))) // 8 == shared


@pytest.mark.parametrize("chars_per_token", [None, 4.0], ids=["ids", "text"])
def test_another_seed_writes_other_prompts(chars_per_token: float | None) -> None:
    """So that an engine that is warm from the last run is cold for the next."""
    ours, theirs = (
        blocks(
            [3],
            8,
            PromptShape(model="m", block_tokens=8, seed=seed, chars_per_token=chars_per_token),
        )
        for seed in (0, 1)
    )

    assert ours != theirs
