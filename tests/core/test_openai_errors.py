"""Errors in the form that clients know."""

import json

import pytest

from balancer.core import errors
from balancer.core.http.openai_errors import render_error, render_error_event


def all_errors() -> list[type[errors.BalancerError]]:
    found: list[type[errors.BalancerError]] = [errors.BalancerError]
    for each in found:
        found += each.__subclasses__()
    return [each for each in found if not issubclass(each, errors.EngineRefusedError)]


@pytest.mark.parametrize("kind", all_errors(), ids=lambda kind: kind.__name__)
def test_every_error_has_status_and_form(kind: type[errors.BalancerError]) -> None:
    """Message, type, param and code, with the class's status."""
    told = render_error(kind("what happened"))

    body = json.loads(told.body)["error"]
    assert body == {
        "message": "what happened",
        "type": kind.type,
        "param": None,
        "code": kind.code,
    }
    assert told.status == kind.status
    assert (b"content-length", str(len(told.body)).encode()) in told.headers


@pytest.mark.parametrize("kind", all_errors(), ids=lambda kind: kind.__name__)
def test_clients_faults_are_4xx_and_never_retried(kind: type[errors.BalancerError]) -> None:
    """A 5xx would make clients retry what can't succeed (F44)."""
    is_request_error = issubclass(kind, errors.RequestError)

    assert (400 <= kind.status < 500) == (is_request_error or kind is errors.ClientGoneError)
    assert not (is_request_error and kind.retryable)


def test_full_fleet_says_when_to_come_back() -> None:
    """Retry-After (F26)."""
    told = render_error(errors.OverloadedError("full", retry_after_s=7))

    assert (b"retry-after", b"7") in told.headers


def test_wrong_method_says_the_right_one() -> None:
    """Allow, if it is known."""
    assert (b"allow", b"POST") in render_error(
        errors.MethodNotAllowedError("no", allow="POST")
    ).headers
    assert all(
        name != b"allow" for name, _ in render_error(errors.MethodNotAllowedError("no")).headers
    )


def test_unread_body_ends_the_connection() -> None:
    """Its rest must not be taken for the next request."""
    assert (b"connection", b"close") in render_error(errors.BodyTooLargeError("big")).headers


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (errors.BadRequestError("x"), "invalid_request_error"),
        (errors.NoInstanceError("x"), "overloaded_error"),
        (errors.StreamCutError("x"), "api_error"),
    ],
)
def test_messages_path_gets_anthropics_form(error: errors.BalancerError, kind: str) -> None:
    """Clients of that API read that form."""
    body = json.loads(render_error(error, path="/v1/messages").body)

    assert body == {"type": "error", "error": {"type": kind, "message": "x"}}


def test_error_event_is_one_event_without_done() -> None:
    """The end of a stream is never made up (F48)."""
    event = render_error_event(errors.StreamCutError("cut"))

    assert event.startswith(b"data: {")
    assert event.endswith(b"}\n\n")
    assert event.count(b"\n\n") == 1
    assert b"[DONE]" not in event


def test_refusal_of_an_engine_keeps_its_status() -> None:
    """Only a 503 asks for another instance."""
    busy = errors.EngineRefusedError(503, (), b"", alias="e0")
    wrong = errors.EngineRefusedError(400, (), b"", alias="e0")

    assert (busy.status, busy.retryable) == (503, True)
    assert (wrong.status, wrong.retryable) == (400, False)


def test_a_name_that_is_no_unicode_can_be_told() -> None:
    """A client may ask for any model."""
    error = errors.ModelNotFoundError("The model `\ud800` does not exist.")

    assert json.loads(render_error(error).body)["error"]["message"] == error.message
