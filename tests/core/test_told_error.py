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
    begins_as_events,
    is_usual,
    read_error,
    read_named_error,
    read_wordless,
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
        pytest.param('\ufeff{"error": {"message": "m"}}', id="byte-order-mark"),
        pytest.param('{"message":"m","object":"error","code":400}', id="message-first"),
        pytest.param('{"code": 400, "object":"error"}', id="code-first"),
        pytest.param('{"type": "BadRequestError","object":"error"}', id="type-first"),
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
        pytest.param('{"type":"message","content":[]}', id="message"),
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
        ({"message": "m", "code": "503"}, 503),
        ({"message": "m", "code": "200"}, 502),
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


@pytest.mark.parametrize(
    ("data", "status", "message"),
    [
        pytest.param(b'{"error":{"message":"m","code":400}}', 400, "m", id="nested"),
        pytest.param(b'{"message":"m"}', 502, "m", id="flat"),
        pytest.param(b'{"message":"m","code":503}', 503, "m", id="flat-with-a-code"),
        pytest.param(b'{"error":null}', 502, "the engine told an error", id="wordless"),
        pytest.param(b"out of memory", 502, "out of memory", id="no-json"),
    ],
)
def test_data_of_an_event_named_error_are_one(data: bytes, status: int, message: str) -> None:
    """The name says it, whatever shape they have."""
    told = read_named_error(data)

    assert (told.status, json.loads(told.body)["error"]["message"]) == (status, message)


def ended(*choices: Any) -> bytes:
    return json.dumps({"id": "cmpl-1", "choices": choices}).encode()


FAILED = {"index": 0, "text": "", "finish_reason": "error"}
SILENT: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": []}


@pytest.mark.parametrize(
    ("document", "status"),
    [
        pytest.param(ended(FAILED), 500, id="error"),
        pytest.param(ended(FAILED | {"finish_reason": "abort"}), 502, id="abort"),
        pytest.param(ended({"message": SILENT, "finish_reason": "error"}), 500, id="chat"),
        pytest.param(ended({"token_ids": [], "finish_reason": "error"}), 500, id="generate"),
        pytest.param(ended(FAILED, FAILED), 500, id="all-choices"),
    ],
)
def test_an_end_without_a_word_is_an_error(document: bytes, status: int) -> None:
    """A load that failed has the status that engines give it, an abort that of a broken engine."""
    told = read_wordless(document)

    assert told is not None
    assert (told.status, json.loads(told.body)["error"]["code"]) == (status, status)


@pytest.mark.parametrize(
    "document",
    [
        pytest.param(ended(FAILED | {"text": "a"}), id="text"),
        pytest.param(ended(FAILED | {"token_ids": [1]}), id="token-ids"),
        pytest.param(
            ended({"message": SILENT | {"reasoning": "a"}, "finish_reason": "abort"}),
            id="reasoning",
        ),
        pytest.param(ended(FAILED, FAILED | {"finish_reason": "stop"}), id="another-choice"),
        pytest.param(ended(FAILED | {"finish_reason": ["error"]}), id="odd-reason"),
        pytest.param(ended("error"), id="odd-choice"),
        pytest.param(ended(FAILED | {"text": "error", "finish_reason": "stop"}), id="a-word"),
        pytest.param(ended(), id="no-choices"),
        pytest.param(b'{"choices":"error"}', id="odd-choices"),
        pytest.param(b'{"choices":["error"', id="broken"),
        pytest.param(ended(FAILED | {"finish_reason": "length"}), id="good"),
    ],
)
def test_other_ends_are_the_clients_to_see(document: bytes) -> None:
    """Something was said, or it ended as it should."""
    assert read_wordless(document) is None


@given(st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5), max_size=4))
def test_a_usual_answer_is_never_taken_for_an_error(fields: dict[str, Any]) -> None:
    """The law behind the look at five bytes: they and an error's beginning exclude each other."""
    document = json.dumps({"id": "cmpl-1", **fields}).encode()

    assert is_usual(document)
    assert not begins_as_error(document[:DECISIVE_BYTES])


def test_a_byte_order_mark_is_no_part_of_an_error() -> None:
    """Clients read it as JSON."""
    error = b'{"error":{"message":"m","code":503}}'

    assert read_error(b"\xef\xbb\xbf" + error) == ToldError(status=503, body=error)


def test_an_error_behind_other_members_is_one_where_nothing_else_is_said() -> None:
    """An answer may have an `error` of its own."""
    error = b'{"id":"x","error":{"message":"m","code":503}}'

    assert read_wordless(error) == ToldError(status=503, body=error)
    assert read_wordless(error[:-1] + b',"output":[]}') is None
    assert read_wordless(b'{"id":"x","error":{}}') is None


@pytest.mark.parametrize(
    ("beginning", "are_events"),
    [
        (b"data: {}\n\n", True),
        (b"\xef\xbb\xbfevent: error", True),
        (b"\n: ping\n\n", True),
        (b'{"data": 1}', False),
        (b"database", False),
        (b"", False),
    ],
)
def test_a_stream_is_known_by_its_beginning(beginning: bytes, are_events: bool) -> None:
    """Whatever kind it was told to be."""
    assert begins_as_events(beginning) is are_events
