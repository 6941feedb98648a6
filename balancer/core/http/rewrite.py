"""What is changed in a client's body before an engine sees it, and nothing more.

Rules:

1. A body in which nothing has to change reaches the engine byte for byte.
2. What a client must not set is removed (`core.http.forbidden`).
3. Streams are asked for their usage (`stream_options.include_usage`), without switching on
   `continuous_usage_stats` that the client asked for in vain. Absent options are spliced in
   after the first brace; only present ones cost an encoding. So is what encode legs hand over.
4. Only types that every engine refuses are refused here, each by its name; values are the
   engine's business.
5. What engines read as JSON is read here: they use Python's own parser, which takes a byte order
   mark, UTF-16 and 32, `NaN` and lone surrogates. Only a re-encoded body shows that we differ: it
   is UTF-8, and `NaN` and infinity are null in it.

Cost: one decode per request, two for a body that isn't strict JSON in UTF-8; a splice is one copy
of the body.
"""

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from balancer.core.errors import BadRequestError
from balancer.core.http.lax_bool import is_flag, is_true
from balancer.core.prompt.known_ids import KnownIds
from balancer.core.request import Endpoint

_FIELDS: tuple[tuple[str, type | tuple[type, ...], str], ...] = (
    ("model", str, "a string"),
    ("stream_options", dict, "an object"),
)
_CHAT_FIELDS = (*_FIELDS, ("messages", list, "a list"))
_TEXT_FIELDS = (*_FIELDS, ("prompt", (str, list, msgspec.Raw), "a string or a list"))
_CHAT = Endpoint.CHAT
_SPLICE = b'{"stream_options":{"include_usage":true},'


class DecodedBody(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A JSON object."""

    value: dict[str, Any]
    is_unicode: bool = True
    """False: some string holds a lone surrogate, which UTF-8 can't write and no tokenizer reads."""
    ids: KnownIds | None = None
    """What its `prompt` is, where that is left as it came (`core.http.ids_body`)."""


def decode_body(raw: bytes) -> DecodedBody:
    """Decode a JSON object. Raises BadRequestError that never quotes the body."""
    is_unicode = True
    try:
        try:
            body = msgspec.json.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError):
            body = json.loads(raw)
            is_unicode = _is_unicode(body)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the body is not valid JSON: {_reason(error)}") from error
    if not isinstance(body, dict):
        raise BadRequestError("the body must be a JSON object")
    return DecodedBody(value=body, is_unicode=is_unicode)


def encode_body(body: Mapping[str, Any]) -> bytes:
    """Write a body that had to change. Raises BadRequestError.

    What could just be read may be too deep to be written, as that begins further down the stack.
    """
    try:
        try:
            return msgspec.json.encode(body)
        except UnicodeEncodeError:
            return json.dumps(body).encode()
    except RecursionError as error:
        raise BadRequestError("the body is nested too deep") from error


def _is_unicode(body: Any) -> bool:
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _reason(error: Exception) -> str:
    """Where it ends to be JSON, never what stands there."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos}"
    if isinstance(error, UnicodeDecodeError):
        return f"not {error.encoding} at byte {error.start}"
    return type(error).__name__


def check_generate_body(endpoint: Endpoint, body: Mapping[str, Any]) -> None:
    """Refuse what is no chat or completions request. Raises BadRequestError naming the field."""
    is_chat = endpoint is _CHAT
    for name, kind, words in _CHAT_FIELDS if is_chat else _TEXT_FIELDS:
        value = body.get(name)
        if value is not None and not isinstance(value, kind):
            raise BadRequestError(f"`{name}` must be {words}", param=name)
    _check_flag("stream", body.get("stream"))
    options = body.get("stream_options")
    if options:
        _check_flag("stream_options.include_usage", options.get("include_usage"))
    if is_chat and body.get("messages") is None:
        raise BadRequestError("`messages` is required", param="messages")
    if not is_chat and body.get("prompt") is None and body.get("prompt_embeds") is None:
        raise BadRequestError("`prompt` is required", param="prompt")


def _check_flag(name: str, value: Any) -> None:
    if value is not None and not is_flag(value):
        raise BadRequestError(f"`{name}` must be a boolean", param=name)


def wants_usage(body: Mapping[str, Any]) -> bool:
    """Tell whether the client asked for the usage chunk of its stream."""
    options = body.get("stream_options")
    return isinstance(options, dict) and is_true(options.get("include_usage"))


def with_usage(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a body that asks for usage; call only for streams that don't."""
    options = dict(body.get("stream_options") or {}) | {"include_usage": True}
    # Without include_usage engines ignore it; ours must not bring it to life.
    options.pop("continuous_usage_stats", None)
    return {**body, "stream_options": options}


def splice_usage(body: Mapping[str, Any], raw: bytes) -> bytes:
    """Return the bytes of `with_usage(body)`, from the client's own where that is possible.

    `raw` is the encoding of `body`, which holds at least `stream`.
    """
    if "stream_options" in body or not json.detect_encoding(raw).startswith("utf-8"):
        return encode_body(with_usage(body))
    return _spliced(raw, _SPLICE)


def splice_field(raw: bytes, name: str, value: Mapping[str, Any]) -> bytes | None:
    """`raw` with one field more, which it doesn't have yet; None if it has to be encoded anew."""
    if not json.detect_encoding(raw).startswith("utf-8"):
        return None
    return _spliced(raw, b'{"%b":%b,' % (name.encode(), encode_body(value)))


def _spliced(raw: bytes, beginning: bytes) -> bytes:
    brace = raw.index(b"{")
    return raw[:brace] + beginning + raw[brace + 1 :]
