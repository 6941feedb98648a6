"""What has to be known of a forwarded request, whatever its body is.

Rules:

1. JSON is read for a handful of fields, a form (audio uploads) for the name of its model and its
   `vllm_xargs`; nothing else is looked at. JSON that can't be understood is the engine's to refuse; a
   form that could be understood in two ways is refused here.
2. The body passes as it came. Only where it starts a generation (`EnginePath.generates`) is taken
   out of it what a client must not set, as on the scored paths; then it is written anew. Nested
   deeper than we can read, it is refused.
3. JSON is read as engines read it: with a byte order mark, in UTF-16 and 32, with lone surrogates.

Cost: one scan of a JSON body, or of a form.
"""

import json
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from balancer.core.errors import BadRequestError
from balancer.core.http.body import Body, PiecedBody, whole
from balancer.core.http.engine_paths import may_name_response
from balancer.core.http.forbidden import XARGS, check_form_args, without_forbidden
from balancer.core.http.form_field import read_fields
from balancer.core.http.lax_bool import is_true
from balancer.core.http.rewrite import decode_body, encode_body

_MODEL: Final = b"model"
_XARGS: Final = XARGS.encode()
_ASKED_ELSEWHERE: Final = {_MODEL: 1024}
_ASKED: Final = {**_ASKED_ELSEWHERE, _XARGS: 65_536}
"""Fields of a form, and how long they may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBody:
    """A body, and what it says."""

    body: Body
    model: Any = None
    """What it names; "" if it could name a model and doesn't, None if it can't."""
    previous_response: str | None = None
    """Id of a response that this request goes on from. What can be none is the engine's to refuse."""
    stream: bool = False
    background: bool = False
    """A response that its client may ask about, or cancel, by the id that comes first."""
    is_json: bool = False


class _Fields(msgspec.Struct):
    """Of any JSON body. What a client must not set is here only to be noticed."""

    model: Any = None
    previous_response_id: Any = None
    stream: Any = None
    background: Any = None
    request_id: Any = None
    session_id: Any = None
    vllm_xargs: Any = None
    sampling_params: Any = None
    kv_transfer_params: Any = msgspec.UNSET
    ec_transfer_params: Any = msgspec.UNSET

    @property
    def may_be_forbidden(self) -> bool:
        return (
            self.kv_transfer_params is not msgspec.UNSET
            or self.ec_transfer_params is not msgspec.UNSET
            or self.vllm_xargs is not None
            or self.sampling_params is not None
            or self.request_id is not None
            or self.session_id is not None
        )


def read_body(content_type: bytes, body: PiecedBody, *, generates: bool) -> ReadBody:
    """Read what is needed of a body; `generates` as in `EnginePath`."""
    kind = content_type.lower()
    if kind.startswith(b"multipart/form-data"):
        return _read_form(content_type, body, generates=generates)
    if not kind.startswith(b"application/json"):
        return ReadBody(body=body)
    raw = whole(body)
    try:
        fields = _read_fields(raw)
    except RecursionError as error:
        if generates:  # an engine may get further, to a field that it must not see
            raise BadRequestError("the body is nested too deep") from error
        fields = None
    if fields is None:
        return ReadBody(body=raw, is_json=True)
    previous = fields.previous_response_id
    return ReadBody(
        body=_cleaned(raw) if generates and fields.may_be_forbidden else raw,
        model="" if fields.model is None else fields.model,
        previous_response=(
            previous if isinstance(previous, str) and may_name_response(previous) else None
        ),
        stream=is_true(fields.stream),
        background=is_true(fields.background),
        is_json=True,
    )


def _read_form(content_type: bytes, body: PiecedBody, *, generates: bool) -> ReadBody:
    found = read_fields(content_type, body.pieces, _ASKED if generates else _ASKED_ELSEWHERE)
    args = found.get(_XARGS)
    if args is not None:
        check_form_args(args)
    return ReadBody(body=body, model=found.get(_MODEL, b"").decode("utf-8", "replace"))


def _read_fields(raw: bytes) -> _Fields | None:
    try:
        return msgspec.json.decode(raw, type=_Fields)
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass
    try:
        return msgspec.convert(json.loads(raw), _Fields)
    except ValueError:  # msgspec.ValidationError is a ValueError
        return None


def _cleaned(raw: bytes) -> bytes:
    body = decode_body(raw).value
    clean = without_forbidden(body)
    return raw if clean is body else encode_body(clean)
