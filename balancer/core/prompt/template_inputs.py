"""Puts a chat in the form in which vLLM shows it to its chat template.

Rules:

1. Parts are joined or kept as the template wants it (`core.prompt.content_format`); a tool's results are
   joined for any template, unless they refer to tools.
2. Arguments of tool calls are objects, `{}` if they aren't any in JSON. Tools have their declared fields,
   in the order in which the engine declares them, and no others.
3. A template that doesn't know `developer` gets those messages as `system`, and all of these as one.
4. Template variables: the client's, over the operator's, under what has a field of its own. Null and
   `auto` count as not given. Asking for reasoning turns `enable_thinking` on, or off for `none`.
5. The header line with which Claude Code signs each request anew is no part of the prompt.

All of this is vLLM 0.32's; earlier releases differ in a few rare cases, which is what `parity` is for.

Cost: linear in messages and tools, not in text.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from balancer.core.prompt.chat_template import ChatInputs
from balancer.core.prompt.content_format import ContentFormat
from balancer.core.prompt.content_parts import (
    MEDIA_PARTS,
    SKIPPED_IF_NULL,
    TOOL_REFERENCE,
    foreign_fields,
    part_kind,
    part_text,
)
from balancer.core.prompt.shape import ChatShape, Unscorable, UnscorableError

BILLING_HEADER: Final = "x-anthropic-billing-header"
_NOT_GIVEN: Final = (None, "auto")


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateManner:
    """What about a template, and the engine's flags, decides how a chat is shown to it."""

    content_format: ContentFormat = "string"
    knows_developers: bool = True
    wants_system_first: bool = False
    """It refuses a `system` message that isn't the first."""
    effort_without_thinking: str = "none"
    variables: Mapping[str, Any] = field(default_factory=dict)
    """`--default-chat-template-kwargs`."""
    drops_tools_that_are_off: bool = False
    """`--exclude-tools-when-tool-choice-none`."""


def template_inputs(shape: ChatShape, manner: TemplateManner) -> ChatInputs:
    """Show `shape` to a template of this manner. Raises UnscorableError."""
    messages: Iterable[Mapping[str, Any]] = shape.messages
    if shape.merges_system and manner.wants_system_first:
        messages = _with_one_system(shape.messages)
    shown = [_message(each, manner.content_format) for each in messages]
    if not manner.knows_developers and any(each["role"] == "developer" for each in shown):
        shown = _without_developers(shown)
    tools = None if shape.tools is None else [_tool(each) for each in shape.tools]
    if shape.tools_are_off and manner.drops_tools_that_are_off:
        tools = None
    given = client_variables(shape, manner.effort_without_thinking)
    variables = {**manner.variables, **given}
    return ChatInputs(
        messages=shown,
        tools=variables.pop("tools", tools),
        documents=variables.pop("documents", None),
        add_generation_prompt=shape.add_generation_prompt,
        continue_final_message=shape.continue_final_message,
        extra=variables,
    )


def client_variables(shape: ChatShape, effort_without_thinking: str = "none") -> dict[str, Any]:
    """What the request gives a template beside messages and tools."""
    effort = shape.reasoning_effort
    if effort is None and shape.thinking_is_off:
        effort = effort_without_thinking
    own: dict[str, Any] = {"documents": shape.documents, "reasoning_effort": effort}
    if effort is not None and "enable_thinking" not in shape.chat_template_kwargs:
        own["enable_thinking"] = effort != "none"
    merged = {**shape.chat_template_kwargs, **_given(own)}
    return dict(_given(merged))


def _given(variables: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: value for name, value in variables.items() if value not in _NOT_GIVEN}


def _message(message: Mapping[str, Any], content_format: ContentFormat) -> dict[str, Any]:
    role = message["role"]
    shown: dict[str, Any] = {"role": role, "content": _content(message, content_format)}
    if role == "assistant":
        if message.get("tool_calls"):
            shown["tool_calls"] = [_tool_call(call) for call in message["tool_calls"]]
        if isinstance(reasoning := message.get("reasoning"), str):
            shown |= {"reasoning": reasoning, "reasoning_content": reasoning}
    if role == "tool" and "tool_call_id" in message:
        shown["tool_call_id"] = message["tool_call_id"]
    for name in ("name", "task"):
        if isinstance(message.get(name), str):
            shown[name] = message[name]
    if role == "developer":
        shown["tools"] = _developer_tools(message.get("tools"))
    return shown


