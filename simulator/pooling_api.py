"""Embeddings, scores, classes and ranks: what pooling models serve. Vectors are made of the tokens."""

import base64
import math
import struct
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from simulator.bodies import decode_body, has_field
from simulator.core import tokenizer
from simulator.core.errors import InvalidBodyError, RequestRefusedError
from simulator.engine import SimulatedEngine
from simulator.exchange import Exchange

DIMENSIONS = 8

Input = str | list[Any]
"""A text, token ids, or a list of either."""
Texts = str | list[str]


class EmbeddingBody(msgspec.Struct, kw_only=True):
    """POST /v1/embeddings, /pooling, /classify."""

    input: Input
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None


class ScoreBody(msgspec.Struct, kw_only=True):
    """POST /score, /v1/score."""

    text_1: Texts
    text_2: Texts
    model: str | None = None


class RerankBody(msgspec.Struct, kw_only=True):
    """POST /rerank, /v1/rerank, /v2/rerank."""

    query: str
    documents: Texts
    model: str | None = None
    top_n: int = 0


async def embed(engine: SimulatedEngine, exchange: Exchange) -> None:
    """Answer with one vector per input."""
    body = decode_body(exchange.body, exchange.headers.get("content-type", ""), EmbeddingBody)
    model, prompts = begin(engine, body.model, body.input)
    if body.dimensions is not None:
        raise RequestRefusedError(
            f'Model "{model}" does not support matryoshka representation, changing output '
            "dimensions will lead to poor results.",
            param="dimensions",
        )
    data = [
        {"index": index, "object": "embedding", "embedding": _encode(vector(prompt), body)}
        for index, prompt in enumerate(prompts)
    ]
    await exchange.send_json(_list(engine, "embd", model, data, prompts))


async def invoke(engine: SimulatedEngine, exchange: Exchange) -> None:
    """Answer SageMaker's path: its fields say what is wanted."""
    asked = next((each for name, each in _BY_FIELD if has_field(exchange.body, name)), embed)
    await asked(engine, exchange)


async def pool(engine: SimulatedEngine, exchange: Exchange) -> None:
    """Answer with raw pooled data."""
    body = decode_body(exchange.body, exchange.headers.get("content-type", ""), EmbeddingBody)
    model, prompts = begin(engine, body.model, body.input)
    data = [
        {"index": index, "object": "pooling", "data": _encode(vector(prompt), body)}
        for index, prompt in enumerate(prompts)
    ]
    await exchange.send_json(_list(engine, "pool", model, data, prompts))


async def classify(engine: SimulatedEngine, exchange: Exchange) -> None:
    """Answer with one of two classes per input."""
    body = decode_body(exchange.body, exchange.headers.get("content-type", ""), EmbeddingBody)
    model, prompts = begin(engine, body.model, body.input)
    data = []
    for index, prompt in enumerate(prompts):
        share = (vector(prompt)[0] + 1) / 2
        label = "LABEL_1" if share > 0.5 else "LABEL_0"
        data.append({"index": index, "label": label, "probs": [1 - share, share], "num_classes": 2})
    await exchange.send_json(_list(engine, "classify", model, data, prompts))


async def score(engine: SimulatedEngine, exchange: Exchange) -> None:
    """Answer with one similarity per pair."""
    body = decode_body(exchange.body, exchange.headers.get("content-type", ""), ScoreBody)
    left, right = _texts(body.text_1), _texts(body.text_2)
    if len(left) not in {1, len(right)}:
        raise RequestRefusedError("Input lengths must be either 1:1, 1:N or N:N")
    left = left * len(right) if len(left) == 1 else left
    model, prompts = begin(engine, body.model, [*left, *right])
    pairs = zip(prompts[: len(left)], prompts[len(left) :], strict=True)
    data = [
        {"index": index, "object": "score", "score": similarity(one, other)}
        for index, (one, other) in enumerate(pairs)
    ]
    await exchange.send_json(_list(engine, "score", model, data, prompts))


