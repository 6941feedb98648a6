"""What an engine's `/tokenize` is asked."""

from typing import Any

import pytest

from balancer.core.prompt.request_shape import shape_chat
from balancer.core.prompt.shape import ChatShape, TextShape, Unscorable, UnscorableError
from balancer.core.prompt.tokenize_body import tokenize_bodies
from balancer.core.settings.control import EngineFlags

HI = [{"role": "user", "content": "hi"}]


def chat(messages: Any = HI, **body: Any) -> ChatShape:
    """Shape of a chat."""
    return shape_chat({"messages": messages, **body})


def test_engine_is_asked_once_per_text() -> None:
    """`/tokenize` takes one prompt."""
    found = TextShape(texts=("a", "b"), add_special_tokens=False)

    assert tokenize_bodies(found, "m") == [
        {"model": "m", "prompt": "a", "add_special_tokens": False},
        {"model": "m", "prompt": "b", "add_special_tokens": False},
    ]


def test_engine_gets_every_chat_field_it_knows() -> None:
    """What shapes the prompt is passed on under its own name."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    found = chat(tools=tools, chat_template="t", chat_template_kwargs={"a": 1})

    assert tokenize_bodies(found, "m") == [
        {
            "model": "m",
            "messages": HI,
            "add_generation_prompt": True,
            "continue_final_message": False,
            "add_special_tokens": False,
            "tools": tools,
            "chat_template": "t",
            "chat_template_kwargs": {"a": 1},
        }
    ]
    assert list(tokenize_bodies(chat(), "m")[0])[-1] == "add_special_tokens"


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        pytest.param(
            {"documents": [{"text": "d"}]}, {"documents": [{"text": "d"}]}, id="documents"
        ),
        pytest.param(
            {"reasoning_effort": "low"},
            {"reasoning_effort": "low", "enable_thinking": True},
            id="effort",
        ),
    ],
)
def test_fields_that_the_engine_lacks_are_variables(field: Any, expected: Any) -> None:
    """Under their own names, as the chat path hands them on."""
    assert tokenize_bodies(chat(**field), "m")[0]["chat_template_kwargs"] == expected


def test_reasoning_has_its_new_name() -> None:
    """`/tokenize` doesn't know the old one."""
    said = {"role": "assistant", "content": "x"}
    (body,) = tokenize_bodies(chat([{**said, "reasoning_content": "r"}]), "m")

    assert body["messages"] == [{**said, "reasoning": "r"}]


@pytest.mark.parametrize("drops", [True, False])
def test_tools_that_are_off_are_left_out_where_engines_do(drops: bool) -> None:
    """`/tokenize` doesn't heed the engine's flag."""
    flags = EngineFlags(exclude_tools_when_tool_choice_none=drops)
    asked = chat(tools=[{"function": {"name": "f"}}], tool_choice="none")

    assert ("tools" in tokenize_bodies(asked, "m", flags)[0]) == (not drops)


@pytest.mark.parametrize("field", ["merges_system", "thinking_is_off"])
def test_engine_is_not_asked_what_depends_on_the_template(field: str) -> None:
    """Its answer would be the ids of another prompt."""
    with pytest.raises(UnscorableError) as raised:
        tokenize_bodies(ChatShape(messages=HI, **{field: True}), "m")  # type: ignore[arg-type]

    assert raised.value.reason is Unscorable.UNSUPPORTED_FIELD