def _content(message: Mapping[str, Any], content_format: ContentFormat) -> Any:
    content = message.get("content")
    parts: Iterable[Any] = [content] if isinstance(content, str) else content or []
    if message["role"] == "system":
        parts = _without_billing_header(parts)
    if content_format == "string":
        return "\n".join(filter(None, map(_text, parts)))
    shown = [part for part in map(_shown_part, parts) if part is not None]
    if message["role"] == "tool" and all(part["type"] == "text" for part in shown):
        return "\n".join(part["text"] for part in shown)  # few templates show parts here
    return shown


def _text(part: Any) -> str | None:
    text = part if isinstance(part, str) else part_text(part, part_kind(part) or "text")
    return text if isinstance(text, str) else None


def _shown_part(part: Any) -> Mapping[str, Any] | None:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part_kind(part) or "text"
    if kind in MEDIA_PARTS:
        return {"type": MEDIA_PARTS[kind]}
    text = part_text(part, kind)
    if kind == TOOL_REFERENCE:
        return {"type": TOOL_REFERENCE, "name": text}
    if text is None and kind in SKIPPED_IF_NULL:
        return None
    return {"type": "text", "text": text, **foreign_fields(part)}


def _without_billing_header(parts: Iterable[Any]) -> Iterator[Any]:
    for part in parts:
        is_text = isinstance(part, str) or part.get("type") == "text"
        text = _text(part) if is_text else None
        if text is None or not text.startswith(BILLING_HEADER):
            yield part
        elif rest := text.partition("\n")[2]:
            yield rest


def _tool_call(call: object) -> Mapping[str, Any]:
    """Templates want arguments as an object; clients send JSON text. The order is the engine's."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise UnscorableError(Unscorable.BAD_PROMPT)
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments:
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = {}
    shown = arguments if isinstance(arguments, dict) else {}
    named = _ordered({**function, "arguments": shown}, "arguments", "name")
    return _ordered({**call, "function": named}, "id", "function", "type")


def _ordered(fields: Mapping[str, Any], *declared: str) -> dict[str, Any]:
    """As the engine's own types hold them: declared fields first, what else there is after them."""
    return {**{name: fields[name] for name in declared if name in fields}, **fields}


def _developer_tools(tools: object) -> object:
    if not isinstance(tools, list) or not all(isinstance(each, dict) for each in tools):
        return tools
    shown = []
    for each in tools:
        function = each.get("function")
        if isinstance(function, dict):
            function = _ordered(function, "name", "description", "parameters", "strict")
        shown.append(_ordered({**each, "function": function}, "function", "type"))
    return shown


def _tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Fields as the engine's own model dumps them."""
    function = tool.get("function")
    if not isinstance(function, dict):
        raise UnscorableError(Unscorable.BAD_PROMPT)
    shown = {name: function.get(name) for name in ("name", "description", "parameters")}
    defers = tool.get("defer_loading")
    shown |= {"strict": function.get("strict"), "defer_loading": function.get("defer_loading")}
    if shown["defer_loading"] is None:
        shown["defer_loading"] = defers
    for name in ("strict", "defer_loading"):
        if shown[name] is None:
            del shown[name]
    dumped = {"type": tool.get("type", "function"), "function": shown}
    return dumped if defers is None else {**dumped, "defer_loading": defers}


def _without_developers(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    renamed = [
        {**{key: each[key] for key in each if key != "tools"}, "role": "system"}
        if each["role"] == "developer"
        else each
        for each in messages
    ]
    others = [each for each in renamed if each["role"] != "system"]
    system = [each for each in renamed if each["role"] == "system"]
    if len(system) == 1 and renamed[0] is system[0]:
        return renamed
    texts = [_flat(each["content"]) for each in system]
    return [{"role": "system", "content": "\n\n".join(filter(None, texts))}, *others]


def _flat(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if "text" in part)


def _with_one_system(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """As engines do it for Anthropic's messages: joined without anything between."""
    system = [each["content"] for each in messages if each["role"] == "system"]
    others = [each for each in messages if each["role"] != "system"]
    return [{"role": "system", "content": "".join(system)}, *others] if system else others
