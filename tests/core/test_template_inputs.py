"""How a chat is shown to its template."""

from collections.abc import Mapping
from typing import Any

import pytest

from balancer.core.prompt.request_shape import shape_chat
from balancer.core.prompt.shape import ChatShape, UnscorableError
from balancer.core.prompt.template_inputs import TemplateManner, template_inputs

HI = [{"role": "user", "content": "hi"}]
STRING = TemplateManner()


def chat(messages: Any = HI, **body: Any) -> ChatShape:
    """Shape of a chat."""
    return shape_chat({"messages": messages, **body})


def show(found: ChatShape, **manner: Any) -> list[Mapping[str, Any]]:
    """Its messages, for a template of that manner."""
    return list(template_inputs(found, TemplateManner(**manner)).messages)


@pytest.mark.parametrize(("content_format", "shown"), [("openai", True), ("string", False)])
def test_templates_that_see_parts_see_media(content_format: Any, shown: bool) -> None:
    """By kind, as the engine names them; others get the text alone."""
    parts = [{"type": "image_url"}, {"type": "text", "text": "look"}]
    (message,) = show(chat([{"role": "user", "content": parts}]), content_format=content_format)

    text = [{"type": "image"}, {"type": "text", "text": "look"}] if shown else "look"
    assert message["content"] == text


PARTS = [{"type": "text", "text": "a"}, "b", {"type": "text", "text": ""}, {"type": "text"}]


def shown(message: dict[str, Any], content_format: Any = "string") -> Mapping[str, Any]:
    """One message in the form a template sees."""
    return show(chat([{"role": "user"} | message]), content_format=content_format)[0]


def test_parts_are_joined_for_string_templates() -> None:
    """One line per text that isn't empty."""
    assert shown({"content": PARTS})["content"] == "a\nb"


def test_parts_stay_for_templates_that_loop() -> None:
    """Text becomes a part, absent text none."""
    assert shown({"content": PARTS}, "openai")["content"] == [
        {"type": "text", "text": "a"},
        {"type": "text", "text": "b"},
        {"type": "text", "text": ""},
    ]
    assert shown({"content": "x"}, "openai")["content"] == [{"type": "text", "text": "x"}]


def test_tool_results_are_text_for_every_template() -> None:
    """Few templates can show a tool result as parts."""
    message = {"role": "tool", "tool_call_id": "c1", "content": PARTS}

    assert shown(message, "openai") == {"role": "tool", "tool_call_id": "c1", "content": "a\nb\n"}
    assert "tool_call_id" not in shown({"role": "tool", "content": "x"})


def test_absent_content_is_empty() -> None:
    """An assistant that only called tools has no text."""
    assert shown({"role": "assistant", "content": None}) == {"role": "assistant", "content": ""}
    assert shown({"role": "assistant"}, "openai")["content"] == []


@pytest.mark.parametrize("kind", ["refusal", "thinking"])
def test_other_text_parts_have_their_own_field(kind: str) -> None:
    """A refusal's text is in `refusal`."""
    assert shown({"content": [{"type": kind, kind: "no"}]})["content"] == "no"


