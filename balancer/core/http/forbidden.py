"""What a client must not tell an engine: who hands its cache to whom, and what it announces again.

Rules:

1. Removed: `kv_transfer_params`, `ec_transfer_params`, a `request_id` that names engines, the session
   of our own full reports. So is what is meant for us: `conversation_id`.
2. Engines read some of these from `extra_args` of their sampling parameters too, which are
   `vllm_xargs` in most bodies and `sampling_params.extra_args` in `/inference/v1/generate`: removed
   there, with `kv_cache_report_mode`. All else in them has other uses, and stays.
3. A form can't be rewritten without a copy of its files: one that sets such a field is refused.
   What a form sets is read as strictly as `form_head` does, lest an engine read more than we did.

Source: vllm-protocol.md 5; vLLM 0.32, `v1/request.py`.
"""

import json
from typing import Any, Final

import msgspec

from balancer.core.errors import BadRequestError
from balancer.core.http.headers import has_addresses
from indexer.core.reports import FULL_REPORT_SESSION

CONVERSATION = "conversation_id"
"""Names a client's conversation to us; engines don't know it."""
_TRANSFERS = ("kv_transfer_params", "ec_transfer_params")
_FORBIDDEN = (*_TRANSFERS, CONVERSATION)
_FORBIDDEN_ARGS = (*_TRANSFERS, "kv_cache_report_mode")
XARGS: Final = "vllm_xargs"
_SAMPLING: Final = "sampling_params"
_LOOKED_AT = frozenset({*_FORBIDDEN, "session_id", "request_id", XARGS, _SAMPLING})


def without_forbidden(body: dict[str, Any]) -> dict[str, Any]:
    """Return `body` itself if it holds nothing forbidden, else a copy without it."""
    if _LOOKED_AT.isdisjoint(body):
        return body
    drop = {key for key in _FORBIDDEN if key in body}
    if body.get("session_id") == FULL_REPORT_SESSION:
        drop.add("session_id")
    request_id = body.get("request_id")
    if isinstance(request_id, str) and has_addresses(request_id):
        drop.add("request_id")
    changed = {**_cleaned(body, XARGS, _clean_args), **_cleaned(body, _SAMPLING, _clean_sampling)}
    if not drop and not changed:
        return body
    return {key: changed.get(key, value) for key, value in body.items() if key not in drop}


def _cleaned(holder: dict[str, Any], name: str, clean: Any) -> dict[str, Any]:
    """That field as it has to be; nothing if it may stay."""
    value = holder.get(name)
    if not isinstance(value, dict):
        return {}
    cleaned = clean(value)
    return {} if cleaned is value else {name: cleaned}


def _clean_sampling(sampling: dict[str, Any]) -> dict[str, Any]:
    changed = _cleaned(sampling, "extra_args", _clean_args)
    return {**sampling, **changed} if changed else sampling


def _clean_args(args: dict[str, Any]) -> dict[str, Any]:
    ours = [key for key in _FORBIDDEN_ARGS if key in args]
    if args.get("session_id") == FULL_REPORT_SESSION:
        ours.append("session_id")
    return {key: value for key, value in args.items() if key not in ours} if ours else args


def check_form_args(value: bytes) -> None:
    """Raise BadRequestError if a form's `vllm_xargs` set what a client must not."""
    args = _decoded(value)
    if isinstance(args, dict) and _clean_args(args) is not args:
        names = ", ".join(f"`{name}`" for name in (*_FORBIDDEN_ARGS, "session_id"))
        raise BadRequestError(
            f"`{XARGS}` of a form must not set any of {names}: leave them out", param=XARGS
        )


def _decoded(value: bytes) -> Any:
    """As engines read it; nothing where they, too, find no JSON."""
    try:
        text = value.decode()
    except UnicodeDecodeError:
        text = value.decode("latin-1")
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        pass
    try:
        return json.loads(text)
    except ValueError:
        return None
    except RecursionError as error:
        raise BadRequestError(f"`{XARGS}` is nested too deep", param=XARGS) from error
