"""From a body of OpenAI's Responses API to the shape of its prompt, as vLLM makes a chat of it.

Rules:

1. What an assistant thought, said and called in a row is one message, as long as each fits into it.
2. What the engine keeps (`previous_response_id`) isn't known here.
3. Of tools functions count; vLLM runs others itself, or hands them to nobody.
4. vLLM puts a tokenizer's own special tokens before this prompt, which it doesn't for chats: a model whose
   tokenizer and template both begin with BOS gets two of them.

Cost: linear in items, not in text.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from balancer.core.prompt.request_shape import checked_messages, template_variables
from balancer.core.prompt.shape import ChatShape, Unscorable, UnscorableError

Message = dict[str, Any]
_UNFOLLOWED: Final = (
    "previous_response_id",
    "previous_input_messages",
    "prompt",
    "media_io_kwargs",
    "mm_processor_kwargs",
)
_UNFINISHED: Final = ("in_progress", "incomplete")
_OTHER_FUNCTIONS: Final = frozenset({"custom", "namespace"})


def shape_responses(body: Mapping[str, Any]) -> ChatShape:
    """Read a `/v1/responses` body. Raises UnscorableError."""
    if any(body.get(name) for name in _UNFOLLOWED):
        raise UnscorableError(Unscorable.UNSUPPORTED_FIELD)
    given = body.get("input")
    messages: list[Message] = []
    if instructions := body.get("instructions"):
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    else:
        messages += _item_messages(_checked_items(given))
    bare, has_media = checked_messages(messages)
    is_unfinished = isinstance(given, list) and bool(given) and _is_unfinished(given[-1])
    reasoning = body.get("reasoning")
    effort = reasoning.get("effort") if isinstance(reasoning, dict) else None
    return ChatShape(
        messages=bare,
        has_media=has_media,
        tools=_tools(body.get("tools")),
        tools_are_off=body.get("tool_choice") == "none",
        add_generation_prompt=not is_unfinished,
        continue_final_message=is_unfinished,
        add_special_tokens=True,
        chat_template_kwargs=template_variables(body),
        reasoning_effort=effort if isinstance(effort, str) else None,
    )


def _checked_items(items: object) -> Sequence[Mapping[str, Any]]:
    if not isinstance(items, list) or not all(isinstance(each, dict) for each in items):
        raise UnscorableError(Unscorable.BAD_PROMPT)
    return items


def _is_unfinished(item: Mapping[str, Any]) -> bool:
    is_text = item.get("type", "message") in {"message", "reasoning"}
    return is_text and item.get("status") in _UNFINISHED


def _item_messages(items: Sequence[Mapping[str, Any]]) -> list[Message]:
    messages: list[Message] = []
    for item in items:
        message = _message(item)
        last = messages[-1] if messages else None
        if last is None or not _joins(message, last):
            messages.append(message)
    return messages


def _joins(message: Message, last: Message) -> bool:
    """Put an assistant's message into the one before, if that has a place for it."""
    if message["role"] != "assistant" or last["role"] != "assistant":
        return False
    (name,) = (name for name in ("content", "reasoning", "tool_calls") if name in message)
    if name == "tool_calls":
        last["tool_calls"] = [*(last.get("tool_calls") or ()), *message["tool_calls"]]
        return True
    if last.get(name) is not None:
        return False
    last[name] = message[name]
    return True


def _message(item: Mapping[str, Any]) -> Message:
    match item.get("type", "message"):
        case "function_call" if not item.get("namespace"):
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "function": function, "type": "function"}
            return {"role": "assistant", "tool_calls": [call]}
        case "function_call_output":
            answer = {"content": item.get("output"), "tool_call_id": item.get("call_id")}
            return {"role": "tool", **answer}
        case "reasoning" if not item.get("encrypted_content"):
            texts = [*(item.get("content") or ()), *(item.get("summary") or ())]
            return {"role": "assistant", "reasoning": _text(texts[0]) if texts else ""}
        case "message" if item.get("role") == "assistant":
            content = item.get("content")
            if isinstance(content, list) and content:
                content = _text(content[0])
            return {"role": "assistant", "content": content or ""}
        case "message" if "role" in item:
            return dict(item)
        case _:
            raise UnscorableError(Unscorable.UNSUPPORTED_FIELD)


def _text(part: object) -> str:
    text = part.get("text") if isinstance(part, dict) else None
    if not isinstance(text, str):
        raise UnscorableError(Unscorable.BAD_PROMPT)
    return text


def _tools(tools: object) -> Sequence[Mapping[str, Any]] | None:
    if not tools:
        return None
    given = _checked_items(tools)
    if any(each.get("type") in _OTHER_FUNCTIONS for each in given):
        raise UnscorableError(Unscorable.UNSUPPORTED_FIELD)
    return [
        {"type": "function", "function": {key: each[key] for key in each if key != "type"}}
        for each in given
        if each.get("type") == "function"
    ]
