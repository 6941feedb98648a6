"""What handlers see and say."""

import pytest

from balancer.core.handlers import Refuse, RefusedByHandlerError, amended_headers, seen
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


@pytest.mark.parametrize(
    ("status", "answered"), [(400, 400), (429, 429), (599, 599), (200, 500), (600, 500)]
)
def test_refusal_is_an_error(status: int, answered: int) -> None:
    """Another status than that of an error would be a lie."""
    error = RefusedByHandlerError("no", Refuse(status=status, message="no"))

    assert (error.status, error.code, error.message) == (answered, "refused_by_handler", "no")


def test_headers_are_replaced_by_name() -> None:
    """Whatever its case; the others stay."""
    headers = amended_headers(REQUEST.headers, {"X-Tenant": "three", "x-new": "1"})

    assert headers == ((b"authorization", b"Bearer a"), (b"x-tenant", b"three"), (b"x-new", b"1"))


@pytest.mark.parametrize("more", [{"x": "a\r\nb"}, {"": "a"}, {"x": "é"}, {"a\nb": "c"}])
def test_header_that_cannot_be_is_refused(more: dict[str, str]) -> None:
    """Nobody writes a second header, or a request, into one."""
    with pytest.raises(ValueError, match="header"):
        amended_headers((), more)