async def rerank(engine: SimulatedEngine, exchange: Exchange) -> None:
    """Answer with the documents, the most similar first."""
    body = decode_body(exchange.body, exchange.headers.get("content-type", ""), RerankBody)
    documents = _texts(body.documents)
    model, prompts = begin(engine, body.model, [body.query, *documents])
    results: list[dict[str, Any]] = [
        {
            "index": index,
            "document": {"text": document, "multi_modal": None},
            "relevance_score": similarity(prompts[0], prompts[index + 1]),
        }
        for index, document in enumerate(documents)
    ]
    results.sort(key=lambda each: -each["relevance_score"])
    tokens = sum(map(len, prompts))
    await exchange.send_json(
        {
            "id": f"rerank-{engine.random_hex(32)}",
            "model": model,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            "results": results[: body.top_n or len(results)],
        }
    )


_BY_FIELD = (("text_1", score), ("query", rerank))


def vector(token_ids: Sequence[int]) -> list[float]:
    """A unit vector that depends on which tokens there are, not on their order."""
    sums = [0.0] * DIMENSIONS
    for token_id, count in Counter(token_ids).items():
        for place in range(DIMENSIONS):
            sums[place] += count * math.sin(token_id * (place + 1) + place)
    length = math.sqrt(sum(each * each for each in sums)) or 1.0
    return [each / length for each in sums]


def similarity(one: Sequence[int], other: Sequence[int]) -> float:
    """The cosine between two texts."""
    return sum(left * right for left, right in zip(vector(one), vector(other), strict=True))


def begin(engine: SimulatedEngine, model: str | None, given: Input) -> tuple[str, list[list[int]]]:
    """Return the served model and the prompts, or refuse what is unknown or too long."""
    served, _, _ = engine.find_adapter(model)
    prompts = _prompts(given)
    limit = engine.settings.context_tokens
    longest = max(map(len, prompts))
    if longest > limit:
        raise RequestRefusedError(
            f"This model's maximum context length is {limit} tokens. However, you requested "
            f"{longest} tokens in the input for embedding generation. Please reduce the length of "
            "the input.",
            param="input_tokens",
        )
    return served, prompts


def _prompts(given: Input) -> list[list[int]]:
    if isinstance(given, str):
        return [tokenizer.encode(given, add_special_tokens=True)]
    if not given:
        raise InvalidBodyError("input: at least one is needed", param="input")
    if all(type(each) is int for each in given):
        return [_check_ids(given)]
    return [_read_one(each) for each in given]


def _read_one(given: Any) -> list[int]:
    if isinstance(given, str):
        return tokenizer.encode(given, add_special_tokens=True)
    if isinstance(given, list) and all(type(each) is int for each in given):
        return _check_ids(given)
    raise InvalidBodyError("input: expected strings or lists of token ids", param="input")


def _check_ids(token_ids: list[int]) -> list[int]:
    if not token_ids:
        raise RequestRefusedError("The input cannot be empty.", param="input")
    wrong = next((i for i in token_ids if not 0 <= i < tokenizer.VOCABULARY_TOKENS), None)
    if wrong is not None:
        raise RequestRefusedError(f"Token id {wrong} is out of vocabulary")
    return token_ids


def _texts(given: Texts) -> list[str]:
    return [given] if isinstance(given, str) else list(given)


def _encode(values: list[float], body: EmbeddingBody) -> list[float] | str:
    if body.encoding_format == "float":
        return values
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()


def _list(
    engine: SimulatedEngine,
    prefix: str,
    model: str,
    data: list[dict[str, Any]],
    prompts: list[list[int]],
) -> dict[str, Any]:
    tokens = sum(map(len, prompts))
    usage = {
        "prompt_tokens": tokens,
        "total_tokens": tokens,
        "completion_tokens": 0,
        "prompt_tokens_details": None,
    }
    return {
        "id": f"{prefix}-{engine.random_hex(32)}",
        "object": "list",
        "created": int(engine.wall_clock()),
        "model": model,
        "data": data,
        "usage": usage,
    }
