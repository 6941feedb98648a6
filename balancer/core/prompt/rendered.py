"""What an engine's render endpoint is asked, and what it answers: the prompt as it would feed it.

Rules:

1. The question is the client's request as it is, so every field counts that counts for the answer.
   `mm_payload: none` leaves the media's tensors out (vLLM 0.32; older ones ignore it).
2. Render endpoints exist since 0.16; from 0.30 on only with `--enable-scale-out` or `vllm launch render`.
3. Of media an answer tells the identifier under which their blocks are hashed, and where they stand.

Cost: one copy of the body's top level; linear in the answer.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from balancer.core.request import Endpoint, GenerateRequest
from indexer.core.hashing import MediumPlace

HAS_RENDER = frozenset({Endpoint.CHAT, Endpoint.COMPLETIONS, Endpoint.MESSAGES, Endpoint.RESPONSES})

_OF_THE_ANSWER = ("response_format", "structured_outputs", "tool_choice", "text")


class RenderQuestion(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One call to an engine."""

    path: str
    body: Mapping[str, Any]


class Rendered(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One prompt."""

    token_ids: Sequence[int]
    media: Sequence[MediumPlace] = ()
    """In the order in which they stand in the prompt."""


def render_question(request: GenerateRequest) -> RenderQuestion | None:
    """None for paths that are never rendered."""
    if request.endpoint not in HAS_RENDER:
        return None
    return RenderQuestion(
        path=f"{request.endpoint}/render", body={**request.body, "mm_payload": "none"}
    )


def answer_shape(request: GenerateRequest) -> Mapping[str, Any]:
    """What the client wants of the answer, as far as some models are told of it in their prompt."""
    return {name: request.body[name] for name in _OF_THE_ANSWER if name in request.body}


class _Place(msgspec.Struct):
    offset: int
    length: int


class _Features(msgspec.Struct):
    mm_hashes: dict[str, list[str]] = {}
    mm_placeholders: dict[str, list[_Place]] = {}


class _Answer(msgspec.Struct):
    token_ids: list[int]
    features: _Features | None = None


_DECODER = msgspec.json.Decoder(_Answer | list[_Answer])


def read_rendered(answer: bytes) -> Sequence[Rendered]:
    """One for each prompt of the request. Raises msgspec.DecodeError, or ValueError if it contradicts itself."""
    told = _DECODER.decode(answer)
    return tuple(_rendered(each) for each in (told if isinstance(told, list) else [told]))


def _rendered(answer: _Answer) -> Rendered:
    features = answer.features or _Features()
    if features.mm_hashes.keys() != features.mm_placeholders.keys():
        raise ValueError("hashes and placeholders of other kinds")
    places = [
        MediumPlace(identifier=identifier, offset_tokens=place.offset, tokens=place.length)
        for kind, identifiers in features.mm_hashes.items()
        for identifier, place in zip(identifiers, features.mm_placeholders[kind], strict=True)
    ]
    places.sort(key=lambda place: place.offset_tokens)
    return Rendered(token_ids=answer.token_ids, media=tuple(places))
