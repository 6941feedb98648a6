"""`kvlb.replay.core.trace_rows`: three formats, and what is told of rows that are wrong."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from kvlb.replay.core.trace_rows import (
    USUAL_OUTPUT_TOKENS,
    BlockPrompt,
    ChatPrompt,
    RowReader,
    TextPrompt,
    TraceRequest,
    TraceRowError,
    find_block_tokens,
)

BLOCKS = {"timestamp": 1500, "input_length": 700, "output_length": 9, "hash_ids": [4, 5]}
CHAT: dict[str, Any] = {
    "id": "c1",
    "messages": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "x" * 40},
        {"role": "user", "content": "b"},
    ],
    "request_points": [1, 3],
}
TEXT = {"timestamp": 20, "requests": [{"prompt": "one", "Output Length": 8}, {"prompt": "two"}]}


def read(*rows: Any) -> Sequence[TraceRequest]:
    """All requests of a trace of these rows."""
    reader = RowReader()
    return [
        each
        for line, row in enumerate(rows, start=1)
        for each in reader.read(line, json.dumps(row).encode())
    ]


def test_block_row_is_one_request() -> None:
    """Milliseconds become seconds; a session may be a number."""
    assert read(BLOCKS | {"session": 7, "turn": 1}) == [
        TraceRequest(
            line=1,
            at_s=1.5,
            prompt=BlockPrompt(hash_ids=[4, 5], input_tokens=700),
            output_tokens=9,
            session="7",
        )
    ]


def test_chat_row_is_a_request_per_point() -> None:
    """Each sees the messages before it; an answer is as long as what was said then, if it was."""
    first, second = read(CHAT)

    assert first.prompt == ChatPrompt(messages=CHAT["messages"][:1])
    assert second.prompt == ChatPrompt(messages=CHAT["messages"])
    assert (first.output_tokens, second.output_tokens) == (10, USUAL_OUTPUT_TOKENS)
    assert {each.at_s for each in (first, second)} == {None}
    assert {each.session for each in (first, second)} == {"c1"}


@pytest.mark.parametrize(
    "following",
    [
        pytest.param({"role": "user", "content": "x"}, id="not-the-assistant"),
        pytest.param({"role": "assistant", "content": None}, id="tool-call"),
        pytest.param({"role": "assistant", "content": ""}, id="nothing-said"),
    ],
)
def test_length_of_an_answer_that_is_not_told_is_the_usual(following: dict[str, Any]) -> None:
    """Chats without an id have their line for a session."""
    row = {"messages": [{"role": "user", "content": "a"}, following], "request_points": [1]}

    (request,) = read(row)

    assert (request.output_tokens, request.session) == (USUAL_OUTPUT_TOKENS, "line 1")


def test_text_row_holds_requests() -> None:
    """All at the row's time; an unknown length is the usual one."""
    first, second = read(TEXT)

    assert (first.prompt, first.output_tokens) == (TextPrompt(text="one"), 8)
    assert (second.prompt, second.output_tokens) == (TextPrompt(text="two"), USUAL_OUTPUT_TOKENS)
    assert (first.at_s, second.at_s) == (0.02, 0.02)


def test_blank_line_is_no_row() -> None:
    """Files end in one."""
    assert RowReader().read(3, b" \n") == ()


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        pytest.param([{"prompt": "x"}], "line 1: no format that is known", id="unknown-format"),
        pytest.param([[1]], "line 1: no format that is known", id="no-object"),
        pytest.param([BLOCKS, TEXT], "line 2: .*input_length", id="another-format"),
        pytest.param(
            [BLOCKS, BLOCKS | {"timestamp": -1}], "line 2: .*timestamp", id="negative-time"
        ),
        pytest.param([BLOCKS | {"hash_ids": []}], "line 1: .*hash_ids", id="no-blocks"),
        pytest.param([BLOCKS | {"input_length": 0}], "line 1: .*input_length", id="no-input"),
        pytest.param([CHAT | {"request_points": [4]}], "line 1: request point 4 .*3", id="point"),
        pytest.param([CHAT | {"request_points": []}], "line 1: .*request_points", id="no-points"),
        pytest.param([TEXT | {"requests": [{}]}], "line 1: .*prompt", id="no-prompt"),
    ],
)
def test_wrong_row_is_told_with_its_line(rows: list[Any], says: str) -> None:
    """And the field at fault."""
    with pytest.raises(TraceRowError, match=says):
        read(*rows)


@pytest.mark.parametrize("row", [b"{", b"\xff\xfe{}", b"[" * 5000], ids=["cut", "bytes", "deep"])
def test_row_that_is_no_json_is_told_with_its_line(row: bytes) -> None:
    """Whatever it is."""
    with pytest.raises(TraceRowError, match="line 5: "):
        RowReader().read(5, row)


@pytest.mark.parametrize(
    ("rows", "size"),
    [
        pytest.param([(700, 2), (512, 1), (1025, 3)], 512, id="512"),
        pytest.param([(130, 3), (64, 1), (200, 4), (70, 1)], 64, id="one-row-too-long"),
    ],
)
def test_block_size_is_the_one_that_fits_most_rows(rows: list[tuple[int, int]], size: int) -> None:
    """Traces don't tell it."""
    requests = read(
        *(
            BLOCKS | {"input_length": tokens, "hash_ids": list(range(blocks))}
            for tokens, blocks in rows
        )
    )

    assert find_block_tokens(requests) == size


def test_text_has_no_block_size() -> None:
    """There is nothing to tell it from."""
    assert find_block_tokens(read(TEXT)) is None
