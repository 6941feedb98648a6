"""What a request asks the engine to feed the model, in one of three forms, or why we can't tell.

Rules:

1. Wrong tokens are worse than none: whatever we can't render as the engine does is unscorable,
   with a reason that is a metric label.
2. A shape is what the client asked for, by whatever path: `core.prompt.request_shape` and its
   neighbours read it from bodies, `core.prompt.template_inputs` puts it in the form in which vLLM
   hands it to a chat template, `core.prompt.tokenize_body` into a question to the engine.
3. No URL is ever fetched. Of a media part only its kind is kept (`core.prompt.media_prefix`).

Cost of a digest: linear in the text, about 1 ms for a million characters.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec
from xxhash import xxh3_128_digest


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
    TEMPLATE_ENDLESS = "template_endless"
    """The chat template was stopped: it did more than any chat needs."""
    PARITY = "parity"
    """The local tokenizer has given other ids than the engine, and the engine may not be asked."""
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


class IdsShape(msgspec.Struct, frozen=True, kw_only=True, gc=False):
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
    """A chat, as the client sent it, by whatever path."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    tools_are_off: bool = False
    """`tool_choice: none`: some engines are told to leave the tools out then."""
    documents: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    reasoning_effort: str | None = None
    thinking_is_off: bool = False
    """Asked for in Anthropic's words; what effort that is depends on the template."""
    merges_system: bool = False
    """System messages join the first one, if the template wants one at the beginning only."""
    truncation: Truncation | None = None
    has_media: bool = False
    """Some parts are pictures, sounds or films; they are without their content here."""


PromptShape = IdsShape | TextShape | ChatShape


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


def shape_digest(
    shape: TextShape | ChatShape, model: str, more: Mapping[str, Any] | None = None
) -> bytes:
    """Key under which the tokens of this prompt are remembered. Raises UnscorableError."""
    try:
        encoded = msgspec.msgpack.encode((type(shape).__name__, model, shape, more))
    except (UnicodeEncodeError, OverflowError) as error:  # a lone surrogate, an int over 64 bits
        raise UnscorableError(Unscorable.BAD_PROMPT) from error
    return xxh3_128_digest(encoded)
