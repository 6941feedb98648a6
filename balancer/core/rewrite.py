"""What is changed in a client's body before an engine sees it, and nothing more.

Rules:

1. A body in which nothing has to change reaches the engine byte for byte.
2. What a client must not set is removed: `kv_transfer_params`, `ec_transfer_params`,
   `vllm_xargs.kv_cache_report_mode`, a `request_id` that names engines.
3. Streams are asked for their usage (`stream_options.include_usage`), without switching on
   `continuous_usage_stats` that the client asked for in vain. Absent options are spliced in
   after the first brace; only present ones cost an encoding.
4. Only types that every engine refuses are refused here, each by its name; values are the
   engine's business.

Cost: one decode per request; a splice is one copy of the body.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from balancer.core.errors import BadRequestError
from balancer.core.http_headers import has_addresses
from balancer.core.request import Endpoint

_FORBIDDEN = ("kv_transfer_params", "ec_transfer_params")
_REPORT_MODE = "kv_cache_report_mode"
_SPLICE = b'{"stream_options":{"include_usage":true},'


def decode_body(raw: bytes) -> dict[str, Any]:
    """Decode a JSON object. Raises BadRequestError that never quotes the body."""
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequestError("the body must be a JSON object")
    return body


def encode_body(body: Mapping[str, Any]) -> bytes:
    """Write a body that had to change."""
    return msgspec.json.encode(body)


def check_generate_body(endpoint: Endpoint, body: Mapping[str, Any]) -> None:
    """Refuse what is no chat or completions request. Raises BadRequestError naming the field."""
    _check_type(body, "model", str, "a string")
    _check_type(body, "stream", bool, "a boolean")
    _check_type(body, "stream_options", dict, "an object")
    options = body.get("stream_options") or {}
    _check_type(options, "include_usage", bool, "a boolean", prefix="stream_options.")
    if endpoint is Endpoint.CHAT:
        _check_type(body, "messages", list, "a list")
        if body.get("messages") is None:
            raise BadRequestError("`messages` is required", param="messages")
        return
    _check_type(body, "prompt", (str, list), "a string or a list")
    if body.get("prompt") is None and body.get("prompt_embeds") is None:
        raise BadRequestError("`prompt` is required", param="prompt")


def without_forbidden(body: dict[str, Any]) -> dict[str, Any]:
    """Return `body` itself if it holds nothing forbidden, else a copy without it."""
    drop = [key for key in _FORBIDDEN if key in body]
    request_id = body.get("request_id")
    if isinstance(request_id, str) and has_addresses(request_id):
        drop.append("request_id")
    xargs = body.get("vllm_xargs")
    has_mode = isinstance(xargs, dict) and _REPORT_MODE in xargs
    if not drop and not has_mode:
        return body
    clean = {key: value for key, value in body.items() if key not in drop}
    if has_mode:
        clean["vllm_xargs"] = {k: v for k, v in body["vllm_xargs"].items() if k != _REPORT_MODE}
    return clean


def wants_usage(body: Mapping[str, Any]) -> bool:
    """Tell whether the client asked for the usage chunk of its stream."""
    options = body.get("stream_options")
    return isinstance(options, dict) and options.get("include_usage") is True


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
    if "stream_options" in body:
        return encode_body(with_usage(body))
    brace = raw.index(b"{")
    return raw[:brace] + _SPLICE + raw[brace + 1 :]


def _check_type(
    body: Mapping[str, Any],
    key: str,
    kind: type | tuple[type, ...],
    words: str,
    prefix: str = "",
) -> None:
    value = body.get(key)
    if value is not None and not isinstance(value, kind):
        raise BadRequestError(f"`{prefix}{key}` must be {words}", param=f"{prefix}{key}")
