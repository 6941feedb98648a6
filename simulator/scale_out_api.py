"""What an engine with `--enable-scale-out` serves beside: rendering, and token ids in and out.

Shapes are those of vLLM 0.32. Not here: media, and `output_mode: text`.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal

import msgspec

from simulator.answers import AnswerOptions, Choice, render_usage
from simulator.bodies import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    check_generation,
    check_limits,
    decode_body,
)
from simulator.core.errors import RequestRefusedError, ScaleOutOffError
from simulator.derender_api import derender_chat, derender_completion
from simulator.engine import SimulatedEngine
from simulator.exchange import Exchange, render_error
from simulator.generation import ChunkGeneration, making
from simulator.generation_api import generate
from simulator.messages_api import MessagesBody
from simulator.prompts import Prompt, read_chat_prompt, read_completion_prompts

Ids = list[int]


class SamplingParams(msgspec.Struct, kw_only=True):
    """Of a GenerateRequest."""

    max_tokens: int | None = None
    min_tokens: int = 0
    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False


class GenerateBody(msgspec.Struct, kw_only=True):
    """POST /inference/v1/generate."""

    token_ids: Ids
    sampling_params: SamplingParams
    model: str | None = None
    request_id: str | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    output_mode: Literal["tokens"] = "tokens"
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None


async def generate_ids(engine: SimulatedEngine, exchange: Exchange) -> None:
    """Continue token ids in token ids."""
    body = _decode(exchange, GenerateBody)
    params = body.sampling_params
    most = max(1, engine.settings.context_tokens - len(body.token_ids))
    completion = CompletionBody(
        prompt=[body.token_ids],
        model=body.model,
        max_tokens=most if params.max_tokens is None else params.max_tokens,
        min_tokens=params.min_tokens,
        n=params.n,
        temperature=params.temperature,
        top_p=params.top_p,
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        stream=body.stream,
        stream_options=body.stream_options,
        return_token_ids=body.return_token_ids,
        cache_salt=body.cache_salt,
        request_id=body.request_id,
        kv_transfer_params=body.kv_transfer_params,
    )
    await generate(engine, exchange, completion, making(_IdsGeneration, IdsAnswer))


async def render_chat(engine: SimulatedEngine, exchange: Exchange) -> None:
    """Say what a chat would be run as."""
    body = _decode(exchange, ChatBody)
    await exchange.send_json(_render_chat(engine, exchange, body))


async def render_message(engine: SimulatedEngine, exchange: Exchange) -> None:
    """Say what a message would be run as."""
    body = _decode(exchange, MessagesBody)
    await exchange.send_json(_render_chat(engine, exchange, body.chat()))


async def render_completion(engine: SimulatedEngine, exchange: Exchange) -> None:
    """Say what every prompt of a completion would be run as."""
    body = _decode(exchange, CompletionBody)
    check_generation(body)
    engine.find_adapter(body.model)
    prompts = read_completion_prompts(body, engine.settings.context_tokens)
    name = f"cmpl-{_base_id(engine, exchange, body)}"
    names = [name] if len(prompts) == 1 else [f"{name}-{each}" for each in range(len(prompts))]
    rendered = [
        _render(engine, body, prompt, each) for prompt, each in zip(prompts, names, strict=True)
    ]
    await exchange.send_json(rendered)


SCALE_OUT: dict[str, Callable[[SimulatedEngine, Exchange], Awaitable[None]]] = {
    "/inference/v1/generate": generate_ids,
    "/v1/chat/completions/render": render_chat,
    "/v1/completions/render": render_completion,
    "/v1/messages/render": render_message,
    "/v1/chat/completions/derender": derender_chat,
    "/v1/completions/derender": derender_completion,
}


async def refuse_scale_out(_engine: SimulatedEngine, _exchange: Exchange) -> None:
    """Answer as an engine without the flag."""
    raise ScaleOutOffError(
        "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
    )


def _decode(exchange: Exchange, kind: type[Any]) -> Any:
    return decode_body(exchange.body, exchange.headers.get("content-type", ""), kind)


def _base_id(engine: SimulatedEngine, exchange: Exchange, body: GenerationBody) -> str:
    return exchange.headers.get("x-request-id") or body.request_id or engine.random_hex(16)


def _render_chat(engine: SimulatedEngine, exchange: Exchange, body: ChatBody) -> dict[str, Any]:
    check_generation(body)
    engine.find_adapter(body.model)
    prompt = read_chat_prompt(body, engine.settings.context_tokens)
    return _render(engine, body, prompt, f"chatcmpl-{_base_id(engine, exchange, body)}")


def _render(
    engine: SimulatedEngine, body: CompletionBody | ChatBody, prompt: Prompt, request_id: str
) -> dict[str, Any]:
    """Return a GenerateRequest."""
    if body.use_beam_search:
        raise RequestRefusedError("Beam search is not supported by the render endpoint")
    most = check_limits(body, len(prompt.token_ids), engine.settings.context_tokens)
    sampling = SamplingParams(
        max_tokens=most,
        min_tokens=body.min_tokens,
        n=body.n or 1,
        temperature=body.temperature,
        top_p=body.top_p,
        stop=body.stop_strings,
        stop_token_ids=body.stop_token_ids,
        ignore_eos=bool(body.ignore_eos),
    )
    return {
        "request_id": request_id,
        "token_ids": prompt.token_ids,
        "token_offsets": None,
        "features": None,
        "content_parts": None,
        "sampling_params": msgspec.to_builtins(sampling),
        "model": body.model,
        "reasoning_ended": None,
        "reasoning_parser_kwargs": None,
        "return_token_ids": None,
        "output_mode": "tokens",
        "stream": bool(body.stream),
        "stream_options": body.stream_options if body.stream else None,
        "cache_salt": body.cache_salt,
        "priority": 0,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
    }


class _IdsGeneration(ChunkGeneration):
    _shows_all = True


class IdsAnswer:
    """Answers of /inference/v1/generate."""

    def __init__(self, options: AnswerOptions) -> None:
        self._options = options
        self._request_id = options.response_id.replace("cmpl-", "generate-tokens-", 1)

    def render_whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        options, first = self._options, choices[0]
        return {
            "request_id": self._request_id,
            "model": options.model,
            "created": options.created_unix_s,
            "usage": render_usage(options.settings, choices, is_chat=False),
            "prompt_logprobs": None,
            "prompt_token_id_logprobs": None,
            "prompt_token_ids": first.prompt.token_ids if options.returns_token_ids else None,
            "mm_placeholders": None,
            "metrics": None,
            "kv_transfer_params": first.transfer_params,
            "ec_transfer_params": None,
            "output_mode": "tokens",
            "choices": [self._choice(each, each.token_ids) for each in choices],
        }

    def render_opening(self, choice: Choice) -> None:  # noqa: ARG002 - there is none
        return None

    def render_chunk(self, choice: Choice, text: str, token_id: int | None) -> dict[str, Any]:  # noqa: ARG002
        is_first = self._options.returns_token_ids and len(choice.token_ids) == 1
        shown = [] if token_id is None else [token_id]
        return self._chunk([self._choice(choice, shown)]) | {
            "prompt_token_ids": choice.prompt.token_ids if is_first else None
        }

    def render_usage(self, choices: Sequence[Choice]) -> dict[str, Any]:
        usage = render_usage(self._options.settings, choices, is_chat=False)
        return self._chunk([]) | {"usage": usage}

    def render_failure(self, error: RequestRefusedError) -> dict[str, Any]:
        return render_error(error, self._options.settings.release)

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "request_id": self._request_id,
            "usage": None,
            "prompt_token_ids": None,
            "mm_placeholders": None,
            "metrics": None,
            "output_mode": "tokens",
            "choices": choices,
        }

    def _choice(self, choice: Choice, token_ids: Ids) -> dict[str, Any]:
        return {
            "index": choice.index,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "token_ids": token_ids,
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": None,
            "logprobs": None,
        }
