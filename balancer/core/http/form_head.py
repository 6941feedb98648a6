"""What a `multipart/form-data` body says of itself: its content type, and the heads of its parts.

Rules:

1. Read is the plain grammar that clients send (browsers, curl, HTTP libraries): of it every parser
   makes the same. All else is refused, since an engine's parser could find a field where we saw none.
2. A parameter stands once, with nothing around its `=`, as a token or in quotes without a backslash.
   A part has one Content-Disposition, which knows `name`, `filename`, and `filename*` beside it.
3. Text is UTF-8, or another charset that has ASCII where ASCII is.

Cost: linear in the head, which is bounded by who reads it.
"""

import re
from typing import Final, NamedTuple

from balancer.core.errors import BadRequestError

_TOKEN: Final = rb"[!#$%&'+.^_`|~0-9A-Za-z-]+"
_PARAMETER = re.compile(
    rb"[ \t]*;[ \t]*(" + _TOKEN + rb"\*?)=(?:"
    rb'"([^"\\\x00-\x1f\x7f]*)"'
    rb"|([!#-:=-\[\]-~]+))"  # visible ASCII but for quotes, backslashes, ";", and "<", a quote to some
)
_LINE = re.compile(rb"(" + _TOKEN + rb"):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*)")
_TYPE: Final = b"multipart/form-data"
_DISPOSITION: Final = b"form-data"
_BOUNDARY = re.compile(rb"[0-9A-Za-z'()+_,./:=?-]{1,200}")
_MAX_LINES: Final = 8
"""As engines allow."""
_CHARSETS = frozenset({b"utf-8", b"utf8", b"us-ascii", b"ascii", b"iso-8859-1"})


class Part(NamedTuple):
    """One part of a form."""

    name: bytes
    is_file: bool


def refused(words: str, param: str | None = None) -> BadRequestError:
    """What the client of a form is told that can't be read in one way only."""
    return BadRequestError(f"the form can't be read: {words}", param=param)


def read_boundary(content_type: bytes) -> bytes:
    """Return what stands between parts. Raises BadRequestError."""
    told = _parameters(content_type, _TYPE, frozenset({b"boundary", b"charset"}), "Content-Type")
    charset = told.get(b"charset", b"utf-8")
    if charset.lower() not in _CHARSETS:
        raise refused("its charset has to be UTF-8")
    boundary = told.get(b"boundary", b"")
    if not _BOUNDARY.fullmatch(boundary):
        raise refused("its Content-Type has to name a boundary of 1 to 200 plain characters")
    return boundary


def read_part(head: bytes) -> Part:
    """Return what the lines before a part's content say of it. Raises BadRequestError."""
    known = frozenset({b"name", b"filename", b"filename*"})
    told = _parameters(_disposition(head), _DISPOSITION, known, "Content-Disposition")
    if b"name" not in told:
        raise refused("one of its parts has no `name` in its Content-Disposition")
    if b"filename*" in told and b"filename" not in told:
        raise refused("`filename*` has to have a plain `filename` beside it")
    return Part(told[b"name"], b"filename" in told)


def _disposition(head: bytes) -> bytes:
    lines = head.split(b"\r\n", _MAX_LINES)
    if len(lines) > _MAX_LINES:
        raise refused(f"the head of one of its parts has more than {_MAX_LINES} lines")
    found = []
    for line in lines:
        match = _LINE.fullmatch(line)
        if match is None:
            raise refused("a line in the head of one of its parts isn't `name: value`")
        if match.group(1).lower() == b"content-disposition":
            found.append(match.group(2))
    if len(found) != 1:
        raise refused("each of its parts has to have one Content-Disposition")
    return found[0]


def _parameters(
    raw: bytes, kind: bytes, known: frozenset[bytes], header: str
) -> dict[bytes, bytes]:
    """What follows `kind`, by name in lower case."""
    raw = raw.rstrip(b" \t")
    if raw[: len(kind)].lower() != kind:
        raise refused(f"{header} has to be {kind.decode()}")
    told: dict[bytes, bytes] = {}
    at = len(kind)
    while at < len(raw):
        match = _PARAMETER.match(raw, at)
        if match is None:
            raise refused(
                f'{header} has to have the form {kind.decode()}; name=value; name="value"'
            )
        name = match.group(1).lower()
        if name not in known:
            raise refused(f"{header} has a parameter that isn't known: {name.decode()}")
        if name in told:
            raise refused(f"{header} has `{name.decode()}` twice")
        told[name] = match.group(2) if match.group(3) is None else match.group(3)
        at = match.end()
    return told
