"""Which model a forwarded request names, whatever its body is.

JSON is read for its `model` alone, a form (audio uploads) is searched for that field without
being taken apart. A body that can't be understood is the engine's to refuse.
"""

import json
import re
from typing import Any

import msgspec

_FIELD = re.compile(rb'\bname="?model"?[^\r\n]*\r\n(?:[^\r\n]+\r\n)*\r\n([^\r\n]*)\r\n')


class _Named(msgspec.Struct):
    model: Any = None


def named_model(content_type: bytes, body: bytes) -> Any:
    """Return the model's name, "" if the body could name one and doesn't, None if it can't."""
    kind = content_type.lower()
    if kind.startswith(b"multipart/form-data"):
        match = _FIELD.search(body)
        return match.group(1).decode("utf-8", "replace") if match else ""
    if not kind.startswith(b"application/json"):
        return None
    try:
        read = _read_json(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(read, _Named | dict):
        return None
    name = read.get("model") if isinstance(read, dict) else read.model
    return "" if name is None else name


def _read_json(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body, type=_Named)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return json.loads(body)  # as engines do: it takes a byte order mark
