"""Several prompts in one request: batches of chats, and items that are scored by their next token."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from simulator.answers import AnswerOptions, ChatAnswer, Choice
from simulator.bodies import ChatBody, CompletionBody, decode_body
from simulator.core import tokenizer
from simulator.core.errors import InvalidBodyError, RequestRefusedError
from simulator.engine import SimulatedEngine
from simulator.exchange import Exchange
from simulator.generation import Generation, making
from simulator.generation_api import generate
from simulator.prompts import read_chat_prompt


class BatchBody(msgspec.Struct, kw_only=True):
    """POST /v1/chat/completions/batch: of a chat's fields those that make sense for many."""

    messages: list[list[dict[str, Any]]]
    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    logprobs: bool | None = None
    use_beam_search: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_ids: bool | None = None
    cache_salt: str | None = None
    request_id: str | None = None


class ScoringBody(msgspec.Struct, kw_only=True):
    """POST /generative_scoring."""

    query: str | list[int]
    items: list[str | list[int]]
    label_token_ids: list[int]
    model: str | None = None
    apply_softmax: bool = True
    item_first: bool = False
    add_special_tokens: bool = True
    cache_salt: str | None = None
    request_id: str | None = None


async def chat_batch(engine: SimulatedEngine, exchange: Exchange) -> None:
    """Answer every conversation, in one choice each."""
    body = decode_body(exchange.body, exchange.headers.get("content-type", ""), BatchBody)
    if body.use_beam_search or (body.n is not None and body.n > 1):
        name = "use_beam_search" if body.use_beam_search else "n"
        raise InvalidBodyError(f"Batch chat completions do not support `{name}`.", param=name)
    if not body.messages:
        raise InvalidBodyError("messages: at least one conversation is needed", param="messages")
    context_tokens = engine.settings.context_tokens
    prompts = [
        read_chat_prompt(
            ChatBody(
                messages=each,
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
            ),
            context_tokens,
        ).token_ids
        for each in body.messages
    ]
    wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    most = max(1, context_tokens - max(map(len, prompts))) if wanted is None else wanted
    completion = CompletionBody(
        prompt=prompts,
        model=body.model,
        max_tokens=most,
        stop=body.stop,
        temperature=body.temperature,
        top_p=body.top_p,
        logprobs=0 if body.logprobs else None,
        return_token_ids=body.return_token_ids,
        cache_salt=body.cache_salt,
        request_id=body.request_id,
    )
    await generate(engine, exchange, completion, making(Generation, BatchAnswer))


async def score_next(engine: SimulatedEngine, exchange: Exchange) -> None:
    """Say of every item how likely the first label is to come next."""
    body = decode_body(exchange.body, exchange.headers.get("content-type", ""), ScoringBody)
    engine.find_adapter(body.model)
    for token_id in body.label_token_ids:
        if not 0 <= token_id < tokenizer.VOCABULARY_TOKENS:
            raise RequestRefusedError(
                f"label_token_id {token_id} is out of vocabulary range "
                f"[0, {tokenizer.VOCABULARY_TOKENS}). Please provide valid token IDs."
            )
    for name in ("label_token_ids", "items"):
        if not getattr(body, name):
            raise RequestRefusedError(f"{name} must contain at least one of them.")
    most = engine.settings.context_tokens - 1
    query = _ids(body.query, is_special=body.add_special_tokens)
    items = [_ids(each, is_special=False) for each in body.items]
    prompts = [(each + query if body.item_first else query + each)[:most] for each in items]
    completion = CompletionBody(
        prompt=prompts,
        model=body.model,
        max_tokens=1,
        cache_salt=body.cache_salt,
        request_id=body.request_id,
    )
    await generate(engine, exchange, completion, making(Generation, partial(ScoringAnswer, body)))


def _ids(given: str | list[int], *, is_special: bool) -> list[int]:
    if isinstance(given, list):
        return given
    return tokenizer.encode(given, add_special_tokens=is_special)


class BatchAnswer:
    """A chat's answer with a choice per conversation; of the cache it says nothing."""

    def __init__(self, options: AnswerOptions) -> None:
        response_id = options.response_id.replace("cmpl-", "chatcmpl-", 1)
        self._chat = ChatAnswer(replace(options, response_id=response_id))

    def render_whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        told = self._chat.render_whole(choices)
        told["usage"]["prompt_tokens_details"] = None
        return told | {"prompt_token_ids": None}


class ScoringAnswer:
    """Scores of /generative_scoring: of every label one number, made of the prompt and its id."""

    def __init__(self, body: ScoringBody, options: AnswerOptions) -> None:
        self._body = body
        self._options = options

    def render_whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        prompt_tokens = sum(len(each.prompt.token_ids) for each in choices)
        completion_tokens = sum(len(each.token_ids) for each in choices)
        return {
            "id": self._options.response_id.replace("cmpl-", "generative-scoring-", 1),
            "object": "list",
            "created": self._options.created_unix_s,
            "model": self._options.model,
            "data": [
                {"index": each.index, "object": "score", "score": self._score(each)}
                for each in choices
            ],
            "usage": {
                "prompt_tokens": prompt_tokens,
                "total_tokens": prompt_tokens + completion_tokens,
                "completion_tokens": completion_tokens,
                "prompt_tokens_details": None,
            },
        }

    def _score(self, choice: Choice) -> float:
        seed = sum(choice.prompt.token_ids)
        weights = [math.exp(math.sin(seed + label)) for label in self._body.label_token_ids]
        whole = sum(weights) if self._body.apply_softmax else tokenizer.VOCABULARY_TOKENS * math.e
        return weights[0] / whole
