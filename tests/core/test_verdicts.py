"""Verdicts of handlers: what can be carried out, and what can't."""

from http import HTTPStatus
from types import MappingProxyType
from typing import Any

import pytest

from balancer.core.handlers import Amend, Refuse, Reply
from balancer.core.verdicts import UnusableVerdictError, checked

REFUSE: Any = Refuse
"""Any: handlers answer what type checkers refuse."""
AMEND: Any = Amend
REPLY: Any = Reply


@pytest.mark.parametrize(
    "verdict",
    [
        pytest.param(None, id="none"),
        pytest.param(Refuse(status=400, message=""), id="refuse"),
        pytest.param(Refuse(status=HTTPStatus.FORBIDDEN, message="é", code="c"), id="refuse-code"),
        pytest.param(Amend(), id="amend-nothing"),
        pytest.param(Amend(body={"a": "\ud800"}, headers={"x-a": ""}), id="amend"),
        pytest.param(Amend(headers={"x-session-id": "mine"}), id="amend-session"),
        pytest.param(Reply(body=b""), id="reply"),
        pytest.param(Reply(body=b"", status=204), id="reply-without-body"),
        pytest.param(Reply(body=b"x", status=599, headers={"etag": "1"}), id="reply-headers"),
    ],
)
def test_what_can_be_carried_out_stays_as_it_is(verdict: Any) -> None:
    """Nothing is changed of it."""
    assert checked(verdict) == verdict


def test_outcome_is_a_copy() -> None:
    """What the handler keeps of it can't change it any more; names are in lower case."""
    headers, body = {"X-A": "1"}, {"a": 1}
    outcome = checked(Amend(body=MappingProxyType(body), headers=headers))
    headers["x-b"], body["b"] = "2", 2

    assert outcome == Amend(body={"a": 1}, headers={"x-a": "1"})


@pytest.mark.parametrize("verdict", ["no", True, Refuse, {"status": 403}, [None]])
def test_another_type_is_no_verdict(verdict: Any) -> None:
    """It may have been meant as anything."""
    with pytest.raises(UnusableVerdictError, match=r"^not None, Refuse, Amend or Reply"):
        checked(verdict)


@pytest.mark.parametrize(
    ("verdict", "reason"),
    [
        pytest.param(REFUSE(status="403", message="m"), "Refuse.status", id="status-text"),
        pytest.param(REFUSE(status=200, message="m"), "Refuse.status", id="status-no-error"),
        pytest.param(REFUSE(status=600, message="m"), "Refuse.status", id="status-unknown"),
        pytest.param(REFUSE(status=403, message=None), "Refuse.message", id="no-message"),
        pytest.param(REFUSE(status=403, message="\ud800"), "Refuse.message", id="surrogate"),
        pytest.param(REFUSE(status=403, message="m", code={}), "Refuse.code", id="code-object"),
        pytest.param(REFUSE(status=403, message="m", code="\ud800"), "Refuse.code", id="code-odd"),
        pytest.param(REFUSE(status=403, message="m", code="a\n"), "Refuse.code", id="code-break"),
        pytest.param(
            REFUSE(status=403, message="m", code="a" * 129), "Refuse.code", id="code-long"
        ),
        pytest.param(AMEND(body=[1]), "Amend.body", id="body-list"),
        pytest.param(AMEND(headers=None), "Amend.headers is not", id="no-headers"),
        pytest.param(AMEND(headers=[("a", "b")]), "Amend.headers is not", id="headers-list"),
        pytest.param(AMEND(headers={b"a": "b"}), "Amend.headers holds", id="name-bytes"),
        pytest.param(AMEND(headers={"a": 3}), "Amend.headers holds", id="value-number"),
        pytest.param(REPLY(body="{}"), "Reply.body", id="reply-text"),
        pytest.param(REPLY(body=None), "Reply.body", id="reply-nothing"),
        pytest.param(REPLY(body=b"x", status=99), "Reply.status", id="reply-99"),
        pytest.param(REPLY(body=b"x", status=101), "Reply.status", id="reply-101"),
        pytest.param(REPLY(body=b"x", status=700), "Reply.status", id="reply-700"),
        pytest.param(REPLY(body=b"x", status=204), "Reply.status can't", id="reply-204-with-body"),
        pytest.param(REPLY(body=b"x", media_type=""), "Reply.media_type", id="media-type-empty"),
        pytest.param(REPLY(body=b"x", media_type=3), "Reply.media_type", id="media-type-number"),
        pytest.param(REPLY(body=b"x", media_type="a\r\nb"), "Reply.media_type", id="media-type-2"),
        pytest.param(REPLY(body=b"x", headers=3), "Reply.headers is not", id="reply-headers"),
    ],
)
def test_what_cannot_be_carried_out_has_its_reason(verdict: Any, reason: str) -> None:
    """Told by the field; nothing of the value is in it."""
    with pytest.raises(UnusableVerdictError, match=f"^{reason}"):
        checked(verdict)


@pytest.mark.parametrize(
    "headers",
    [{"x": "a\r\nb"}, {"": "a"}, {"x": "é"}, {"a\nb": "c"}, {"a b": "c"}, {"a:": "c"}],
)
def test_header_that_cannot_be_is_refused(headers: dict[str, str]) -> None:
    """Nobody writes a second header, or a request, into one."""
    for verdict in (Amend(headers=headers), Reply(body=b"", headers=headers)):
        with pytest.raises(UnusableVerdictError, match="holds what can't stand in one"):
            checked(verdict)


@pytest.mark.parametrize(
    "name",
    [
        "Content-Length",
        "transfer-encoding",
        "host",
        "connection",
        "keep-alive",
        "te",
        "trailer",
        "upgrade",
        "proxy-authorization",
        "expect",
        "accept-encoding",
        "content-type",
        "x-data-parallel-rank",
        "x-request-id",
        "x-kvlb-balancer",
    ],
)
def test_what_frames_or_steers_a_request_is_not_a_handlers(name: str) -> None:
    """An engine would read the rest of a body as the next client's request, or pick another rank."""
    with pytest.raises(UnusableVerdictError, match="sets what is not its to set"):
        checked(Amend(headers={name: "3"}))


def test_session_of_full_reports_is_not_a_handlers() -> None:
    """Events under it are read in another way."""
    with pytest.raises(UnusableVerdictError, match="sets what is not its to set"):
        checked(Amend(headers={"X-Session-Id": "kvlb-full-report"}))


@pytest.mark.parametrize(
    "name", ["Content-Length", "transfer-encoding", "connection", "x-request-id", "x-kvlb-reason"]
)
def test_what_frames_an_answer_is_not_a_handlers(name: str) -> None:
    """Its length is known; ids are told by kvlb."""
    with pytest.raises(UnusableVerdictError, match="sets what is not its to set"):
        checked(Reply(body=b"xyz", headers={name: "999"}))
