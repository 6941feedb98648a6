"""Turns the prompts of a body into token ids."""

from dataclasses import dataclass
from typing import Any

from simulator.bodies import ChatBody, CompletionBody, TokenizeBody
from simulator.core import tokenizer
from simulator.core.chat_template import render_chat
from simulator.core.errors import InvalidBodyError, RequestRefusedError

_NO_PROMPT = "Either prompt or prompt_embeds must be provided and non-empty."


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Token ids, and the text they came from if it was text."""

    token_ids: list[int]
    text: str | None


def read_completion_prompts(body: CompletionBody, context_tokens: int) -> list[Prompt]:
    """Return one prompt per string or list of ids."""
    prompts = [
        _truncate(prompt, body.truncate_prompt_tokens, context_tokens)
        for prompt in _read_prompts(body)
    ]
    if not prompts or not all(prompt.token_ids for prompt in prompts):
        raise InvalidBodyError(_NO_PROMPT, param="prompt")
    return prompts


def read_chat_prompt(body: ChatBody, context_tokens: int, *, takes_media: bool = False) -> Prompt:
    """Return the rendered conversation."""
    if body.chat_template is not None:
        raise RequestRefusedError(
            "Chat template is passed with request, but --trust-request-chat-template is not set. "
            "Refused request with untrusted chat template."
        )
    prompt = _render(body, takes_media=takes_media)
    return _truncate(prompt, body.truncate_prompt_tokens, context_tokens)


def read_tokenize_prompt(body: TokenizeBody) -> Prompt:
    """Return what `/tokenize` is asked about."""
    if body.messages is not None:
        return _render(body)
    if body.prompt is None:
        raise InvalidBodyError("Field required: prompt or messages", param="prompt")
    return _encode(body.prompt, is_special=body.add_special_tokens is not False)


def _render(body: ChatBody | TokenizeBody, *, takes_media: bool = False) -> Prompt:
    if not body.messages:
        raise InvalidBodyError("messages: at least one message is needed", param="messages")
    text = render_chat(
        body.messages,
        tools=body.tools,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        takes_media=takes_media,
    )
    return _encode(text, is_special=bool(body.add_special_tokens))


def _encode(text: str, *, is_special: bool) -> Prompt:
    return Prompt(token_ids=tokenizer.encode(text, add_special_tokens=is_special), text=text)


def _read_prompts(body: CompletionBody) -> list[Prompt]:
    given = body.prompt
    if not given:
        raise InvalidBodyError(_NO_PROMPT, param="prompt")
    is_special = body.add_special_tokens is not False
    if isinstance(given, str):
        return [_encode(given, is_special=is_special)]
    if isinstance(given[0], int):
        return [_check_ids(given)]
    return [_read_one(item, is_special) for item in given]


def _read_one(item: object, is_special: bool) -> Prompt:
    if isinstance(item, str) and item:
        return _encode(item, is_special=is_special)
    if isinstance(item, list) and item:
        return _check_ids(item)
    raise InvalidBodyError("prompt: expected strings or lists of token ids", param="prompt")


def _check_ids(token_ids: list[Any]) -> Prompt:
    if not all(type(token_id) is int for token_id in token_ids):
        raise InvalidBodyError("prompt: token ids must be integers", param="prompt")
    wrong = next((i for i in token_ids if not 0 <= i < tokenizer.VOCABULARY_TOKENS), None)
    if wrong is not None:
        raise RequestRefusedError(f"Token id {wrong} is out of vocabulary")
    return Prompt(token_ids=token_ids, text=None)


def _truncate(prompt: Prompt, keep_tokens: int | None, context_tokens: int) -> Prompt:
    """Keep the end of a prompt; -1 keeps as much as the model takes."""
    if keep_tokens is None:
        return prompt
    if keep_tokens < -1:
        raise InvalidBodyError("truncate_prompt_tokens must be at least -1")
    keep = context_tokens if keep_tokens == -1 else keep_tokens
    first = max(0, len(prompt.token_ids) - keep)
    return Prompt(token_ids=prompt.token_ids[first:], text=prompt.text)
