"""Answers in the shapes of the OpenAI API with vLLM's additions, whole and as stream chunks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from simulator.core import tokenizer
from simulator.core.errors import RequestRefusedError
from simulator.core.settings import EngineSettings
from simulator.core.types import FinishReason, TokenOutput
from simulator.exchange import render_error
from simulator.prompts import Prompt
from simulator.text_output import TextOutput

_FIRST_RELEASE_WITH_CREATED_TOKENS = (0, 26, 0)
_FIRST_RELEASE_WITH_FINGERPRINT = (0, 21, 0)
_FIRST_RELEASE_WITH_STREAMED_PARAMS = (0, 33, 0)


@dataclass(slots=True)
class Choice:
    """One of the sequences of a request, as its tokens arrive."""

    index: int
    request_id: str
    prompt: Prompt
    output: TextOutput
    token_ids: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    transfer_params: Mapping[str, object] | None = None

    def accept(self, output: TokenOutput, *, min_tokens: int) -> None:
        """Take one token; sets `finish_reason` with the last."""
        self.cached_tokens = output.cached_tokens
        self.finish_reason = output.finish_reason
        self.stop_reason = output.stop_reason
        self.transfer_params = output.transfer_params
        if output.token_id is None:
            return
        self.token_ids.append(output.token_id)
        if self.output.push(output.token_id, may_stop=len(self.token_ids) > min_tokens):
            self.finish_reason = "stop"
            self.stop_reason = self.output.stop_string


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """What of the request shapes its answer."""

    settings: EngineSettings
    response_id: str
    created_unix_s: int
    model: str
    echoes: bool
    returns_token_ids: bool
    logprobs: int | None
    prompt_logprobs: int | None


class WholeAnswer(Protocol):
    """How one path renders an answer that isn't streamed."""

    def render_whole(self, choices: Sequence[Choice]) -> dict[str, Any]: ...


class Answer(WholeAnswer, Protocol):
    """How one path renders its answer, and its stream of chunks."""

    def render_opening(self, choice: Choice) -> dict[str, Any] | None:
        """The chunk before the first token, if this path has one."""
        ...

    def render_chunk(self, choice: Choice, text: str, token_id: int | None) -> dict[str, Any]: ...

    def render_usage(self, choices: Sequence[Choice]) -> dict[str, Any]: ...

    def render_failure(self, error: RequestRefusedError) -> dict[str, Any]:
        """The event of a stream that failed after its headers were sent."""
        ...


