"""Makes answers in text of answers in token ids, as an engine with `--enable-scale-out` does.

Shapes are those of vLLM 0.32. Streams, which are derendered chunk by chunk, are not here.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from simulator.answers import render_message
from simulator.bodies import TokenId, decode_body
from simulator.core import tokenizer
from simulator.core.errors import RequestRefusedError
from simulator.engine import SimulatedEngine
from simulator.exchange import Exchange


class Generated(msgspec.Struct, kw_only=True):
    """One choice of an answer in token ids."""

    index: int
    token_ids: list[TokenId] | None = None
    finish_reason: str | None = "stop"
    stop_reason: int | str | None = None


class GeneratedAnswer(msgspec.Struct, kw_only=True):
    """An answer in token ids, as `/inference/v1/generate` gives it."""

    choices: list[Generated]
    request_id: str | None = None
    kv_transfer_params: dict[str, Any] | None = None


class DerenderChatBody(msgspec.Struct, kw_only=True):
    """POST /v1/chat/completions/derender."""

    generate_response: GeneratedAnswer
    model: str | None = None
    prompt_tokens: int | None = None


class DerenderCompletionBody(msgspec.Struct, kw_only=True):
    """POST /v1/completions/derender."""

    generate_responses: list[GeneratedAnswer]
    model: str | None = None
    prompt_tokens: list[int] | None = None


async def derender_chat(engine: SimulatedEngine, exchange: Exchange) -> None:
    """Make a chat's answer of token ids."""
    body = decode_body(exchange.body, exchange.headers.get("content-type", ""), DerenderChatBody)
    served, _, _ = engine.find_adapter(body.model)
    told = body.generate_response
    choices = [
        {
            "index": each.index,
            "message": render_message(_text(each)),
            "logprobs": None,
            "finish_reason": each.finish_reason,
            "stop_reason": each.stop_reason,
            "token_ids": None,
        }
        for each in told.choices
    ]
    answer = {
        "id": told.request_id or engine.random_hex(32),
        "object": "chat.completion",
        "created": int(engine.wall_clock()),
        "model": body.model or served,
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": None,
        "usage": _usage(body.prompt_tokens or 0, [told]),
        "prompt_logprobs": None,
        "prompt_token_ids": None,
        "prompt_text": None,
        "kv_transfer_params": told.kv_transfer_params,
        "ec_transfer_params": None,
        "metrics": None,
    }
    await exchange.send_json(answer)


async def derender_completion(engine: SimulatedEngine, exchange: Exchange) -> None:
    """Make a completion of token ids."""
    body = decode_body(
        exchange.body, exchange.headers.get("content-type", ""), DerenderCompletionBody
    )
    served, _, _ = engine.find_adapter(body.model)
    told = body.generate_responses
    if not told:
        raise RequestRefusedError("generate_responses must not be empty")
    every = [choice for each in told for choice in each.choices]
    if not all(each.token_ids for each in every):
        raise RequestRefusedError("a choice has empty or null token_ids")
    choices = [
        {
            "index": index,
            "text": _text(each),
            "logprobs": None,
            "finish_reason": each.finish_reason,
            "stop_reason": each.stop_reason,
            "token_ids": None,
            "prompt_logprobs": None,
            "prompt_token_ids": None,
        }
        for index, each in enumerate(every)
    ]
    answer = {
        "id": told[0].request_id or engine.random_hex(32),
        "object": "text_completion",
        "created": int(engine.wall_clock()),
        "model": body.model or served,
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": None,
        "usage": _usage(sum(body.prompt_tokens or ()), told),
        "kv_transfer_params": told[0].kv_transfer_params,
        "ec_transfer_params": None,
        "metrics": None,
    }
    await exchange.send_json(answer)


def _text(choice: Generated) -> str:
    return tokenizer.decode(choice.token_ids or (), skip_special_tokens=True)


def _usage(prompt_tokens: int, told: Sequence[GeneratedAnswer]) -> dict[str, Any]:
    said = sum(len(choice.token_ids or ()) for each in told for choice in each.choices)
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + said,
        "completion_tokens": said,
        "prompt_tokens_details": None,
    }
