"""What a handler of the operator's own sees of a request, and what it may answer.

A handler is an `async` function of one `SeenRequest`, or a class whose instances are called like one.
It is asked once per request, before tokens are looked up and anybody is chosen, and returns

- None: go on as if it weren't there;
- `Refuse`: answer with an error in OpenAI's form;
- `Amend`: go on with another body or more headers;
- `Reply`: this is the answer, no engine is asked.

docs/extending.md shows one of each; `core.verdicts` says which can be carried out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from balancer.core.errors import BalancerError
from balancer.core.request import GenerateRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenRequest:
    """A request to an engine. Nothing of it may be changed in place."""

    request_id: str
    path: str
    model: str
    """As the client named it; empty where a path can't name one."""
    base_model: str
    adapter: str | None
    """Name of the LoRA adapter, if `model` is one."""
    stream: bool
    body: Mapping[str, Any]
    """The JSON object, without what clients must not set; empty where the body is none."""
    headers: Mapping[str, str]
    """The client's headers, names in lower case; of several with one name the last."""
    method: str = "POST"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """Answer with an error."""

    status: int
    """400 to 599."""
    message: str
    code: str | None = None
    """A constant: it is a label of `kvlb_requests_total`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Amend:
    """Go on, with these changes."""

    body: Mapping[str, Any] | None = None
    """In place of the client's; read and checked as if it were."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Added to what the engines get; replaces those of the same name. Not those that frame a message,
    `content-type`, ids and ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The answer, in place of an engine's."""

    body: bytes
    """Its length is told by kvlb."""
    status: int = 200
    """200 to 599; 204, 205 and 304 have no body."""
    media_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)


_LENGTHLESS = frozenset({204, 304})

Verdict = Refuse | Amend | Reply | None


class CompletionHandler(Protocol):
    """What the keys of `handlers` name."""

    async def __call__(self, request: SeenRequest) -> Verdict:
        """Judge one request. What it raises, or too long a time, refuses it with 503."""
        ...


class HandlerFailedError(BalancerError):
    """The operator's own handler failed: it may be what lets requests in, so nothing goes on."""

    status = 503
    type = "ServiceUnavailableError"
    code = "handler_failed"


class RefusedByHandlerError(BalancerError):
    """The operator's own handler refused the request."""

    type = "RequestRefusedError"
    code = "refused_by_handler"

    def __init__(self, message: str, refusal: Refuse | None = None) -> None:
        super().__init__(message)
        if refusal is not None:
            self.status = refusal.status
            self.code = refusal.code or self.code


def seen(request: GenerateRequest) -> SeenRequest:
    """What a handler is shown."""
    return SeenRequest(
        request_id=request.request_id,
        path=request.endpoint.value,
        model=request.model,
        base_model=request.base_model,
        adapter=request.lora,
        stream=request.stream,
        body=request.body,
        headers=headers_as_text(request.headers),
    )


def headers_as_text(headers: tuple[tuple[bytes, bytes], ...]) -> Mapping[str, str]:
    """As a handler is shown them."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}


def reply_headers(reply: Reply) -> tuple[tuple[bytes, bytes], ...]:
    """Of an answer that a handler gave, checked."""
    more = amended_headers((), {"content-type": reply.media_type, **reply.headers})
    if reply.status in _LENGTHLESS:
        return more
    return (*more, (b"content-length", str(len(reply.body)).encode()))


def amended_headers(
    headers: tuple[tuple[bytes, bytes], ...], more: Mapping[str, str]
) -> tuple[tuple[bytes, bytes], ...]:
    """`headers` with those of a checked verdict, whose names are in lower case."""
    added = tuple((name.encode(), value.encode()) for name, value in more.items())
    names = {name for name, _ in added}
    return (*(each for each in headers if each[0] not in names), *added)