def test_names_and_reasoning_are_kept() -> None:
    """Templates may show them."""
    assert shown({"name": "Ann", "content": "x"})["name"] == "Ann"
    message = shown({"role": "assistant", "content": "x", "reasoning": "because"})
    assert message["reasoning"] == message["reasoning_content"] == "because"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param('{"a": 1}', {"a": 1}, id="json-text"),
        pytest.param({"a": 1}, {"a": 1}, id="object"),
        pytest.param("", {}, id="empty"),
        pytest.param(None, {}, id="absent"),
        pytest.param("{", {}, id="broken-json"),
        pytest.param("[" * 100_000, {}, id="nested"),
        pytest.param("[1]", {}, id="no-object"),
    ],
)
def test_tool_call_arguments_are_objects(arguments: Any, expected: dict[str, Any]) -> None:
    """Templates are written for objects, clients send JSON text."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}

    message = shown({"role": "assistant", "content": None, "tool_calls": [call]})

    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": expected}
    assert "tool_calls" not in shown({"role": "assistant", "tool_calls": []})


@pytest.mark.parametrize("call", [1, {"function": 1}])
def test_tool_call_of_a_wrong_type_is_left_to_the_engine(call: Any) -> None:
    """The engine answers 400."""
    with pytest.raises(UnscorableError):
        shown({"role": "assistant", "tool_calls": [call]})


def test_tools_are_dumped_as_the_engine_does() -> None:
    """Declared fields in their order, absent ones as null; others not at all."""
    tool = {"function": {"strict": True, "parameters": {"a": 1}, "name": "f", "foreign": 2}, "x": 1}

    inputs = template_inputs(chat(tools=[tool]), STRING)

    assert inputs.tools is not None
    assert list(inputs.tools[0]) == ["type", "function"]
    function = inputs.tools[0]["function"]
    assert list(function.items()) == [
        ("name", "f"),
        ("description", None),
        ("parameters", {"a": 1}),
        ("strict", True),
    ]


def test_tool_without_a_function_is_left_to_the_engine() -> None:
    """The engine answers 400."""
    with pytest.raises(UnscorableError):
        template_inputs(chat(tools=[{"type": "function"}]), STRING)


def test_template_variables_hold_kwargs_and_effort() -> None:
    """The explicit field wins."""
    found = chat(chat_template_kwargs={"a": 1, "reasoning_effort": "x"}, reasoning_effort="low")

    extra = template_inputs(found, STRING).extra

    assert extra == {"a": 1, "reasoning_effort": "low", "enable_thinking": True}


def test_request_variables_win_over_the_operators() -> None:
    """Null and `auto` are no values; what has a field of its own is never overridden."""
    given = {
        "a": 1,
        "b": None,
        "c": "auto",
        "add_generation_prompt": False,
        "documents": [{"x": "y"}],
    }
    manner = TemplateManner(variables={"a": 0, "b": 2, "c": 3})

    inputs = template_inputs(chat(chat_template_kwargs=given), manner)

    assert inputs.add_generation_prompt
    assert inputs.documents == [{"x": "y"}]
    assert {name: inputs.extra[name] for name in "abc"} == {"a": 1, "b": 2, "c": 3}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        pytest.param({"reasoning_effort": "high"}, True, id="some"),
        pytest.param({"reasoning_effort": "none"}, False, id="none"),
        pytest.param({}, None, id="not-said"),
        pytest.param(
            {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}},
            False,
            id="said-otherwise",
        ),
    ],
)
def test_effort_turns_thinking_on_and_off(body: dict[str, Any], expected: bool | None) -> None:
    """For templates that want to be told by that name."""
    assert template_inputs(chat(**body), STRING).extra.get("enable_thinking") is expected


def test_thinking_that_is_off_is_the_templates_effort() -> None:
    """`none`, or the lowest it knows."""
    shape = ChatShape(messages=HI, thinking_is_off=True)
    low = TemplateManner(effort_without_thinking="low")

    assert template_inputs(shape, STRING).extra["enable_thinking"] is False
    assert template_inputs(shape, low).extra["reasoning_effort"] == "low"


@pytest.mark.parametrize(("drops", "expected"), [(True, None), (False, 1)])
def test_tools_are_left_out_where_engines_do(drops: bool, expected: int | None) -> None:
    """`--exclude-tools-when-tool-choice-none`."""
    tools = [{"function": {"name": "f"}}]
    manner = TemplateManner(drops_tools_that_are_off=drops)

    off = template_inputs(chat(tools=tools, tool_choice="none"), manner)
    on = template_inputs(chat(tools=tools), manner)

    assert (None if off.tools is None else len(off.tools)) == expected
    assert on.tools is not None


def test_deferred_tools_say_so() -> None:
    """Within and without, wherever it was said."""
    within = {"function": {"name": "g", "defer_loading": True}}
    tools = [{"function": {"name": "f"}, "defer_loading": True}, within]
    inputs = template_inputs(chat(tools=tools), STRING)

    assert inputs.tools is not None
    assert inputs.tools[0]["defer_loading"] is True
    assert inputs.tools[0]["function"]["defer_loading"] is True
    assert inputs.tools[1]["function"]["defer_loading"] is True
    assert "defer_loading" not in inputs.tools[1]


DEVELOPER = {"role": "developer", "content": "c", "tools": [1]}
SYSTEM = {"role": "system", "content": "a"}


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        pytest.param([DEVELOPER, *HI], [{"role": "system", "content": "c"}, *HI], id="first"),
        pytest.param(
            [*HI, DEVELOPER], [{"role": "system", "content": "c"}, *HI], id="moved-to-the-front"
        ),
        pytest.param(
            [SYSTEM, *HI, DEVELOPER], [{"role": "system", "content": "a\n\nc"}, *HI], id="joined"
        ),
        pytest.param([SYSTEM, *HI], [SYSTEM, *HI], id="none"),
    ],
)
def test_developers_are_system_to_other_templates(messages: Any, expected: Any) -> None:
    """All system messages are one then, and the first."""
    assert show(chat(messages), knows_developers=False) == expected


def test_developers_of_templates_with_parts_are_joined_by_line() -> None:
    """Their texts are."""
    messages = [{"role": "developer", "content": ["a", "b"]}, *HI, SYSTEM]

    shown = show(chat(messages), knows_developers=False, content_format="openai")

    assert shown[0] == {"role": "system", "content": "a\nb\n\na"}


def test_developers_stay_for_templates_that_know_them() -> None:
    """With their tools, in the order of the engine's own types."""
    tool = {"x": 1, "type": "function", "function": {"parameters": {}, "name": "f"}}
    odd = {"type": "function", "function": "f"}
    (shown_,) = show(chat([{**DEVELOPER, "tools": [tool, odd]}]))

    assert show(chat([DEVELOPER])) == [DEVELOPER]
    assert [list(each) for each in shown_["tools"]] == [
        ["function", "type", "x"],
        ["function", "type"],
    ]
    assert list(shown_["tools"][0]["function"]) == ["name", "parameters"]


