"""What browsers are told."""

from typing import Any

import pytest

from balancer.core.http.cors import Cors

APP = b"https://app.example.org"


def headers(**named: bytes) -> tuple[tuple[bytes, bytes], ...]:
    return tuple((name.replace("_", "-").encode(), value) for name, value in named.items())


def test_it_is_off_without_origins() -> None:
    """The default."""
    assert not Cors(()).is_on
    assert Cors(("*",)).is_on


@pytest.mark.parametrize(
    ("method", "asked", "expected"),
    [
        ("OPTIONS", headers(origin=APP, access_control_request_method=b"POST"), True),
        ("OPTIONS", headers(origin=APP), False),
        ("OPTIONS", headers(access_control_request_method=b"POST"), False),
        ("POST", headers(origin=APP, access_control_request_method=b"POST"), False),
    ],
)
def test_preflights_are_told_from_other_questions(
    method: str, asked: Any, expected: object
) -> None:
    """Both headers make one."""
    assert Cors(("*",)).is_preflight(method, asked) is expected


def test_named_origin_is_let_in() -> None:
    """With what it asked for; a slash at its end in the settings is no difference."""
    asked = headers(
        origin=APP,
        access_control_request_method=b"POST",
        access_control_request_headers=b"authorization, content-type",
    )

    told = dict(Cors((APP.decode() + "/",)).preflight(asked, ("POST",)))

    assert told[b"access-control-allow-origin"] == APP
    assert told[b"access-control-allow-methods"] == b"POST"
    assert told[b"access-control-allow-headers"] == b"authorization, content-type"
    assert told[b"vary"] == b"origin"
    assert b"access-control-allow-credentials" not in told


def test_other_origin_is_told_nothing() -> None:
    """Which is how a browser is refused."""
    cors = Cors((APP.decode(),))
    other = headers(origin=b"https://evil.example", access_control_request_method=b"POST")

    assert cors.preflight(other, ("POST",)) == ((b"vary", b"origin"),)
    assert cors.answer(other, ()) == ((b"vary", b"origin"),)


def test_any_origin_needs_no_variants() -> None:
    """One answer for all; a preflight without headers names none."""
    asked = headers(origin=APP, access_control_request_method=b"POST")

    told = dict(Cors(("*",)).preflight(asked, ("POST",)))

    assert told[b"access-control-allow-origin"] == b"*"
    assert b"vary" not in told
    assert b"access-control-allow-headers" not in told


def test_engines_own_headers_are_replaced() -> None:
    """None is doubled, everything else stays where it was (X4)."""
    engine = headers(
        content_type=b"application/json", access_control_allow_origin=b"*", x_other=b"1"
    )

    answered = Cors((APP.decode(),)).answer(headers(origin=APP), engine)

    assert [name for name, _ in answered].count(b"access-control-allow-origin") == 1
    assert dict(answered)[b"access-control-allow-origin"] == APP
    assert answered[:2] == headers(content_type=b"application/json", x_other=b"1")


def test_requests_without_an_origin_are_none_of_browsers() -> None:
    """Nothing is allowed that nobody asked for."""
    assert Cors(("*",)).answer((), headers(a=b"b")) == headers(a=b"b")
