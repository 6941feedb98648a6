"""From a body of Anthropic's Messages API to the shape of its prompt, as vLLM makes a chat of it.

Rules:

1. A user's tool results become messages of their own, before what else the user says. Text, thinking and
   tool use of one message stay together.
2. Blocks in which Claude Code signs its requests are left out: they differ each time.
3. System messages between others stay there, unless the template refuses that (`merges_system`).
4. What vLLM does only since its last releases (tools that come and go on the way) isn't followed.

Cost: linear in blocks, not in text.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from balancer.core.prompt.request_shape import checked_messages, template_variables
from balancer.core.prompt.shape import ChatShape, Unscorable, UnscorableError
from balancer.core.prompt.template_inputs import BILLING_HEADER

Message = dict[str, Any]


def shape_messages(body: Mapping[str, Any]) -> ChatShape:
    """Read a `/v1/messages` body. Raises UnscorableError."""
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise UnscorableError(Unscorable.BAD_PROMPT)
    messages = [*_system(body.get("system"))]
    for each in given:
        messages += _chat_messages(_checked(each))
    bare, has_media = checked_messages(messages)
    thinking = _mapping(body.get("thinking"))
    is_off = thinking.get("type") == "disabled"
    effort = _mapping(body.get("output_config")).get("effort")
    return ChatShape(
        messages=bare,
        has_media=has_media,
        tools=_tools(body.get("tools")),
        tools_are_off=_mapping(body.get("tool_choice")).get("type") == "none",
        chat_template_kwargs=template_variables(body),
        reasoning_effort=effort if isinstance(effort, str) and not is_off else None,
        thinking_is_off=is_off,
        merges_system=any(each["role"] == "system" for each in given),
    )


def _checked(message: object) -> Mapping[str, Any]:
    if not isinstance(message, dict) or message.get("role") not in {"user", "assistant", "system"}:
        raise UnscorableError(Unscorable.BAD_PROMPT)
    content = message.get("content")
    if not isinstance(content, str):
        _checked_blocks(content)
    return message


def _checked_blocks(content: object) -> Sequence[Mapping[str, Any]]:
    if not isinstance(content, list) or not all(isinstance(each, dict) for each in content):
        raise UnscorableError(Unscorable.BAD_PROMPT)
    if any(each.get("type") in {"tool_addition", "tool_removal"} for each in content):
        raise UnscorableError(Unscorable.UNSUPPORTED_FIELD)
    return content


def _system(system: object) -> Iterator[Message]:
    if not system:
        return
    text = system if isinstance(system, str) else _unsigned(_checked_blocks(system))
    if text:
        yield {"role": "system", "content": text}


def _unsigned(blocks: Iterable[Mapping[str, Any]]) -> str:
    """The text of system blocks."""
    texts = [_str(each.get("text")) for each in blocks if each.get("type") == "text"]
    return "".join(text for text in texts if not text.startswith(BILLING_HEADER))


def _chat_messages(message: Mapping[str, Any]) -> Iterator[Message]:
    role, content = message["role"], message["content"]
    if role == "system":
        text = content if isinstance(content, str) else _unsigned(content)
        if text and not text.startswith(BILLING_HEADER):
            yield {"role": "system", "content": text}
        return
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    if role == "user":
        for each in content:
            if each.get("type") == "tool_result":
                yield from _tool_result(each)
    own = _own_message(role, content)
    if role != "user" or "content" in own:
        yield own


def _own_message(role: str, blocks: Sequence[Mapping[str, Any]]) -> Message:
    parts = [part for each in blocks if (part := _part(each, role)) is not None]
    thoughts = [_str(each.get("thinking")) for each in blocks if each.get("type") == "thinking"]
    calls = [_tool_use(each) for each in blocks if each.get("type") == "tool_use"]
    own: Message = {"role": role}
    if thoughts:
        own["reasoning"] = "".join(thoughts)
    if calls:
        own["tool_calls"] = calls
    if len(parts) == 1 and parts[0]["type"] == "text":
        own["content"] = parts[0]["text"]
    elif parts:
        own["content"] = parts
    return own


def _part(block: Mapping[str, Any], role: str) -> Message | None:
    kind = block.get("type")
    if kind == "text" and block.get("text"):
        return {"type": "text", "text": _str(block["text"])}
    if kind == "image" and block.get("source"):
        return {"type": "image_url"}
    if kind == "tool_result" and role != "user":
        return {"type": "text", "text": f"Tool result: {block.get('content') or ''}"}
    return None


def _tool_use(block: Mapping[str, Any]) -> Message:
    arguments = json.dumps(block.get("input") or {})
    function = {"name": block.get("name") or "", "arguments": arguments}
    return {"id": _str(block.get("id")), "type": "function", "function": function}


def _tool_result(block: Mapping[str, Any]) -> Iterator[Message]:
    content = block.get("content")
    items = content if isinstance(content, list) else ()
    of_kind = {kind: [each for each in items if isinstance(each, dict) and each.get("type") == kind]
               for kind in ("text", "image", "tool_reference")}  # fmt: skip
    text = "\n".join(_str(each.get("text", "")) for each in of_kind["text"])
    answer = {"role": "tool", "tool_call_id": block.get("tool_use_id") or ""}
    yield {**answer, "content": content if isinstance(content, str) else text}
    if of_kind["image"]:
        yield {"role": "user", "content": [{"type": "image_url"} for _ in of_kind["image"]]}
    names = [each.get("tool_name") or each.get("name") for each in of_kind["tool_reference"]]
    if any(names):
        told = [{"type": "tool_reference", "name": name} for name in names if name]
        yield {**answer, "content": told}


def _tools(tools: object) -> Sequence[Mapping[str, Any]] | None:
    if tools is None:
        return None
    shown = []
    for each in _checked_blocks(tools):
        schema = each.get("input_schema")
        if not isinstance(schema, dict):
            raise UnscorableError(Unscorable.BAD_PROMPT)
        function = {name: each.get(name) for name in ("name", "description")}
        function["parameters"] = schema if "type" in schema else {**schema, "type": "object"}
        function |= {name: each.get(name) for name in ("strict", "defer_loading")}
        shown.append({"type": "function", "function": function})
    return shown


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _str(value: object) -> str:
    if not isinstance(value, str):
        raise UnscorableError(Unscorable.BAD_PROMPT)
    return value
