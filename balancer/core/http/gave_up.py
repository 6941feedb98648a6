"""An engine that gave up before its first word, in the words of Messages and of Responses.

Rules:

1. A whole message that says nothing, and whose `stop_reason` is null (vLLM, of what was aborted),
   `error` or `abort`, is an error. So is a response that says nothing, and whose `status` is
   `failed` or `cancelled`.
2. In a stream whatever opens a message, a response, or a part of one says nothing. An end in the
   sense of 1 that comes before anything was said is an error, and so is `response.failed`.
3. An error has its path's form: Anthropic's of a message, OpenAI's of a response, which may say
   what went wrong in words and a code.
4. Behind a word such an end is the client's to see.

Cost: of a good answer one search; of a stream a decode of each event before its first word.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from balancer.core.http.told_error import FAILED_FINISHES, ToldError, decode_object

_MAY_BE: Final = re.compile(
    rb'"(?:failed|cancelled)"|"content"\s*:\s*\[\s*\]|"(?:text|thinking)"\s*:\s*""'
)
_NAMED: Final = re.compile(rb'"type"\s*:\s*"(?:message_|content_block_|ping"|response\.)')
_OPENINGS: Final = (
    "message_start",
    "ping",
    "content_block_stop",
    "response.created",
    "response.queued",
    "response.in_progress",
)
_WORDED: Final = (
    *("message", "text", "thinking"),
    *("output_text", "reasoning", "reasoning_text", "summary_text"),
)
"""Parts that say what is written in them. A call of a tool says something as it is."""
_PARTS: Final = ("content_block", "item", "part")
_ENDED_SILENTLY: Final = (None, *FAILED_FINISHES)
_FAILED_STATUSES: Final = ("failed", "cancelled")
_STATUS: Final = 502
_STATUSES: Final = {
    "error": 500,
    "server_error": 500,
    "rate_limit_exceeded": 429,
    "invalid_prompt": 400,
}
_TYPES: Final = {500: "InternalServerError", 429: "RateLimitError", 400: "BadRequestError"}


def read_silent(document: bytes) -> ToldError | None:
    """What a whole message or response has for its client if it gave up; else None."""
    if _MAY_BE.search(document) is None:
        return None
    told = decode_object(document) or {}
    if told.get("type") == "message":
        return _message_error(told) if _say_nothing(told.get("content")) else None
    return _response_error(told) if told.get("object") == "response" else None


def read_named(data: bytes) -> ToldError | bool:
    """Tell whether an event says something, its error if it is one. Unnamed ones do."""
    if _NAMED.search(data) is None:
        return True
    told = decode_object(data) or {}
    kind = told.get("type")
    if kind in _OPENINGS:
        return False
    part = next((told[name] for name in _PARTS if name in told), None)
    if part is not None:
        return not _is_silent(part)
    if kind == "message_delta":
        return _message_error(told.get("delta")) or True
    response = told.get("response")
    if kind == "response.failed" and isinstance(response, Mapping):
        response = {**response, "status": "failed"}
    return _response_error(response) or True


def _message_error(ended: Any) -> ToldError | None:
    """Of what has a `stop_reason`, or none."""
    if not isinstance(ended, Mapping) or ended.get("stop_reason") not in _ENDED_SILENTLY:
        return None
    reason = ended.get("stop_reason")
    error = {"type": "api_error", "message": _words(reason or "no reason given")}
    return ToldError(
        status=_STATUSES.get(reason or "", _STATUS),
        body=json.dumps({"type": "error", "error": error}).encode(),
    )


def _response_error(response: Any) -> ToldError | None:
    if not isinstance(response, Mapping) or response.get("status") not in _FAILED_STATUSES:
        return None
    if not _say_nothing(response.get("output") or []):
        return None
    told = response.get("error")
    why = told if isinstance(told, Mapping) else {}
    code = why.get("code")
    status = _STATUSES.get(code, _STATUS) if isinstance(code, str) else _STATUS
    error = {
        "message": why.get("message") or _words(response["status"]),
        "type": _TYPES.get(status, "BadGatewayError"),
        "param": None,
        "code": code or status,
    }
    return ToldError(status=status, body=json.dumps({"error": error}).encode())


def _words(reason: str) -> str:
    return f"the engine ended the request before its first token: {reason}"


def _say_nothing(parts: Any) -> bool:
    return isinstance(parts, list) and all(map(_is_silent, parts))


def _is_silent(part: Any) -> bool:
    if not isinstance(part, Mapping) or part.get("type") not in _WORDED:
        return False
    inner = [part.get(name) or [] for name in ("content", "summary")]
    return not (part.get("text") or part.get("thinking")) and all(map(_say_nothing, inner))
