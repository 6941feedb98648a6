"""The images, audio and video of a chat, each with a name that stays the same from request to request.

Rules:

1. Items are counted in the order in which they stand in `messages`: engines number their features so.
2. Two items have one key if an engine would encode them to the same: the same `uuid`, else the same
   content, under the same processing options and model. A URL stands for what it leads to; where
   that has changed, engines notice by its hash and encode it anew.
3. What is encoded already (`image_embeds`, ...) is no item.

Cost: one hash over the bytes of each item, which are a body's largest part.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from balancer.core.http.rewrite import encode_body
from balancer.core.request import Endpoint, GenerateRequest

MEDIA_TYPES = frozenset({"image_url", "input_image", "audio_url", "input_audio", "video_url"})
PROCESSING_FIELDS = ("mm_processor_kwargs", "media_io_kwargs")
"""What else of a body decides what an item is encoded to."""
_KEY_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaItem:
    """One part of a message that has to be encoded."""

    part: Mapping[str, Any]
    """As the client sent it."""
    key: bytes


def media_items(request: GenerateRequest) -> tuple[MediaItem, ...]:
    """Every item of `request`, in order; none for completions."""
    if request.endpoint is not Endpoint.CHAT:
        return ()
    parts = list(_parts(request.body))
    if not parts:
        return ()
    options = {name: request.body.get(name) for name in PROCESSING_FIELDS}
    scope = encode_body({"model": request.model, **options})
    return tuple(MediaItem(part=part, key=_key(part, scope)) for part in parts)


def _parts(body: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for message in body["messages"]:
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and part.get("type") in MEDIA_TYPES:
                yield part


def _key(part: Mapping[str, Any], scope: bytes) -> bytes:
    named = part.get("uuid")
    digest = blake2b(scope, digest_size=_KEY_BYTES)
    is_named = isinstance(named, str) and named
    digest.update(encode_body({"type": part["type"], "uuid": named} if is_named else part))
    return digest.digest()
