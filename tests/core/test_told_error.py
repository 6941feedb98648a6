"""An error inside a 200: how it is recognised, its status, and what its client gets."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.core.http.told_error import (
    DECISIVE_BYTES,
    ToldError,
    begins_as_error,
    is_usual,
    read_error,
)


@pytest.mark.parametrize(
    "document",
    [
        pytest.param('{"error":{"message":"m","code":500}}', id="nested"),
        pytest.param('{"error": {"message": "m"}}', id="with-spaces"),
        pytest.param('\n{\n    "error": {\n}}', id="indented"),
        pytest.param('{"error":"Unauthorized"}', id="words"),
        pytest.param('{"object":"error","message":"m"}', id="up-to-0.10.0"),
        pytest.param('{"type":"error","error":{}}', id="messages"),
    ],
)
def test_forms_of_errors_are_known_by_their_beginning(document: str) -> None:
    """Whatever release or API they are of."""
    assert begins_as_error(document[:DECISIVE_BYTES].encode())
    assert not is_usual(document.encode())


@pytest.mark.parametrize(
    "document",
    [
        pytest.param("", id="nothing"),
        pytest.param('{"error":null,"id":"x"}', id="no-error"),
        pytest.param('{"error":""}', id="no-words"),
        pytest.param('{"object":"list","data":[]}', id="list"),
        pytest.param('{"id":"r","error":{"message":"m"}}', id="field-of-an-answer"),
        pytest.param('[{"error":{}}]', id="array"),
    ],
)
def test_other_documents_are_none(document: str) -> None:
    """An `error` in the middle may be a field of a good answer."""
    assert not begins_as_error(document[:DECISIVE_BYTES].encode())


@pytest.mark.parametrize(
    ("error", "status"),
    [
        ({"message": "m", "code": 500}, 500),
        ({"message": "m", "code": 400}, 400),
        ({"message": "m", "code": 200}, 502),
        ({"message": "m", "code": "odd"}, 502),
        ({"message": "m"}, 502),
    ],
)
def test_status_is_the_errors_own(error: Any, status: int) -> None:
    """If it names one that an error can have; what it says stays as it is."""
    document = json.dumps({"error": error}).encode()

    assert read_error(document) == ToldError(status=status, body=document)


@pytest.mark.parametrize(
    ("document", "error"),
    [
        pytest.param(
            {"object": "error", "message": "m", "type": "T", "param": None, "code": 400},
            {"message": "m", "type": "T", "param": None, "code": 400},
            id="flat",
        ),
        pytest.param(
            {"error": "Unauthorized"},
            {"message": "Unauthorized", "type": "BadGatewayError", "param": None, "code": None},
            id="words",
        ),
        pytest.param(
            {"object": "error", "message": "\ud800"},
            {"message": "\ud800", "type": None, "param": None, "code": None},
            id="half-a-character",
        ),
    ],
)
def test_other_forms_are_put_into_openais(document: Any, error: Any) -> None:
    """So that a client of today reads them."""
    told = read_error(json.dumps(document).encode())

    assert told is not None
    assert json.loads(told.body) == {"error": error}
    assert told.status == (error["code"] or 502)


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("invalid_request_error", 400),
        ("overloaded_error", 503),
        ("api_error", 500),
        ("unheard_of", 502),
        (None, 502),
    ],
)
def test_an_error_of_messages_has_the_status_of_its_type(kind: str | None, status: int) -> None:
    """It names none; its form is its client's."""
    document = json.dumps({"type": "error", "error": {"type": kind, "message": "m"}}).encode()

    assert read_error(document) == ToldError(status=status, body=document)


@pytest.mark.parametrize(
    "document",
    [b'{"error":', b'["error"]', b'{"error":null}', b'{"choices":[]}', b'{"text":"\\"error\\""}'],
)
def test_what_tells_no_error_is_none(document: bytes) -> None:
    """Broken, empty, of another kind, or a word in a text."""
    assert read_error(document) is None


@given(st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5), max_size=4))
def test_a_usual_answer_is_never_taken_for_an_error(fields: dict[str, Any]) -> None:
    """The law behind the look at five bytes: they and an error's beginning exclude each other."""
    document = json.dumps({"id": "cmpl-1", **fields}).encode()

    assert is_usual(document)
    assert not begins_as_error(document[:DECISIVE_BYTES])
