"""An error as its client expects to read it: OpenAI's shape, Anthropic's on `/v1/messages`.

Rules:

1. Status, type and code come from the error's class; the message never holds a prompt or key.
2. A full fleet tells when to come back (`Retry-After`), a wrong method which one is right.
3. In a stream the same body is one `data:` event. `[DONE]` is never made up.
"""

import json
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from balancer.core.errors import BalancerError, MethodNotAllowedError, OverloadedError

ANTHROPIC_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}

_UNREAD: Final = frozenset({408, 413})


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedError:
    """What goes to the client."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


def render_error(error: BalancerError, *, path: str = "") -> RenderedError:
    """Write the answer that tells a client of `error`."""
    body = _encode(_error_value(error, path))
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    if isinstance(error, OverloadedError):
        headers.append((b"retry-after", str(error.retry_after_s).encode()))
    if isinstance(error, MethodNotAllowedError) and error.allow:
        headers.append((b"allow", error.allow.encode()))
    if error.status in _UNREAD:
        # The rest of the request is still on its way; nobody will read it.
        headers.append((b"connection", b"close"))
    return RenderedError(status=error.status, headers=tuple(headers), body=body)


def render_error_event(error: BalancerError) -> bytes:
    """Write `error` as one event of a stream whose status has already gone out."""
    return b"data: " + _encode(_error_value(error, "")) + b"\n\n"


def _encode(value: dict[str, Any]) -> bytes:
    """A name that a client made up may hold a lone surrogate, which only the standard library writes."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return json.dumps(value).encode()


def _error_value(error: BalancerError, path: str) -> dict[str, Any]:
    if path.startswith("/v1/messages"):
        kind = ANTHROPIC_TYPES.get(error.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": error.message}}
    return {
        "error": {
            "message": error.message,
            "type": error.type,
            "param": error.param,
            "code": error.code,
        }
    }
