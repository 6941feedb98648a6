"""From a completions or chat body to the shape of its prompt.

Rules:

1. What the engine will refuse is unscorable, and so is what changes the prompt in a way that can't be
   followed. No more is checked than that: judging requests is the engine's business.
2. `reasoning_content` is the old name of `reasoning`; a message that has both keeps the new one.

Cost: linear in messages and tools, not in text.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from balancer.core.prompt.content_parts import check_part, without_media
from balancer.core.prompt.shape import (
    ChatShape,
    IdsShape,
    TextShape,
    Truncation,
    Unscorable,
    UnscorableError,
)


def shape_completion(
    body: Mapping[str, Any], ids: Sequence[int] | None = None
) -> IdsShape | TextShape:
    """Read a completions body. Raises UnscorableError.

    `ids`: what its prompt is, where that is known already.
    """
    if body.get("prompt_embeds") is not None:
        raise UnscorableError(Unscorable.PROMPT_EMBEDS)
    if body.get("suffix") is not None:  # a few models have a way to write it, the others refuse
        raise UnscorableError(Unscorable.UNSUPPORTED_FIELD)
    prompt = body.get("prompt")
    truncation = _truncation(body)
    special = _flag(body, "add_special_tokens", default=True)
    if ids is not None:
        return IdsShape(prompts=(ids,), truncation=truncation)
    return _written_prompt(prompt, special, truncation)


def _written_prompt(
    prompt: object, special: bool, truncation: Truncation | None
) -> IdsShape | TextShape:
    if isinstance(prompt, str) and prompt:
        return TextShape(texts=(prompt,), add_special_tokens=special, truncation=truncation)
    if not isinstance(prompt, list) or not prompt:
        raise UnscorableError(Unscorable.BAD_PROMPT)
    match prompt[0]:
        case str() if all(isinstance(each, str) and each for each in prompt):
            return TextShape(texts=tuple(prompt), add_special_tokens=special, truncation=truncation)
        case int():
            return IdsShape(prompts=(prompt,), truncation=truncation)
        case list() if all(isinstance(each, list) and each for each in prompt):
            return IdsShape(prompts=tuple(prompt), truncation=truncation)
        case _:
            raise UnscorableError(Unscorable.BAD_PROMPT)


def shape_chat(body: Mapping[str, Any]) -> ChatShape:
    """Read a chat completions body. Raises UnscorableError."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise UnscorableError(Unscorable.BAD_PROMPT)
    bare, has_media = checked_messages(messages)
    if body.get("mm_processor_kwargs") or body.get("media_io_kwargs"):
        raise UnscorableError(Unscorable.UNSUPPORTED_FIELD)
    return ChatShape(
        messages=bare,
        has_media=has_media,
        tools=_objects(body, "tools") or None,  # engines refuse an empty list
        tools_are_off=body.get("tool_choice") == "none",
        documents=_objects(body, "documents"),
        add_generation_prompt=_flag(body, "add_generation_prompt", default=True),
        continue_final_message=_flag(body, "continue_final_message", default=False),
        add_special_tokens=_flag(body, "add_special_tokens", default=False),
        chat_template=_optional(body, "chat_template", str),
        chat_template_kwargs=template_variables(body),
        reasoning_effort=_optional(body, "reasoning_effort", str),
        truncation=_truncation(body),
    )


def checked_messages(
    messages: Sequence[object],
) -> tuple[Sequence[Mapping[str, Any]], bool]:
    """The messages without what is in their media, and if there are any. Raises UnscorableError."""
    checked = [_checked(message) for message in messages]
    bare = [without_media(message) for message in checked]
    return bare, any(new is not old for new, old in zip(bare, checked, strict=True))


def template_variables(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """`chat_template_kwargs`. Raises UnscorableError."""
    given: Mapping[str, Any] = _optional(body, "chat_template_kwargs", dict) or {}
    if given.get("chat_template") is not None:  # for other messages than the field of that name
        raise UnscorableError(Unscorable.UNSUPPORTED_FIELD)
    return given


def _checked(message: object) -> Mapping[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise UnscorableError(Unscorable.BAD_PROMPT)
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            check_part(part)
    elif not isinstance(content, str | None):
        raise UnscorableError(Unscorable.BAD_PROMPT)
    if "reasoning_content" not in message:
        return message
    renamed = {key: value for key, value in message.items() if key != "reasoning_content"}
    if renamed.get("reasoning") is None:
        renamed["reasoning"] = message["reasoning_content"]
    return renamed


def _flag(body: Mapping[str, Any], name: str, *, default: bool) -> bool:
    value = body.get(name, default)
    if not isinstance(value, bool):
        raise UnscorableError(Unscorable.BAD_PROMPT)
    return value


def _optional(body: Mapping[str, Any], name: str, type_: type[Any]) -> Any:
    value = body.get(name)
    if value is not None and not isinstance(value, type_):
        raise UnscorableError(Unscorable.BAD_PROMPT)
    return value


def _objects(body: Mapping[str, Any], name: str) -> Sequence[Mapping[str, Any]] | None:
    value: list[Any] | None = _optional(body, name, list)
    if value and not all(isinstance(each, dict) for each in value):
        raise UnscorableError(Unscorable.BAD_PROMPT)
    return value


def shape_tokens(body: Mapping[str, Any]) -> IdsShape:
    """Read an `/inference/v1/generate` body: ids, as they are. Raises UnscorableError."""
    ids = body.get("token_ids")
    if body.get("features") or body.get("content_parts"):
        raise UnscorableError(Unscorable.MULTIMODAL)
    if not isinstance(ids, list) or not ids:
        raise UnscorableError(Unscorable.BAD_PROMPT)
    return IdsShape(prompts=(ids,))


def _truncation(body: Mapping[str, Any]) -> Truncation | None:
    limit = body.get("truncate_prompt_tokens")
    if limit is None:
        return None
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        # -1 means the model's limit, which the engine knows and we would have to trust.
        raise UnscorableError(Unscorable.TRUNCATED)
    return Truncation(limit_tokens=limit, keeps_start=body.get("truncation_side") == "right")
