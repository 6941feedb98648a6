"""The usage an engine reports, read tolerantly: a missing figure is unknown, not 0."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec

from balancer.core.http.told_error import FAILED_FINISHES

_Count = Annotated[int, msgspec.Meta(ge=0)]


class Usage(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Tokens of one answer."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    """None without `--enable-prompt-tokens-details`."""


class AnswerHead(msgspec.Struct):
    """The fields of an answer (or of one chunk of a stream) that we look at."""

    usage: Any = None
    choices: msgspec.Raw = msgspec.Raw(b"null")
    error: Any = None


class _PlainDetails(msgspec.Struct):
    cached_tokens: _Count | None = None


class _PlainUsage(msgspec.Struct):
    prompt_tokens: _Count
    completion_tokens: _Count | None = None
    prompt_tokens_details: _PlainDetails | None = None


class _PlainAnswer(msgspec.Struct):
    """An answer as engines write it, save the odd ones: those are read tolerantly."""

    usage: _PlainUsage


class _PlainChunk(msgspec.Struct):
    """The last chunk of a stream, likewise."""

    choices: Annotated[list[Any], msgspec.Meta(max_length=0)]
    usage: _PlainUsage
    error: None = None


_HEAD: Final = msgspec.json.Decoder(AnswerHead)
_PLAIN: Final = msgspec.json.Decoder(_PlainAnswer)
_CHUNK: Final = msgspec.json.Decoder(_PlainChunk)


def usage_of(body: bytes) -> Usage | None:
    """The usage of a whole answer; None if it tells none."""
    try:
        told = _PLAIN.decode(body).usage
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        head = decode_head(body)
        return None if head is None else read_usage(head.usage)
    return _usage(told)


def usage_of_chunk(data: bytes) -> Usage | None:
    """The usage of a chunk that has no choices, and is as engines write it; None: look closer."""
    try:
        return _usage(_CHUNK.decode(data).usage)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _usage(told: _PlainUsage) -> Usage:
    details = told.prompt_tokens_details
    return Usage(
        prompt_tokens=told.prompt_tokens,
        completion_tokens=told.completion_tokens,
        cached_tokens=None if details is None else details.cached_tokens,
    )


def decode_head(data: bytes | bytearray) -> AnswerHead | None:
    """Read the fields we look at; None if `data` is no JSON object."""
    try:
        return _HEAD.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _decode_leniently(data)


def read_usage(value: Any) -> Usage | None:
    """Read a `usage` object, in the words of completions, chat or responses."""
    if not isinstance(value, dict):
        return None
    details = value.get("prompt_tokens_details", value.get("input_tokens_details"))
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return Usage(
        prompt_tokens=_count(value.get("prompt_tokens", value.get("input_tokens"))),
        completion_tokens=_count(value.get("completion_tokens", value.get("output_tokens"))),
        cached_tokens=_count(cached),
    )


def prefill_fault(answer: object) -> str | None:
    """Say what makes a prefill leg's 200 a failure; None if nothing does (field report F37)."""
    if not isinstance(answer, Mapping):
        return "the prefill answer is not a JSON object"
    if answer.get("error") is not None or answer.get("object") == "error":
        return "the prefill answer tells of an error"
    choices = answer.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, Mapping) and choice.get("finish_reason") in FAILED_FINISHES:
            return "the prefill leg was aborted"
    return None


def _count(value: Any) -> int | None:
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return value if is_count else None


def _decode_leniently(data: bytes | bytearray) -> AnswerHead | None:
    """The standard library takes lone surrogates and NaN, which engines do write."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    choices = json.dumps(value.get("choices")).encode()
    return AnswerHead(value.get("usage"), msgspec.Raw(choices), value.get("error"))
