"""Renders chat messages into the text that is tokenized: ChatML with tools as JSON.

Per message `<|im_start|>role`, a newline, the content, `<|im_end|>`, a newline; then the head of
the assistant's answer. Tools go into a system block before everything else. Text parts are joined
by newlines.
Cost: linear in the length of the text.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from simulator.core.errors import InvalidBodyError, RequestRefusedError
from simulator.core.media import MEDIA_TYPES, placeholder

_TOOLS_HEAD = "# Tools\n\nYou may call one of these functions:\n"


def render_chat(
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    takes_media: bool = False,
) -> str:
    """Return the prompt text of a conversation."""
    if add_generation_prompt and continue_final_message:
        raise RequestRefusedError(
            "Cannot set both `continue_final_message` and `add_generation_prompt` to True."
        )
    turns = [_render_tools(tools)] if tools else []
    turns.extend(_render_message(each, takes_media) for each in messages)
    if continue_final_message:
        turns[-1] = turns[-1].removesuffix("<|im_end|>\n")
    if add_generation_prompt:
        turns.append("<|im_start|>assistant\n")
    return "".join(turns)


def _render_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    described = "\n".join(_render_json(tool) for tool in tools)
    return f"<|im_start|>system\n{_TOOLS_HEAD}{described}<|im_end|>\n"


def _render_message(message: Mapping[str, Any], takes_media: bool) -> str:
    role = message.get("role")
    if not isinstance(role, str):
        raise InvalidBodyError("messages: every message needs a role", param="messages")
    content = _render_content(message.get("content"), takes_media)
    for call in message.get("tool_calls") or ():
        content += "\n<tool_call>" + _render_json(call) + "</tool_call>"
    return f"<|im_start|>{role}\n{content}<|im_end|>\n"


def _render_content(content: object, takes_media: bool) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(_render_part(part, takes_media) for part in content)
    raise InvalidBodyError("messages: content must be a string or a list of parts")


def _render_part(part: object, takes_media: bool) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise InvalidBodyError("messages: a content part must be a string or an object")
    text = part.get("text", part.get("refusal"))
    if isinstance(text, str):
        return text
    if takes_media and part.get("type") in MEDIA_TYPES:
        return placeholder(part)
    kind = str(part.get("type")).removesuffix("_url").removeprefix("input_")
    raise RequestRefusedError(f"At most 0 {kind}(s) may be provided in one prompt.")


def _render_json(value: object) -> str:
    return msgspec.json.encode(value).decode()
