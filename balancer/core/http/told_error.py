"""An error that an engine tells inside a 200: which status it should have had, and in OpenAI's form.

Rules:

1. An error is an object with an `error` that isn't null, or one that says `"object": "error"` (vLLM up
   to 0.10.0) or `"type": "error"` (Messages).
2. Its status is its own `code` if that is one of an error; in Messages its type says it; else 502.
3. Of a whole answer only the first member decides, so that good answers are recognised by their first
   bytes: engines write errors so, and `error` in the middle of an answer may be a field of it. A
   first member that no good answer has leaves it to the whole. A byte order mark is passed over.
4. The nested form and that of Messages stay as they are; any other is put into OpenAI's.
5. A stream's event named `error` is one, whatever its data are.
6. An answer whose every choice ended by `error` or `abort`, without a word, is one, too. Engines answer
   the first with 500 as a rule: a load that failed. Behind a word it is the client's to see.

Cost: of a good answer, one comparison of five bytes, and two searches once all of it is here.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from balancer.core.http.openai_errors import ANTHROPIC_TYPES

DECISIVE_BYTES: Final = 32
"""How an answer begins is known from so many, if it isn't over before."""
_USUAL: Final = b'{"id"'
BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
_ERROR: Final = re.compile(
    rb'(?:\xef\xbb\xbf)?\s*\{\s*"(?:error"\s*:\s*(?:\{|"[^"])|object"\s*:\s*"error"'
    rb'|type"\s*:\s*"\w*[eE]rror|(?:message|code|param)"\s*:)'
)
_EVENTS: Final = re.compile(rb"(?:\xef\xbb\xbf)?\s*(?:(?:data|event|id|retry) ?:|:)")
_ANSWERS: Final = frozenset({"choices", "content", "output", "data"})
"""Where an answer says what it has to say, whatever its API."""
_UNKNOWN_STATUS: Final = 502
_STATUS_TEXT: Final = re.compile("[45][0-9][0-9]")
FAILED_FINISHES: Final = ("error", "abort")
"""Values of `finish_reason` that say that an engine gave up."""
_FINISHES: Final = {
    "error": (500, "InternalServerError"),
    "abort": (_UNKNOWN_STATUS, "BadGatewayError"),
}
_ANTHROPIC_STATUSES: Final = {
    **{kind: status for status, kind in sorted(ANTHROPIC_TYPES.items(), reverse=True)},
    "api_error": 500,
    "timeout_error": 504,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToldError:
    """What the answer should have been."""

    status: int
    body: bytes


def is_usual(beginning: bytes) -> bool:
    """Tell at a glance that an answer is none of an error; False: look closer."""
    return beginning[:5] == _USUAL


def begins_as_error(beginning: bytes) -> bool:
    """Whether an answer that begins so, with `DECISIVE_BYTES` or all it has, is one of an error."""
    return _ERROR.match(beginning) is not None


def begins_as_events(beginning: bytes) -> bool:
    """Whether what is told to be JSON is an event stream."""
    return _EVENTS.match(beginning) is not None


def read_error(document: bytes) -> ToldError | None:
    """Read the error that a document tells; None if it tells none."""
    document = document.removeprefix(BYTE_ORDER_MARK)
    told = decode_object(document) if b'"error"' in document else None
    if told is None:
        return None
    if told.get("object") == "error":
        return _flat(told)
    error = told.get("error")
    if not error:
        return None
    if not isinstance(error, Mapping):
        return _flat({"message": str(error), "type": "BadGatewayError"})
    if told.get("type") == "error":
        kind = error.get("type")
        known = _ANTHROPIC_STATUSES.get(kind) if isinstance(kind, str) else None
        return ToldError(status=known or _UNKNOWN_STATUS, body=document)
    return ToldError(status=_status(error), body=document)


def read_named_error(data: bytes) -> ToldError:
    """Read the data of an event that is named `error`."""
    told = read_error(data)
    if told is not None:
        return told
    words: Any = decode_object(data)
    if words is None:
        words = {"message": data.decode(errors="replace")}
    return _flat({"message": "the engine told an error", "type": "BadGatewayError", **words})


def read_wordless(document: bytes) -> ToldError | None:
    """What a document has for its client if its engine gave up without a word; else None.

    So it has, too, if it names an error behind other members, and says nothing else.
    """
    if b'"abort"' not in document and b'"error"' not in document:
        return None
    told = decode_object(document)
    if told is not None and told.get("error") and not _ANSWERS & told.keys():
        return read_error(document)
    choices = None if told is None else told.get("choices")
    if not isinstance(choices, list) or not choices or not all(map(_is_wordless, choices)):
        return None
    reason = choices[0]["finish_reason"]
    message = f"the engine ended the request before its first token: {reason}"
    status, kind = _FINISHES[reason]
    return _flat({"message": message, "type": kind, "code": status})


def _is_wordless(choice: Any) -> bool:
    if not isinstance(choice, Mapping) or choice.get("finish_reason") not in FAILED_FINISHES:
        return False
    said = choice.get("delta", choice.get("message"))
    parts = said if isinstance(said, Mapping) else {}
    return not (
        choice.get("text")
        or choice.get("token_ids")
        or any(value for name, value in parts.items() if name != "role")
    )


def _flat(told: Mapping[str, Any]) -> ToldError:
    error = {name: told.get(name) for name in ("message", "type", "param", "code")}
    # The standard library writes lone surrogates, too.
    return ToldError(status=_status(error), body=json.dumps({"error": error}).encode())


def _status(error: Mapping[str, Any]) -> int:
    code = error.get("code")
    if isinstance(code, str) and _STATUS_TEXT.fullmatch(code):
        code = int(code)  # an event of the Responses API
    return code if isinstance(code, int) and 400 <= code <= 599 else _UNKNOWN_STATUS


def decode_object(document: bytes) -> dict[str, Any] | None:
    """The JSON object that a document is; None: it is none."""
    try:
        value = json.loads(document)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
