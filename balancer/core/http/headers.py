"""Which headers pass, in both directions, and what a request id may look like.

Rules:

1. Hop-by-hop headers, and the ones `Connection` names, end here (RFC 9110, 7.6.1).
2. What only we may tell an engine (`X-data-parallel-rank`, the request id, the session of a full
   report) is never the client's; what is asked of us alone (`x-kvlb-explain`) ends here.
3. A request id that carries engine addresses (MoRIIO, P2P NCCL) would let a client steer a KV
   transfer: it is replaced. So is anything that isn't a short run of plain characters.
4. Everything else passes, in its order, values untouched.

Cost: one pass over the headers.
"""

import re
from collections.abc import Iterable

from indexer.core.reports import FULL_REPORT_SESSION

Headers = tuple[tuple[bytes, bytes], ...]

ASKS_WHY = b"x-kvlb-explain"
"""A request with this header is told the candidates and why one of them won."""

_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_REQUEST_STOPS = _HOP_BY_HOP | {
    b"host",
    b"content-length",
    b"expect",
    b"x-data-parallel-rank",
    b"x-request-id",
    ASKS_WHY,
}
_READABLE_STOPS = _REQUEST_STOPS | {b"accept-encoding"}
_OUR_SESSION = FULL_REPORT_SESSION.encode()
_ANSWER_STOPS = _HOP_BY_HOP | {b"x-request-id"}

_NOT_A_HANDLERS = _READABLE_STOPS | {b"content-type"}
"""By the content type it was judged what of a body a client must not set."""

_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(r"[ -~]*")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:@/+=-]{1,128}")
_ADDRESS_MARKS = ("___prefill_addr_", "___decode_addr_")


def pass_request_headers(
    headers: Iterable[tuple[bytes, bytes]], *, readable: bool = False
) -> Headers:
    """Keep the client's end-to-end headers, less those that are ours to set.

    `readable`: nor may an answer be encoded, since it has to be read on its way.
    """
    passed = _without(headers, _READABLE_STOPS if readable else _REQUEST_STOPS)
    ours = (b"x-session-id", _OUR_SESSION)
    return tuple([pair for pair in passed if pair != ours]) if ours in passed else tuple(passed)


def pass_answer_headers(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Keep the engine's end-to-end headers, less the request id and our own names."""
    return tuple(_without(headers, _ANSWER_STOPS, b"x-kvlb-"))


def is_ours_to_ask(name: bytes, value: bytes) -> bool:
    """Tell whether nobody else may add this header (name in lower case) to what engines get."""
    if name == b"x-session-id":
        return value == _OUR_SESSION
    return name in _NOT_A_HANDLERS or name.startswith(b"x-kvlb-")


def is_ours_to_answer(name: bytes, _value: bytes) -> bool:
    """Tell whether nobody else may set this header (name in lower case) of our own answers."""
    return name in _ANSWER_STOPS or name == b"content-length" or name.startswith(b"x-kvlb-")


def may_be_header(name: object, value: object) -> bool:
    """Tell whether HTTP has such a header: nobody writes a second one, or a request, into it."""
    if not isinstance(name, str) or not isinstance(value, str):
        return False
    return _NAME.fullmatch(name) is not None and _VALUE.fullmatch(value) is not None


def find_header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> bytes | None:
    """Return the first value of `name` (lower case)."""
    for each, value in headers:
        if each == name:
            return value
    return None


def drop_header(headers: Headers, name: bytes) -> Headers:
    """Return `headers` without `name` (lower case)."""
    return tuple([pair for pair in headers if pair[0] != name])


def clean_request_id(raw: object) -> str | None:
    """Accept a client's request id, or None if one has to be made up."""
    if isinstance(raw, bytes):
        raw = raw.decode("latin-1")
    if not isinstance(raw, str) or not _REQUEST_ID.fullmatch(raw) or has_addresses(raw):
        return None
    return raw


def has_addresses(request_id: str) -> bool:
    """Tell whether the id names engines for a KV transfer."""
    return any(mark in request_id for mark in _ADDRESS_MARKS)


def _without(
    headers: Iterable[tuple[bytes, bytes]], stops: frozenset[bytes], prefix: bytes | None = None
) -> list[tuple[bytes, bytes]]:
    """Those that are neither stopped nor begin with `prefix`. In one loop: it is run twice a request."""
    passed = []
    named: set[bytes] = set()
    for pair in headers:
        if pair[0] in stops:
            if pair[0] == b"connection":
                named.update(token.strip().lower() for token in pair[1].split(b","))
        elif prefix is None or not pair[0].startswith(prefix):
            passed.append(pair)
    return [pair for pair in passed if pair[0] not in named] if named else passed
