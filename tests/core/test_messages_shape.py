"""Anthropic's messages as the chat that vLLM makes of them."""

from typing import Any

import pytest

from balancer.core.prompt.messages_shape import shape_messages
from balancer.core.prompt.shape import ChatShape, Unscorable, UnscorableError

HI = [{"role": "user", "content": "hi"}]


def chat(messages: Any = HI, **body: Any) -> ChatShape:
    return shape_messages({"messages": messages, **body})


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


SIGNED = text("x-anthropic-billing-header: 1")
USED = {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        pytest.param("a", "a", id="text"),
        pytest.param([text("a"), SIGNED, text("b"), {"type": "other"}], "ab", id="blocks"),
        pytest.param([SIGNED], None, id="nothing-left"),
        pytest.param(None, None, id="none"),
    ],
)
def test_system_comes_first(system: Any, expected: str | None) -> None:
    """Its blocks are joined; what signs the request is none."""
    first = [] if expected is None else [{"role": "system", "content": expected}]

    assert chat(system=system).messages == [*first, *HI]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        pytest.param(
            {"role": "user", "content": [text("a")]},
            [{"role": "user", "content": "a"}],
            id="one-text",
        ),
        pytest.param(
            {"role": "user", "content": [text("a"), text(""), text("b")]},
            [{"role": "user", "content": [text("a"), text("b")]}],
            id="texts",
        ),
        pytest.param(
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t"},
                    {"type": "redacted_thinking", "data": "x"},
                    text("a"),
                    USED,
                ],
            },
            [{"role": "assistant", "reasoning": "t", "tool_calls": [CALL], "content": "a"}],
            id="thought-text-and-call",
        ),
        pytest.param(
            {"role": "assistant", "content": [USED]},
            [{"role": "assistant", "tool_calls": [CALL]}],
            id="call-only",
        ),
        pytest.param(
            {
                "role": "user",
                "content": [
                    text("after"),
                    {"type": "tool_result", "tool_use_id": "c", "content": "r"},
                ],
            },
            [
                {"role": "tool", "tool_call_id": "c", "content": "r"},
                {"role": "user", "content": "after"},
            ],
            id="result-first",
        ),
        pytest.param(
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c", "content": [text("r"), text("s")]}
                ],
            },
            [{"role": "tool", "tool_call_id": "c", "content": "r\ns"}],
            id="result-only",
        ),
        pytest.param(
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c"}]},
            [{"role": "tool", "tool_call_id": "c", "content": ""}],
            id="empty-result",
        ),
        pytest.param(
            {"role": "assistant", "content": [{"type": "tool_result", "content": "r"}]},
            [{"role": "assistant", "content": "Tool result: r"}],
            id="result-of-an-assistant",
        ),
        pytest.param(
            {"role": "system", "content": [text("now"), SIGNED]},
            [{"role": "system", "content": "now"}],
            id="system-inside",
        ),
        pytest.param({"role": "system", "content": SIGNED["text"]}, [], id="signature-inside"),
    ],
)
def test_blocks_become_messages(message: Any, expected: Any) -> None:
    """In the engine's order."""
    assert chat([*HI, message]).messages == [*HI, *expected]


def test_pictures_and_references_of_a_result_are_messages_of_their_own() -> None:
    """A tool's message holds text."""
    content = [
        text("r"),
        {"type": "image", "source": {"type": "url", "url": "http://secret"}},
        {"type": "tool_reference", "tool_name": "g"},
        "odd",
    ]
    result = {"type": "tool_result", "tool_use_id": "c", "content": content}

    shape = chat([{"role": "user", "content": [result]}])

    answer = {"role": "tool", "tool_call_id": "c"}
    assert shape.has_media
    assert shape.messages == [
        {**answer, "content": "r"},
        {"role": "user", "content": [{"type": "image"}]},
        {**answer, "content": [{"type": "tool_reference", "name": "g"}]},
    ]


def test_pictures_are_media() -> None:
    """Of which only the kind is kept."""
    shape = chat([{"role": "user", "content": [{"type": "image", "source": {"data": "x"}}]}])

    assert shape.messages == [{"role": "user", "content": [{"type": "image"}]}]


def test_tools_are_functions() -> None:
    """Whose schema is an object's."""
    tools = [{"name": "f", "input_schema": {"properties": {}}}]

    assert chat(tools=tools).tools == [
        {
            "type": "function",
            "function": {
                "name": "f",
                "description": None,
                "parameters": {"properties": {}, "type": "object"},
                "strict": None,
                "defer_loading": None,
            },
        }
    ]
    assert chat(tool_choice={"type": "none"}).tools_are_off


@pytest.mark.parametrize(
    ("body", "effort", "is_off"),
    [
        pytest.param({"output_config": {"effort": "low"}}, "low", False, id="effort"),
        pytest.param({"thinking": {"type": "enabled"}}, None, False, id="on"),
        pytest.param({"thinking": {"type": "disabled"}}, None, True, id="off"),
        pytest.param(
            {"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}},
            None,
            True,
            id="off-wins",
        ),
    ],
)
def test_thinking_is_asked_for(body: Any, effort: str | None, is_off: bool) -> None:
    """How much, or none."""
    shape = chat(**body)

    assert (shape.reasoning_effort, shape.thinking_is_off) == (effort, is_off)


def test_system_inside_may_have_to_move() -> None:
    """Whether it does is the template's affair."""
    assert chat([*HI, {"role": "system", "content": "x"}]).merges_system
    assert not chat(system="x").merges_system


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        pytest.param({"messages": []}, Unscorable.BAD_PROMPT, id="empty"),
        pytest.param({"messages": [1]}, Unscorable.BAD_PROMPT, id="no-message"),
        pytest.param({"messages": [{"role": "tool"}]}, Unscorable.BAD_PROMPT, id="role"),
        pytest.param({"messages": [{"role": "user"}]}, Unscorable.BAD_PROMPT, id="no-content"),
        pytest.param(
            {"messages": [{"role": "user", "content": [1]}]}, Unscorable.BAD_PROMPT, id="no-block"
        ),
        pytest.param(
            {"messages": [{"role": "assistant", "content": [{"type": "thinking"}]}]},
            Unscorable.BAD_PROMPT,
            id="no-thought",
        ),
        pytest.param(
            {"messages": [{"role": "system", "content": [{"type": "tool_removal"}]}]},
            Unscorable.UNSUPPORTED_FIELD,
            id="tools-that-go",
        ),
        pytest.param({"tools": [{"name": "f"}]}, Unscorable.BAD_PROMPT, id="no-schema"),
    ],
)
def test_messages_that_cannot_be_scored(body: Any, reason: Unscorable) -> None:
    """The engine refuses them, or knows more than we do."""
    with pytest.raises(UnscorableError) as raised:
        shape_messages({"messages": HI, **body})

    assert raised.value.reason is reason
