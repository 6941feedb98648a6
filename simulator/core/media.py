"""Images, audio and video in a chat: which parts they are, and how a prompt shows them.

An engine puts placeholder tokens where an item stands and hashes its content into the blocks. Here the
placeholder is text that begins with a digest of the item, so that another item makes another prompt.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

MEDIA_TYPES = frozenset({"image_url", "input_image", "audio_url", "input_audio", "video_url"})
_PLACEHOLDER_DIGITS = 16


def placeholder(part: Mapping[str, Any]) -> str:
    """What stands in the prompt's text for the item."""
    named = part.get("uuid") or part.get(str(part["type"]))
    digest = hashlib.sha256(msgspec.json.encode(named)).hexdigest()
    return f"<|media {digest[:_PLACEHOLDER_DIGITS]}|>"
