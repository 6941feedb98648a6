"""What a handler answered, checked: what `checked` gives can be carried out.

Rules:

1. A verdict comes from somebody else's code, so nothing of it is taken on trust: types, ranges, and
   what can't be written as UTF-8 or as a header.
2. What frames a message, and what only this balancer tells an engine or a client, isn't a handler's:
   headers that could cut a request in two, ids, ranks.
3. What can't be used has a constant reason, which holds nothing of the verdict.
4. The outcome shares no mapping with the verdict: nothing can change it any more.

Cost: one pass over its headers.
"""

from collections.abc import Callable, Mapping

from balancer.core.handlers import Amend, Refuse, Reply, Verdict
from balancer.core.http.headers import is_ours_to_answer, is_ours_to_ask, may_be_header

_BODILESS = frozenset({204, 205, 304})
_MAX_CODE_CHARS = 128


class UnusableVerdictError(ValueError):
    """A handler answered what can't be carried out. The message is a constant."""


def checked(verdict: object) -> Verdict:
    """The verdict, if it can be carried out. Raises UnusableVerdictError."""
    match verdict:
        case None:
            return None
        case Refuse():
            return _refusal(verdict)
        case Amend():
            return _change(verdict)
        case Reply():
            return _reply(verdict)
        case _:
            raise UnusableVerdictError("not None, Refuse, Amend or Reply")


def _refusal(verdict: Refuse) -> Refuse:
    code = verdict.code
    _require(_is_status(verdict.status, 400), "Refuse.status is not 400 to 599")
    _require(_is_unicode(verdict.message), "Refuse.message is not a string, or not Unicode")
    _require(code is None or _is_label(code), "Refuse.code is not a short printable string")
    return Refuse(status=int(verdict.status), message=verdict.message, code=code)


def _change(verdict: Amend) -> Amend:
    body = verdict.body
    _require(body is None or isinstance(body, Mapping), "Amend.body is not an object")
    return Amend(
        body=None if body is None else dict(body),
        headers=_headers(verdict.headers, "Amend.headers", is_ours_to_ask),
    )


def _reply(verdict: Reply) -> Reply:
    _require(_is_status(verdict.status, 200), "Reply.status is not 200 to 599")
    _require(isinstance(verdict.body, bytes), "Reply.body is not bytes")
    _require(not verdict.body or verdict.status not in _BODILESS, "Reply.status can't have a body")
    is_type = bool(verdict.media_type) and may_be_header("content-type", verdict.media_type)
    _require(is_type, "Reply.media_type is no header")
    return Reply(
        body=verdict.body,
        status=int(verdict.status),
        media_type=verdict.media_type,
        headers=_headers(verdict.headers, "Reply.headers", is_ours_to_answer),
    )


def _headers(
    headers: object, where: str, is_ours: Callable[[bytes, bytes], bool]
) -> Mapping[str, str]:
    """With names in lower case."""
    if not isinstance(headers, Mapping):
        raise UnusableVerdictError(f"{where} is not a mapping")
    taken: dict[str, str] = {}
    for name, value in headers.items():
        _require(may_be_header(name, value), f"{where} holds what can't stand in one")
        lower = name.lower()
        _require(
            not is_ours(lower.encode(), value.encode()), f"{where} sets what is not its to set"
        )
        taken[lower] = value
    return taken


def _is_status(value: object, least: int) -> bool:
    return isinstance(value, int) and least <= value < 600


def _is_unicode(value: object) -> bool:
    """Whether it is a string that UTF-8 can write."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_label(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _MAX_CODE_CHARS and value.isprintable()


def _require(is_so: bool, reason: str) -> None:
    if not is_so:
        raise UnusableVerdictError(reason)
