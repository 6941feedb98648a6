"""What handlers see and say."""

import pytest

from balancer.core.handlers import (
    Refuse,
    RefusedByHandlerError,
    Reply,
    amended_headers,
    reply_headers,
    seen,
)
from balancer.core.request import Endpoint, GenerateRequest

REQUEST = GenerateRequest(
    request_id="r",
    endpoint=Endpoint.CHAT,
    body={"messages": [], "stream": True},
    raw_body=b"",
    headers=((b"authorization", b"Bearer a"), (b"x-tenant", b"\xe9"), (b"x-tenant", b"two")),
    model="sql",
    base_model="tiny",
    lora="sql",
)


def test_handler_sees_the_request() -> None:
    """Parsed, with its headers as text."""
    shown = seen(REQUEST)

    assert (shown.path, shown.model, shown.base_model) == ("/v1/chat/completions", "sql", "tiny")
    assert (shown.adapter, shown.stream, shown.body) == ("sql", True, REQUEST.body)
    assert shown.headers == {"authorization": "Bearer a", "x-tenant": "two"}


@pytest.mark.parametrize("code", [None, "budget"])
def test_refusal_is_an_error(code: str | None) -> None:
    """With a code of ours, unless it says one."""
    error = RefusedByHandlerError("no", Refuse(status=429, message="no", code=code))

    assert (error.status, error.message) == (429, "no")
    assert error.code == (code or "refused_by_handler")
    assert RefusedByHandlerError("no").status == 500


def test_headers_are_replaced_by_name() -> None:
    """The others stay."""
    headers = amended_headers(REQUEST.headers, {"x-tenant": "three", "x-new": "1"})

    assert headers == ((b"authorization", b"Bearer a"), (b"x-tenant", b"three"), (b"x-new", b"1"))


@pytest.mark.parametrize(("status", "length"), [(200, (b"content-length", b"0")), (204, None)])
def test_reply_tells_its_length(status: int, length: tuple[bytes, bytes] | None) -> None:
    """Unless its status says that there is none."""
    headers = reply_headers(Reply(body=b"", status=status, headers={"x-cache": "hit"}))

    expected = ((b"content-type", b"application/json"), (b"x-cache", b"hit"))
    assert headers == (*expected, *((length,) if length else ()))
