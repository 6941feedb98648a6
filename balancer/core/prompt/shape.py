"""What a request asks the engine to feed the model, in one of three forms, or why we can't tell.

Rules:

1. Wrong tokens are worse than none: whatever we can't render as the engine does is unscorable,
   with a reason that is a metric label.
2. Messages and tools are put in the form in which vLLM hands them to a chat template: parts
   joined or kept (`ChatTemplate.content_format`), tool-call arguments as objects, declared
   fields of tools first and never left out.
3. No URL is ever fetched. Of a media part only its kind is kept (`core.prompt.media_prefix`).

Cost: linear in messages and tools, not in text.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import msgspec
from xxhash import xxh3_128_digest

from balancer.core.prompt.chat_template import ChatInputs, ContentFormat
from balancer.core.request import Endpoint, GenerateRequest


class Unscorable(StrEnum):
    """Why a prompt has no tokens. A metric label."""

    BAD_TOKENS = "bad_tokens"
    """Not what an engine accepts as ids; it will answer 400."""
    BAD_PROMPT = "bad_prompt"
    """Missing, empty or of a wrong type; the engine will answer 400."""
    NOT_UNICODE = "not_unicode"
    """A lone surrogate: no tokenizer of ours takes it, and it can't be hashed."""
    PROMPT_EMBEDS = "prompt_embeds"
    MULTIMODAL = "multimodal"
    TRUNCATED = "truncated"
    """Text cut by `truncate_prompt_tokens` in a way that only the engine knows."""
    TOO_MANY_PROMPTS = "too_many_prompts"
    """More prompts in one request than are looked up."""
    TOO_LONG = "too_long"
    """More tokens than are hashed for one request, or than the model takes."""
    UNSUPPORTED_FIELD = "unsupported_field"
    """A field shapes the prompt in a way that this source of tokens can't follow."""
    NO_TOKENIZER = "no_tokenizer"
    """No local tokenizer for this model, and the engine may not or can't be asked."""
    TOKENIZER_FAILED = "tokenizer_failed"
    REFUSED = "refused"
    """Template or engine refuse this prompt."""
    BUSY = "busy"
    """Too many prompts are being tokenised."""
    TIMEOUT = "timeout"


class UnscorableError(Exception):
    """There are no tokens for this prompt, and why."""

    def __init__(self, reason: Unscorable) -> None:
        super().__init__(reason.value)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """`truncate_prompt_tokens`: how many tokens stay."""

    limit_tokens: int
    keeps_start: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class IdsShape:
    """Prompts given as token ids."""

    prompts: tuple[Sequence[int], ...]
    truncation: Truncation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextShape:
    """Prompts given as text."""

    texts: tuple[str, ...]
    add_special_tokens: bool = True
    truncation: Truncation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatShape:
    """A chat, as the client sent it."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    reasoning_effort: str | None = None
    truncation: Truncation | None = None
    has_media: bool = False
    """Some parts are pictures, sounds or films; they are without their content here."""


PromptShape = IdsShape | TextShape | ChatShape

MEDIA_PARTS: Final = {
    "image_url": "image",
    "image_pil": "image",
    "image_embeds": "image",
    "input_image": "image",
    "image": "image",
    "audio_url": "audio",
    "input_audio": "audio",
    "audio_embeds": "audio",
    "audio": "audio",
    "video_url": "video",
    "video": "video",
}
"""Kind of each media part, as the engine names it to a template that sees parts."""
TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking"})


def shape_prompt(request: GenerateRequest) -> PromptShape:
    """Read the prompt-shaping fields of `request`. Raises UnscorableError."""
    body = request.body
    if not request.is_unicode:
        raise UnscorableError(Unscorable.NOT_UNICODE)
    if request.endpoint is Endpoint.CHAT:
        return _chat(body)
    return _completion(body)


def _completion(body: Mapping[str, Any]) -> IdsShape | TextShape:
    if body.get("prompt_embeds") is not None:
        raise UnscorableError(Unscorable.PROMPT_EMBEDS)
    prompt = body.get("prompt")
    truncation = _truncation(body)
    special = _flag(body, "add_special_tokens", default=True)
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


def _chat(body: Mapping[str, Any]) -> ChatShape:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise UnscorableError(Unscorable.BAD_PROMPT)
    for message in messages:
        _check_message(message)
    bare = [_without_media(message) for message in messages]
    if body.get("mm_processor_kwargs") or body.get("media_io_kwargs"):
        raise UnscorableError(Unscorable.UNSUPPORTED_FIELD)
    return ChatShape(
        messages=bare,
        has_media=any(new is not old for new, old in zip(bare, messages, strict=True)),
        tools=_objects(body, "tools"),
        documents=_objects(body, "documents"),
        add_generation_prompt=_flag(body, "add_generation_prompt", default=True),
        continue_final_message=_flag(body, "continue_final_message", default=False),
        add_special_tokens=_flag(body, "add_special_tokens", default=False),
        chat_template=_optional(body, "chat_template", str),
        chat_template_kwargs=_optional(body, "chat_template_kwargs", dict) or {},
        reasoning_effort=_optional(body, "reasoning_effort", str),
        truncation=_truncation(body),
    )


def _check_message(message: object) -> None:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise UnscorableError(Unscorable.BAD_PROMPT)
    content = message.get("content")
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list):
        raise UnscorableError(Unscorable.BAD_PROMPT)
    for part in content:
        if not isinstance(part, str):
            _check_part(part)


def _check_part(part: object) -> None:
    if not isinstance(part, dict):
        raise UnscorableError(Unscorable.BAD_PROMPT)
    kind = part.get("type", "text")
    if kind == "prompt_embeds":
        raise UnscorableError(Unscorable.PROMPT_EMBEDS)
    if kind in MEDIA_PARTS:
        return
    if kind not in TEXT_PARTS:
        raise UnscorableError(Unscorable.MULTIMODAL)
    if not isinstance(_part_text(part), str | None):
        raise UnscorableError(Unscorable.BAD_PROMPT)


def _without_media(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message itself if it has none; else with nothing but the kind of each."""
    content = message.get("content")
    if not isinstance(content, list) or not any(_is_medium(part) for part in content):
        return message
    bare = [{"type": MEDIA_PARTS[part["type"]]} if _is_medium(part) else part for part in content]
    return {**message, "content": bare}