def test_foreign_fields_reach_templates_that_see_parts() -> None:
    """Behind those of the engine; known ones of other parts don't."""
    part = {"cache": 1, "type": "text", "text": "a", "detail": "x", "uuid": None}

    (shown_,) = show(chat([{"role": "user", "content": [part]}]), content_format="openai")

    assert list(shown_["content"][0].items()) == [
        ("type", "text"),
        ("text", "a"),
        ("cache", 1),
        ("detail", "x"),
    ]


def test_order_of_tool_calls_is_the_engines() -> None:
    """Templates write them as JSON."""
    call = {"type": "function", "x": 1, "function": {"name": "f", "arguments": "{}"}, "id": "c"}

    (shown_,) = show(chat([{"role": "assistant", "tool_calls": [call]}]))

    assert list(shown_["tool_calls"][0]) == ["id", "function", "type", "x"]
    assert list(shown_["tool_calls"][0]["function"]) == ["arguments", "name"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        pytest.param("x-anthropic-billing-header: 1\nrest", "rest", id="line"),
        pytest.param("x-anthropic-billing-header: 1", "", id="all"),
        pytest.param(
            ["x-anthropic-billing-header: 1", {"type": "text", "text": "b"}], "b", id="part"
        ),
        pytest.param("no x-anthropic-billing-header", "no x-anthropic-billing-header", id="inside"),
    ],
)
def test_billing_header_is_no_part_of_the_prompt(content: Any, expected: str) -> None:
    """It differs from request to request."""
    assert show(chat([{"role": "system", "content": content}]))[0]["content"] == expected


def test_users_may_say_what_they_want() -> None:
    """The header is one only in a system message."""
    said = "x-anthropic-billing-header: 1"

    assert shown({"content": said})["content"] == said


def test_references_to_tools_stay_references() -> None:
    """Also in a tool's result, which is text otherwise."""
    part = {"type": "tool_reference", "name": "f"}
    message = {"role": "tool", "tool_call_id": "c", "content": [part]}

    assert shown(message, "openai")["content"] == [part]
    assert shown(message)["content"] == "f"


def test_system_messages_are_one_where_the_template_wants_that() -> None:
    """Anthropic's messages may have some between others."""
    shape = ChatShape(messages=[*HI, SYSTEM, DEVELOPER], merges_system=True)
    without = ChatShape(messages=HI, merges_system=True)

    assert show(shape, wants_system_first=True) == [SYSTEM, *HI, DEVELOPER]
    assert show(shape) == [*HI, SYSTEM, DEVELOPER]
    assert show(without, wants_system_first=True) == HI


def test_tasks_are_kept() -> None:
    """A few models mark messages so."""
    assert shown({"task": "t", "content": "x"})["task"] == "t"
