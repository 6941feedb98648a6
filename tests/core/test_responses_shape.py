"""OpenAI's responses as the chat that vLLM makes of them."""

from typing import Any

import pytest

from balancer.core.prompt.responses_shape import shape_responses
from balancer.core.prompt.shape import ChatShape, Unscorable, UnscorableError

ASK = {"role": "user", "content": "?"}
CALLED = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "r"}
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"text": "t"}]}
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]}


def chat(given: Any = "hi", **body: Any) -> ChatShape:
    return shape_responses({"input": given, **body})


def test_text_is_what_the_user_says() -> None:
    """After the instructions; special tokens are put before it, unlike before a chat."""
    shape = chat(instructions="be kind")

    assert shape.messages == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hi"},
    ]
    assert shape.add_special_tokens


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        pytest.param([ASK], [ASK], id="message"),
        pytest.param(
            [THOUGHT, SAID, CALLED, {**CALLED, "call_id": "d"}, OUTPUT],
            [
                {
                    "role": "assistant",
                    "reasoning": "t",
                    "content": "a",
                    "tool_calls": [CALL, {**CALL, "id": "d"}],
                },
                {"role": "tool", "content": "r", "tool_call_id": "c"},
            ],
            id="one-turn",
        ),
        pytest.param(
            [SAID, SAID],
            [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "a"}],
            id="said-twice",
        ),
        pytest.param(
            [{**THOUGHT, "content": None, "summary": [{"text": "s"}]}],
            [{"role": "assistant", "reasoning": "s"}],
            id="summary",
        ),
        pytest.param(
            [{"type": "reasoning", "summary": []}],
            [{"role": "assistant", "reasoning": ""}],
            id="no-thought",
        ),
        pytest.param(
            [{"role": "assistant", "content": "a"}],
            [{"role": "assistant", "content": "a"}],
            id="plain",
        ),
        pytest.param(
            [{"role": "assistant", "content": []}],
            [{"role": "assistant", "content": ""}],
            id="nothing-said",
        ),
    ],
)
def test_items_become_messages(items: Any, expected: Any) -> None:
    """What belongs to one turn of the assistant is one message."""
    assert chat([ASK, *items]).messages == [ASK, *expected]


def test_last_message_may_be_unfinished() -> None:
    """Then it is continued."""
    opened = chat([ASK, {**SAID, "status": "incomplete"}])
    closed = chat([ASK, {**SAID, "status": "completed"}])
    called = chat([ASK, {**CALLED, "status": "in_progress"}])

    assert (opened.continue_final_message, opened.add_generation_prompt) == (True, False)
    assert not closed.continue_final_message
    assert not called.continue_final_message


def test_functions_are_tools() -> None:
    """Others aren't shown to the model as such."""
    tools = [{"type": "function", "name": "f", "parameters": {}}, {"type": "web_search"}]

    assert chat(tools=tools).tools == [
        {"type": "function", "function": {"name": "f", "parameters": {}}}
    ]
    assert chat(tools=[]).tools is None
    assert chat(tool_choice="none").tools_are_off


def test_effort_is_read() -> None:
    """From where this API has it."""
    assert chat(reasoning={"effort": "low"}).reasoning_effort == "low"
    assert chat(reasoning={"effort": None}).reasoning_effort is None


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        pytest.param({"previous_response_id": "r"}, Unscorable.UNSUPPORTED_FIELD, id="kept"),
        pytest.param({"input": None}, Unscorable.BAD_PROMPT, id="no-input"),
        pytest.param({"input": [1]}, Unscorable.BAD_PROMPT, id="no-item"),
        pytest.param({"input": [{"type": "x"}]}, Unscorable.UNSUPPORTED_FIELD, id="unknown-item"),
        pytest.param(
            {"input": [{**CALLED, "namespace": "n"}]}, Unscorable.UNSUPPORTED_FIELD, id="namespace"
        ),
        pytest.param(
            {"input": [{**THOUGHT, "encrypted_content": "x"}]},
            Unscorable.UNSUPPORTED_FIELD,
            id="encrypted",
        ),
        pytest.param(
            {"input": [{**THOUGHT, "content": [{}]}]}, Unscorable.BAD_PROMPT, id="no-text"
        ),
        pytest.param(
            {"tools": [{"type": "custom", "name": "c"}]}, Unscorable.UNSUPPORTED_FIELD, id="custom"
        ),
        pytest.param({"tools": [1]}, Unscorable.BAD_PROMPT, id="no-tool"),
    ],
)
def test_responses_that_cannot_be_scored(body: Any, reason: Unscorable) -> None:
    """The engine refuses them, or knows more than we do."""
    with pytest.raises(UnscorableError) as raised:
        shape_responses({"input": "hi", **body})

    assert raised.value.reason is reason
