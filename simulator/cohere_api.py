"""Cohere's embeddings as vLLM serves them. Its chats are not simulated: they need Cohere's package."""

import base64
import struct
from typing import Any, Literal

import msgspec

from simulator.bodies import decode_body
from simulator.core.errors import InvalidBodyError
from simulator.engine import SimulatedEngine
from simulator.exchange import Exchange
from simulator.pooling_api import begin, vector

Kind = Literal["float", "binary", "ubinary", "base64"]


class EmbedBody(msgspec.Struct, kw_only=True):
    """POST /v2/embed. Pictures are for models that the simulator isn't."""

    texts: list[str] | None = None
    model: str | None = None
    input_type: str | None = None
    output_dimension: int | None = None
    embedding_types: list[Kind] | None = None
    truncate: Literal["NONE", "START", "END"] = "END"


async def embed(engine: SimulatedEngine, exchange: Exchange) -> None:
    """Answer with one vector per text, in every form that was asked for."""
    body = decode_body(exchange.body, exchange.headers.get("content-type", ""), EmbedBody)
    if not body.texts:
        raise InvalidBodyError(
            "Value error, Exactly one of texts, images, or inputs must be provided, and it must be "
            "non-empty"
        )
    _, prompts = begin(engine, body.model, body.texts)
    vectors = [vector(each) for each in prompts]
    asked = body.embedding_types or ["float"]
    forms = {
        kind: [form(each) for each in vectors] for kind, form in _FORMS.items() if kind in asked
    }
    await exchange.send_json(
        {
            "id": f"embd-{engine.random_hex(32)}",
            "embeddings": forms,
            "texts": body.texts,
            "meta": {
                "api_version": {"version": "2"},
                "billed_units": {"input_tokens": sum(map(len, prompts)), "image_tokens": 0},
            },
            "response_type": "embeddings_by_type",
        }
    )


def _bits(values: list[float]) -> list[int]:
    """Signs, eight to a byte, the first one highest."""
    signs = "".join("1" if each >= 0 else "0" for each in values)
    return [int(signs[start : start + 8], 2) for start in range(0, len(signs), 8)]


def _base64(values: list[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()


_FORMS: dict[Kind, Any] = {
    "float": list,
    "binary": lambda values: [each - 128 for each in _bits(values)],
    "ubinary": _bits,
    "base64": _base64,
}
