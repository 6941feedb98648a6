"""The parts that a message's content may be a list of: what kind each is, and which text it has.

Rules:

1. A part is of the kind its `type` says; without one, or with a `uuid`, of the kind of its first field
   that is named like one. So engines do it.
2. What isn't known is not text: the engine refuses it, or knows more than we do.

Cost: a few look-ups per part.
"""

from collections.abc import Mapping
from typing import Any, Final

from balancer.core.prompt.shape import Unscorable, UnscorableError

MEDIA_PARTS: Final = {
    "image_url": "image",
    "image_pil": "image",
    "image_embeds": "image",
    "input_image": "image",
    "image": "image",
    "audio_url": "audio",
    "input_audio": "audio",
    "audio_embeds": "audio",
    "audio": "audio",
    "video_url": "video",
    "video_embeds": "video",
    "video": "video",
}
"""Kind of each media part, as the engine names it to a template that sees parts."""
TOOL_REFERENCE: Final = "tool_reference"
_TEXT_FIELDS: Final = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
    TOOL_REFERENCE: "name",
}
SKIPPED_IF_NULL: Final = frozenset({"text", "refusal"})
_TELLING_FIELDS: Final = (
    "image_url",
    "image_pil",
    "image_embeds",
    "audio_embeds",
    "video_embeds",
    "prompt_embeds",
    "audio_url",
    "input_audio",
    "video_url",
    TOOL_REFERENCE,
)
_KNOWN_FIELDS: Final = frozenset(
    {
        "audio_embeds",
        "audio_url",
        "closed",
        "data",
        "file",
        "image_embeds",
        "image_pil",
        "image_url",
        "input_audio",
        "name",
        "prompt_cache_breakpoint",
        "refusal",
        "text",
        "thinking",
        "type",
        "uuid",
        "video_embeds",
        "video_url",
    }
)


def part_kind(part: Mapping[str, Any]) -> str | None:
    """What it is, as far as it says."""
    kind = part.get("type")
    if kind is None or part.get("uuid") is not None:
        return next((name for name in _TELLING_FIELDS if name in part), None)
    return kind if isinstance(kind, str) else None


def part_text(part: Mapping[str, Any], kind: str) -> Any:
    """Its text, or of a reference the tool's name; a medium has none."""
    return part.get(_TEXT_FIELDS.get(kind, ""))


def foreign_fields(part: Mapping[str, Any]) -> Mapping[str, Any]:
    """What engines don't know, and hand on to templates that see parts."""
    return {key: value for key, value in part.items() if key not in _KNOWN_FIELDS}


def is_medium(part: object) -> bool:
    """Tell if it is a picture, a sound or a film."""
    return isinstance(part, dict) and part_kind(part) in MEDIA_PARTS


def check_part(part: object) -> None:
    """Raises UnscorableError for what can't be rendered."""
    if isinstance(part, str):
        return
    kind = part_kind(part) if isinstance(part, dict) else None
    if kind is None or not isinstance(part, dict):
        raise UnscorableError(Unscorable.BAD_PROMPT)
    if kind == "prompt_embeds":
        raise UnscorableError(Unscorable.PROMPT_EMBEDS)
    if kind in MEDIA_PARTS:
        return
    if kind not in _TEXT_FIELDS:
        raise UnscorableError(Unscorable.MULTIMODAL)
    if not isinstance(part_text(part, kind), str | None):
        raise UnscorableError(Unscorable.BAD_PROMPT)


def without_media(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message itself if it has none; else with nothing but the kind of each."""
    content = message.get("content")
    if not isinstance(content, list) or not any(is_medium(part) for part in content):
        return message
    bare = [{"type": _modality(part)} if is_medium(part) else part for part in content]
    return {**message, "content": bare}


def _modality(part: Mapping[str, Any]) -> str:
    return MEDIA_PARTS[part_kind(part) or ""]
