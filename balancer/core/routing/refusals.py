"""What engines refuse of the fields that a prefill leg doesn't show them, and how sure that is.

Rules (vLLM's request models from 0.9.2 on, which pydantic reads without being strict):

1. A prefill leg has limits of its own, is no stream and asks for no log probabilities
   (`core.http.prefill_rewrite`): what is wrong with those only the decode engine sees. All else a
   prefill engine refuses before it computes anything.
2. `CERTAIN`: every release refuses it, whatever its flags. Any engine may be sent it as it came.
3. `LIKELY`: some releases do, or an engine's flags decide (`--max-logprobs`), or what its prompt and
   its answer take together: late releases cut that answer short. No work should be done before
   the decode engine has seen it.

Cost: a look at a dozen fields.
"""

from collections.abc import Mapping
from enum import IntEnum
from typing import Any, Final

from balancer.core.http.lax_bool import is_flag, is_true
from balancer.core.request import Endpoint
from balancer.core.routing.output_limits import explicit_limit, whole_number

USUAL_MAX_LOGPROBS: Final = 20
"""vLLM's `--max-logprobs`, where nobody set it."""
MAX_LOGPROB_TOKEN_IDS: Final = 128
_CHAT: Final = Endpoint.CHAT


class Refusal(IntEnum):
    """How sure it is; the surest of several counts."""

    NO = 0
    LIKELY = 1
    CERTAIN = 2


_NO, _LIKELY, _CERTAIN = Refusal.NO, Refusal.LIKELY, Refusal.CERTAIN


def find_refusal(
    body: Mapping[str, Any],
    endpoint: Endpoint,
    *,
    prompt_tokens: int | None = None,
    context_tokens: int | None = None,
) -> Refusal:
    """Say whether engines refuse `body`. `context_tokens` is the most that any of them has."""
    return max(
        _of_flags(body, endpoint),
        _of_logprobs(body, endpoint),
        _of_limits(body, endpoint),
        _of_context(body, endpoint, prompt_tokens or 0, context_tokens),
    )


def _of_flags(body: Mapping[str, Any], endpoint: Endpoint) -> Refusal:
    if body.get("stream_options") and not is_true(body.get("stream")):
        return _CERTAIN
    answers = whole_number(body.get("n", 1))
    if (answers is None or answers < 1) and (endpoint is not _CHAT or body["n"] is not None):
        return _CERTAIN
    if not is_flag(body.get("use_beam_search", False)):
        return _CERTAIN
    # Of a chat `echo` can't be null.
    echo = body.get("echo", False)
    return _NO if is_flag(echo) or (echo is None and endpoint is not _CHAT) else _CERTAIN


def _of_logprobs(body: Mapping[str, Any], endpoint: Endpoint) -> Refusal:
    asked = body.get("logprobs")
    if endpoint is _CHAT:
        if asked is not None and not is_flag(asked):
            return _CERTAIN
        top = body.get("top_logprobs")
        if not asked and whole_number(top):
            return _CERTAIN
        count = _of_count(top)
    else:
        count = _of_count(asked)
    has_none = not asked if endpoint is _CHAT else asked is None
    return max(count, _of_prompt(body), _of_token_ids(body, has_none))


def _of_prompt(body: Mapping[str, Any]) -> Refusal:
    asked = body.get("prompt_logprobs")
    is_streamed = whole_number(asked) and is_true(body.get("stream"))
    return _CERTAIN if is_streamed else _of_count(asked)


def _of_count(value: object) -> Refusal:
    """Of so many log probabilities of a position. They are looked at before texts become numbers."""
    if value is None:
        return _NO
    count = whole_number(value)
    if count is None or count < -1 or isinstance(value, str):
        return _CERTAIN
    return _NO if 0 <= count <= USUAL_MAX_LOGPROBS else _LIKELY


def _of_token_ids(body: Mapping[str, Any], has_no_logprobs: bool) -> Refusal:
    """Of log probabilities of named tokens, which early releases overlook."""
    ids = body.get("logprob_token_ids")
    if not ids:
        return _NO
    is_list = isinstance(ids, list) and len(ids) <= MAX_LOGPROB_TOKEN_IDS
    return _LIKELY if has_no_logprobs or not is_list else _NO


def _of_limits(body: Mapping[str, Any], endpoint: Endpoint) -> Refusal:
    names = ("max_completion_tokens", "max_tokens") if endpoint is _CHAT else ("max_tokens",)
    if any(body.get(name) is not None and whole_number(body[name]) is None for name in names):
        return _CERTAIN
    least = whole_number(body.get("min_tokens", 0))
    if least is None:
        return _CERTAIN
    most = explicit_limit(body, endpoint)
    return min(_of_range(body, endpoint, least, most), _surest(body))


def _surest(body: Mapping[str, Any]) -> Refusal:
    """Beam search overlooks limits that are out of range."""
    return _LIKELY if body.get("use_beam_search") else _CERTAIN


def _of_range(body: Mapping[str, Any], endpoint: Endpoint, least: int, most: int | None) -> Refusal:
    if most is not None and most < 1:
        return _LIKELY if most == 0 and _may_be_none(body, endpoint) else _CERTAIN
    if least < 0:
        return _CERTAIN
    if most is None or least <= most:
        return _NO
    # Early releases take null for no limit at all.
    return _LIKELY if "max_tokens" in body and body["max_tokens"] is None else _CERTAIN


def _may_be_none(body: Mapping[str, Any], endpoint: Endpoint) -> bool:
    """Some releases take this limit of 0 for none; a completion may be its own echo."""
    if endpoint is _CHAT:
        return body.get("max_completion_tokens") is not None
    return bool(body.get("echo"))


def _of_context(
    body: Mapping[str, Any], endpoint: Endpoint, prompt_tokens: int, context_tokens: int | None
) -> Refusal:
    most = explicit_limit(body, endpoint)
    if context_tokens is None or most is None:
        return _NO
    if most > context_tokens:
        return _CERTAIN
    return _LIKELY if prompt_tokens + most > context_tokens else _NO
