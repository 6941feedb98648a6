"""The text of a chat before its first picture, sound or film: the part that can be credited.

Rules:

1. Nothing is fetched, decoded or hashed: of a media part only its kind is kept.
2. What a medium becomes (which special tokens, how many) is its model's secret, and so is what its
   identifier is: engines hash the decoded content. So credit ends before the first of them.
3. Where that is, is found by rendering the chat several times: with two stand-ins of different
   text where the engine puts the medium, and, for templates that see parts, as they see it. The
   ids that all renderings begin with don't depend on the medium, nor on whether there is one.
4. With hardly any text before it, the chat is unscorable, as before.
5. The rest of the prompt is guessed by length: nothing of it is ever matched.

Cost: two or three renderings and tokenisations of a chat with media; nothing for others.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from balancer.core.prompt.content_parts import MEDIA_PARTS
from balancer.core.prompt.shape import ChatShape

MIN_CREDITABLE_TOKENS = 16
MEDIUM_TOKENS = 500
"""What a picture is taken for where only load is weighed."""
BYTES_PER_TOKEN = 4
STAND_INS = ("x", "\n7")
"""Text in a medium's place: of different kinds, so that neither joins the token before it alike."""


def count_media(shape: ChatShape) -> int:
    """How many media parts the chat has."""
    return sum(1 for part in _parts(shape) if part.get("type") in MEDIA_PARTS)


def with_stand_in(shape: ChatShape, text: str, *, keeps_order: bool) -> ChatShape:
    """The chat with `text` for every medium.

    Where the template joins texts (`keeps_order` false), engines put media before a message's text.
    """
    return replace(shape, messages=[_replaced(each, text, keeps_order) for each in shape.messages])


def common_prefix(tokens: Sequence[Sequence[int]]) -> int:
    """How many ids all of them begin with."""
    first, rest = tokens[0], tokens[1:]
    for at, token in enumerate(first):
        if any(at >= len(each) or each[at] != token for each in rest):
            return at
    return len(first)


def guess_rest_tokens(shape: ChatShape) -> int:
    """Length of what comes with and after the first medium, generously."""
    texts = [part.get("text") for part in _parts(shape)]
    letters = sum(len(text) for text in texts if isinstance(text, str))
    return MEDIUM_TOKENS * count_media(shape) + letters // BYTES_PER_TOKEN


def _parts(shape: ChatShape) -> Iterator[Mapping[str, Any]]:
    for message in shape.messages:
        content = message.get("content")
        if isinstance(content, list):
            yield from (part for part in content if isinstance(part, dict))


def _replaced(message: Mapping[str, Any], text: str, keeps_order: bool) -> Mapping[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    stand_in = {"type": "text", "text": text}
    is_medium = [isinstance(part, dict) and part.get("type") in MEDIA_PARTS for part in content]
    if keeps_order:
        pairs = zip(content, is_medium, strict=True)
        return {**message, "content": [stand_in if medium else part for part, medium in pairs]}
    texts = [part for part, medium in zip(content, is_medium, strict=True) if not medium]
    return {**message, "content": [stand_in] * any(is_medium) + texts}
