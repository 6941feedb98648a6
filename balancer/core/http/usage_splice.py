"""Puts one leg's `prompt_tokens_details` into another leg's answer, and touches nothing else.

A decode engine counts what a prefill engine sent it as cached. What its client is to see is what
was cached where its prompt was read (field report F35).

Rules:

1. Only the value of `usage.prompt_tokens_details` is replaced, where it stands. Every other byte
   stays; nothing is added to a `usage` that lacks it.
2. What has no `usage` object, or can't be read, stays as it is.

Cost: two decodes that skip nearly all, and a copy; only for a document that names `usage`.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

_KEY: Final = b'"usage"'
_USAGE: Final = re.compile(rb'"usage"\s*:\s*')
_DETAILS: Final = re.compile(rb'"prompt_tokens_details"\s*:\s*')


class _Head(msgspec.Struct):
    usage: msgspec.Raw = msgspec.Raw(b"")


class _Usage(msgspec.Struct):
    prompt_tokens_details: msgspec.Raw = msgspec.Raw(b"")


def render_details(usage: Any) -> bytes | None:
    """Write the details of a decoded `usage`; None if there is no usage.

    Missing ones are null: that is how engines up to 0.25 say that nothing was cached.
    """
    if not isinstance(usage, Mapping):
        return None
    return msgspec.json.encode(usage.get("prompt_tokens_details"))


def with_details(document: bytes, details: bytes) -> bytes:
    """Return an answer, or one chunk of a stream, with these details in its usage."""
    if _KEY not in document:
        return document
    try:
        usage = bytes(msgspec.json.decode(document, type=_Head).usage)
        if not usage.startswith(b"{"):
            return document
        present = bytes(msgspec.json.decode(usage, type=_Usage).prompt_tokens_details)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return document
    if not present:
        return document
    changed = _replace(usage, _DETAILS, present, details)
    return _replace(document, _USAGE, usage, changed)


def _replace(text: bytes, key: re.Pattern[bytes], value: bytes, by: bytes) -> bytes:
    """Replace what stands behind the key that has this value.

    Within a string the quotes would be escaped: what looks like the key is one.
    """
    ends = (found.end() for found in key.finditer(text))
    start = next(end for end in ends if text.startswith(value, end))
    return text[:start] + by + text[start + len(value) :]