def _is_medium(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") in MEDIA_PARTS


def _part_text(part: Mapping[str, Any]) -> Any:
    """In vLLM the text of a refusal or thinking part is in a field of that name."""
    kind = part.get("type", "text")
    return part.get(kind) if kind in {"refusal", "thinking"} else part.get("text")


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
    value = _optional(body, name, list)
    if value and not all(isinstance(each, dict) for each in value):
        raise UnscorableError(Unscorable.BAD_PROMPT)
    return value or None


def _truncation(body: Mapping[str, Any]) -> Truncation | None:
    limit = body.get("truncate_prompt_tokens")
    if limit is None:
        return None
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        # -1 means the model's limit, which the engine knows and we would have to trust.
        raise UnscorableError(Unscorable.TRUNCATED)
    return Truncation(limit_tokens=limit, keeps_start=body.get("truncation_side") == "right")


def truncate_ids(ids: Sequence[int], truncation: Truncation | None) -> Sequence[int]:
    """Cut a prompt that was given as ids. The engine does just this."""
    if truncation is None or len(ids) <= truncation.limit_tokens:
        return ids
    if truncation.keeps_start:
        return ids[: truncation.limit_tokens]
    return ids[-truncation.limit_tokens :]


def check_text_length(tokens: int, truncation: Truncation | None) -> None:
    """Text that would be cut depends on the tokenizer's special tokens: leave it to the engine."""
    if truncation is not None and tokens > truncation.limit_tokens:
        raise UnscorableError(Unscorable.TRUNCATED)


def template_inputs(shape: ChatShape, content_format: ContentFormat) -> ChatInputs:
    """Put a chat in the form in which the engine shows it to its template."""
    extra = dict(shape.chat_template_kwargs)
    if shape.reasoning_effort is not None:
        extra["reasoning_effort"] = shape.reasoning_effort
    return ChatInputs(
        messages=[_message(each, content_format) for each in shape.messages],
        tools=None if shape.tools is None else [_tool(each) for each in shape.tools],
        documents=shape.documents,
        add_generation_prompt=shape.add_generation_prompt,
        continue_final_message=shape.continue_final_message,
        extra=extra,
    )


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
    if isinstance(name := message.get("name"), str):
        shown["name"] = name
    return shown


def _content(message: Mapping[str, Any], content_format: ContentFormat) -> Any:
    content = message.get("content")
    parts = [content] if isinstance(content, str) else content or []
    texts = [part if isinstance(part, str) else _part_text(part) for part in parts]
    if content_format == "string":
        return "\n".join(text for text in texts if text)
    if message["role"] == "tool":  # joined for any template: few can show a list of parts here
        return "\n".join(text for text in texts if text is not None)
    return [
        part if _is_medium(part) else {"type": "text", "text": text}
        for part, text in zip(parts, texts, strict=True)
        if text is not None or _is_medium(part)
    ]


def _tool_call(call: object) -> Mapping[str, Any]:
    """Templates want arguments as an object; clients send JSON text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise UnscorableError(Unscorable.BAD_PROMPT)
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments:
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = {}
    shown = arguments if isinstance(arguments, dict) else {}
    return {**call, "function": {**function, "arguments": shown}}


def _tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Fields as the engine's own model dumps them: declared ones first, absent ones as null."""
    function = tool.get("function")
    if not isinstance(function, dict):
        raise UnscorableError(Unscorable.BAD_PROMPT)
    declared = {name: function.get(name) for name in ("name", "description", "parameters")}
    rest = {name: value for name, value in function.items() if name not in declared}
    return {"type": tool.get("type", "function"), "function": declared | rest}


def tokenize_bodies(shape: TextShape | ChatShape, model: str) -> Sequence[Mapping[str, Any]]:
    """Bodies for the engine's `/tokenize`, one per prompt. Raises UnscorableError."""
    if isinstance(shape, TextShape):
        return [
            {"model": model, "prompt": text, "add_special_tokens": shape.add_special_tokens}
            for text in shape.texts
        ]
    if shape.documents is not None or shape.reasoning_effort is not None:
        raise UnscorableError(Unscorable.UNSUPPORTED_FIELD)
    body = {
        "model": model,
        "messages": shape.messages,
        "add_generation_prompt": shape.add_generation_prompt,
        "continue_final_message": shape.continue_final_message,
        "add_special_tokens": shape.add_special_tokens,
    }
    if shape.tools is not None:
        body["tools"] = shape.tools
    if shape.chat_template is not None:
        body["chat_template"] = shape.chat_template
    if shape.chat_template_kwargs:
        body["chat_template_kwargs"] = shape.chat_template_kwargs
    return [body]


def shape_digest(shape: TextShape | ChatShape, model: str) -> bytes:
    """Key under which the tokens of this prompt are remembered. Raises UnscorableError."""
    try:
        encoded = msgspec.msgpack.encode((type(shape).__name__, model, shape))
    except (UnicodeEncodeError, OverflowError) as error:  # a lone surrogate, an int over 64 bits
        raise UnscorableError(Unscorable.BAD_PROMPT) from error
    return xxh3_128_digest(encoded)