class CompletionAnswer:
    """Answers of /v1/completions."""

    _object = "text_completion"

    def __init__(self, options: AnswerOptions) -> None:
        self._options = options

    def render_whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        return {
            **self._head(self._object),
            "choices": [self._render_choice(choice) for choice in choices],
            "service_tier": None,
            "system_fingerprint": render_fingerprint(self._options.settings),
            "usage": render_usage(self._options.settings, choices, is_chat=False),
            "kv_transfer_params": choices[0].transfer_params,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def render_opening(self, choice: Choice) -> dict[str, Any] | None:
        if not self._options.echoes or not choice.prompt.text:
            return None
        return self.render_chunk(choice, choice.prompt.text, None)

    def render_chunk(self, choice: Choice, text: str, token_id: int | None) -> dict[str, Any]:
        shows_ids = self._options.returns_token_ids
        is_first = shows_ids and len(choice.token_ids) == 1
        rendered = {
            "index": choice.index,
            "text": text,
            "logprobs": self._render_logprobs([] if token_id is None else [token_id]),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "prompt_token_ids": choice.prompt.token_ids if is_first else None,
            "token_ids": [token_id] if shows_ids and token_id is not None else None,
        }
        return {
            **self._head(self._object),
            "choices": [rendered],
            **render_streamed_params(self._options.settings, choice),
        }

    def render_usage(self, choices: Sequence[Choice]) -> dict[str, Any]:
        return {
            **self._head(self._object),
            "choices": [],
            "usage": render_usage(self._options.settings, choices, is_chat=False),
            "system_fingerprint": render_fingerprint(self._options.settings),
        }

    def render_failure(self, error: RequestRefusedError) -> dict[str, Any]:
        return render_error(error, self._options.settings.release)

    def _head(self, kind: str) -> dict[str, Any]:
        return render_head(self._options, kind)

    def _render_choice(self, choice: Choice) -> dict[str, Any]:
        options = self._options
        echoed = (choice.prompt.text or "") if options.echoes else ""
        shown = [*choice.prompt.token_ids, *choice.token_ids] if echoed else choice.token_ids
        return {
            "index": choice.index,
            "text": echoed + choice.output.text,
            "logprobs": self._render_logprobs(shown),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "token_ids": choice.token_ids if options.returns_token_ids else None,
            "prompt_logprobs": render_prompt_logprobs(options, choice),
            "prompt_token_ids": choice.prompt.token_ids if options.returns_token_ids else None,
        }

    def _render_logprobs(self, token_ids: Sequence[int]) -> dict[str, Any] | None:
        if self._options.logprobs is None:
            return None
        tokens = tokenizer.describe_tokens(token_ids)
        offsets = [0]
        for token in tokens:
            offsets.append(offsets[-1] + len(token))
        return {
            "text_offset": offsets[:-1],
            "token_logprobs": [0.0] * len(tokens),
            "tokens": tokens,
            "top_logprobs": [{token: 0.0} for token in tokens],
        }


class ChatAnswer:
    """Answers of /v1/chat/completions."""

    def __init__(self, options: AnswerOptions) -> None:
        self._options = options

    def render_whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        options, first = self._options, choices[0]
        return {
            **render_head(options, "chat.completion"),
            "choices": [self._render_choice(choice) for choice in choices],
            "service_tier": None,
            "system_fingerprint": render_fingerprint(options.settings),
            "usage": render_usage(options.settings, choices, is_chat=True),
            "prompt_logprobs": render_prompt_logprobs(options, first),
            "prompt_token_ids": first.prompt.token_ids if options.returns_token_ids else None,
            "prompt_text": None,
            "kv_transfer_params": first.transfer_params,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def render_opening(self, choice: Choice) -> dict[str, Any] | None:
        shown = choice.prompt.token_ids if self._options.returns_token_ids else None
        opening = {
            "index": choice.index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        return {
            **render_head(self._options, "chat.completion.chunk"),
            "choices": [opening],
            "prompt_token_ids": shown,
            "prompt_text": None,
        }

    def render_chunk(self, choice: Choice, text: str, token_id: int | None) -> dict[str, Any]:
        shown = [] if token_id is None else [token_id]
        rendered: dict[str, Any] = {
            "index": choice.index,
            "delta": {"content": text},
            "logprobs": self._render_logprobs(shown),
            "finish_reason": choice.finish_reason,
        }
        if choice.finish_reason is not None:
            rendered["stop_reason"] = choice.stop_reason
        rendered["token_ids"] = shown if self._options.returns_token_ids else None
        return {
            **render_head(self._options, "chat.completion.chunk"),
            "choices": [rendered],
            **render_streamed_params(self._options.settings, choice),
        }

    def render_usage(self, choices: Sequence[Choice]) -> dict[str, Any]:
        return {
            **render_head(self._options, "chat.completion.chunk"),
            "choices": [],
            "usage": render_usage(self._options.settings, choices, is_chat=True),
            "system_fingerprint": render_fingerprint(self._options.settings),
        }

    def render_failure(self, error: RequestRefusedError) -> dict[str, Any]:
        return render_error(error, self._options.settings.release)

    def _render_choice(self, choice: Choice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "message": render_message(choice.output.text),
            "logprobs": self._render_logprobs(choice.token_ids),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "token_ids": choice.token_ids if self._options.returns_token_ids else None,
        }

    def _render_logprobs(self, token_ids: Sequence[int]) -> dict[str, Any] | None:
        if self._options.logprobs is None:
            return None
        return {
            "content": [
                {"token": token, "logprob": 0.0, "bytes": list(token.encode()), "top_logprobs": []}
                for token in tokenizer.describe_tokens(token_ids)
            ]
        }


def render_head(options: AnswerOptions, kind: str) -> dict[str, Any]:
    """Return what every answer and every chunk begins with."""
    return {
        "id": options.response_id,
        "object": kind,
        "created": options.created_unix_s,
        "model": options.model,
    }


def render_message(text: str) -> dict[str, Any]:
    """Return what a chat's choice says."""
    return {
        "role": "assistant",
        "content": text,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "reasoning": None,
    }


def render_streamed_params(settings: EngineSettings, choice: Choice) -> dict[str, Any]:
    """Return the transfer parameters that ride on a last chunk, from 0.33 on."""
    if choice.transfer_params is None or settings.release < _FIRST_RELEASE_WITH_STREAMED_PARAMS:
        return {}
    return {"kv_transfer_params": choice.transfer_params}


def render_fingerprint(settings: EngineSettings) -> str | None:
    """Return the fingerprint that tells the release."""
    if settings.release < _FIRST_RELEASE_WITH_FINGERPRINT:
        return None
    return f"vllm-{settings.version}-51a07ed0"


def render_usage(
    settings: EngineSettings, choices: Sequence[Choice], *, is_chat: bool
) -> dict[str, Any]:
    """Count tokens: a prompt once however many answers, cached tokens those of the last choice."""
    prompts = {id(choice.prompt): len(choice.prompt.token_ids) for choice in choices}
    prompt_tokens = sum(prompts.values())
    completion_tokens = sum(len(choice.token_ids) for choice in choices)
    cached_tokens = choices[-1].cached_tokens
    details: dict[str, Any] | None = {"cached_tokens": cached_tokens}
    if not settings.prompt_tokens_details:
        details = None
    elif settings.release < _FIRST_RELEASE_WITH_CREATED_TOKENS:
        # Seen in 0.16: nothing cached is no object at all, not a zero.
        details = details if cached_tokens else None
    elif is_chat and details is not None:
        full_tokens = prompt_tokens // settings.block_size * settings.block_size
        details["created_cache_tokens"] = max(0, full_tokens - cached_tokens)
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": details,
    }


def render_prompt_logprobs(options: AnswerOptions, choice: Choice) -> list[Any] | None:
    """Return one entry per prompt token; the first has nothing to be predicted from."""
    if options.prompt_logprobs is None:
        return None
    described = tokenizer.describe_tokens(choice.prompt.token_ids)
    entries: list[Any] = [
        {str(token_id): {"logprob": 0.0, "rank": 1, "decoded_token": token}}
        for token_id, token in zip(choice.prompt.token_ids, described, strict=True)
    ]
    return [None, *entries[1:]]


def render_encoded(
    *,
    response_id: str,
    created_unix_s: int,
    model: str,
    prompt_tokens: int,
    ec_transfer_params: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """What an engine that only encodes answers: nothing was sampled."""
    message = {"role": "assistant", "content": ""}
    answer: dict[str, Any] = {
        "id": response_id,
        "object": "chat.completion",
        "created": created_unix_s,
        "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens,
            "completion_tokens": 0,
        },
    }
    if ec_transfer_params is not None:
        answer["ec_transfer_params"] = ec_transfer_params
    return answer
