"""An engine that gave up before its first word, in the words of Messages and of Responses."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.core.http.gave_up import read_named, read_silent
from balancer.core.http.told_error import ToldError

MESSAGE: dict[str, Any] = {
    "id": "m",
    "type": "message",
    "role": "assistant",
    "content": [],
    "usage": {},
}
RESPONSE: dict[str, Any] = {
    "id": "r",
    "object": "response",
    "output": [],
    "error": None,
    "usage": None,
}
EMPTY_TEXT = {"type": "text", "text": ""}
EMPTY_ITEM = {"type": "message", "content": [{"type": "output_text", "text": ""}]}
TOOL = {"type": "tool_use", "id": "t", "name": "f", "input": {}}


def dumped(document: Any) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


def told(value: ToldError | bool | None) -> tuple[int, Any]:
    assert isinstance(value, ToldError)
    return value.status, json.loads(value.body)


@pytest.mark.parametrize(
    ("fields", "status", "why"),
    [
        pytest.param({}, 502, "no reason given", id="vllm"),
        pytest.param({"stop_reason": None}, 502, "no reason given", id="null"),
        pytest.param({"stop_reason": "abort"}, 502, "abort", id="abort"),
        pytest.param({"stop_reason": "error"}, 500, "error", id="error"),
        pytest.param({"content": [EMPTY_TEXT]}, 502, "no reason given", id="empty-text"),
    ],
)
def test_a_message_that_says_nothing_and_not_why(
    fields: dict[str, Any], status: int, why: str
) -> None:
    """Its client is told in Anthropic's form."""
    message = f"the engine ended the request before its first token: {why}"
    error = {"type": "error", "error": {"type": "api_error", "message": message}}

    assert told(read_silent(dumped(MESSAGE | fields))) == (status, error)
    assert told(read_silent(json.dumps(MESSAGE | fields).encode())) == (status, error)


@pytest.mark.parametrize(
    ("fields", "status", "error"),
    [
        pytest.param(
            {"status": "failed", "error": {"code": "server_error", "message": "m"}},
            500,
            {"message": "m", "type": "InternalServerError", "param": None, "code": "server_error"},
            id="server",
        ),
        pytest.param(
            {"status": "failed", "error": {"code": "rate_limit_exceeded", "message": "m"}},
            429,
            {
                "message": "m",
                "type": "RateLimitError",
                "param": None,
                "code": "rate_limit_exceeded",
            },
            id="rate",
        ),
        pytest.param(
            {"status": "failed", "error": {"code": 7, "message": "m"}, "output": None},
            502,
            {"message": "m", "type": "BadGatewayError", "param": None, "code": 7},
            id="odd-code",
        ),
        pytest.param(
            {"status": "cancelled", "output": [EMPTY_ITEM]},
            502,
            {
                "message": "the engine ended the request before its first token: cancelled",
                "type": "BadGatewayError",
                "param": None,
                "code": 502,
            },
            id="without-why",
        ),
    ],
)
def test_a_response_that_failed_before_its_first_word(
    fields: dict[str, Any], status: int, error: dict[str, Any]
) -> None:
    """Its client is told in OpenAI's form, and why if that was said."""
    assert told(read_silent(dumped(RESPONSE | fields))) == (status, {"error": error})


@pytest.mark.parametrize(
    "document",
    [
        pytest.param(MESSAGE | {"stop_reason": "end_turn"}, id="empty-message"),
        pytest.param(MESSAGE | {"content": [EMPTY_TEXT | {"text": "a"}]}, id="cut-message"),
        pytest.param(MESSAGE | {"content": [EMPTY_TEXT, TOOL]}, id="call"),
        pytest.param(MESSAGE | {"content": "failed"}, id="odd-content"),
        pytest.param(RESPONSE | {"status": "completed", "instructions": "failed"}, id="response"),
        pytest.param(RESPONSE | {"status": "incomplete", "content": []}, id="incomplete"),
        pytest.param(
            RESPONSE | {"status": "failed", "output": [EMPTY_ITEM, {"type": "function_call"}]},
            id="failed-behind-a-call",
        ),
        pytest.param(RESPONSE | {"status": "failed", "output": ["a"]}, id="odd-output"),
        pytest.param({"content": []}, id="something-else"),
        pytest.param([{"content": []}], id="list"),
    ],
)
def test_other_answers_are_the_clients_to_see(document: Any) -> None:
    """Whatever they look like from far."""
    assert read_silent(dumped(document)) is None


@pytest.mark.parametrize(
    ("event", "says"),
    [
        pytest.param({"type": "message_start", "message": MESSAGE}, False, id="message_start"),
        pytest.param({"type": "ping"}, False, id="ping"),
        pytest.param(
            {"type": "content_block_start", "content_block": EMPTY_TEXT}, False, id="block"
        ),
        pytest.param({"type": "content_block_start", "content_block": TOOL}, True, id="tool"),
        pytest.param({"type": "content_block_stop"}, False, id="block-stop"),
        pytest.param(
            {"type": "content_block_delta", "delta": {"text": "a"}}, True, id="block-delta"
        ),
        pytest.param(
            {"type": "message_delta", "delta": {"stop_reason": "end_turn"}}, True, id="end"
        ),
        pytest.param({"type": "message_delta", "delta": 5}, True, id="odd-delta"),
        pytest.param({"type": "response.created", "response": RESPONSE}, False, id="created"),
        pytest.param({"type": "response.in_progress"}, False, id="in-progress"),
        pytest.param({"type": "response.output_item.added", "item": EMPTY_ITEM}, False, id="item"),
        pytest.param(
            {"type": "response.content_part.added", "part": {"type": "output_text", "text": "a"}},
            True,
            id="part-with-text",
        ),
        pytest.param({"type": "response.output_text.delta", "delta": "a"}, True, id="output-text"),
        pytest.param(
            {"type": "response.completed", "response": RESPONSE | {"status": "completed"}},
            True,
            id="completed",
        ),
        pytest.param({"type": ["response."], "a": {"type": "response.x"}}, True, id="odd-type"),
        pytest.param({"choices": [{"text": "a"}]}, True, id="unnamed"),
    ],
)
def test_an_event_says_something_or_opens_what_will(event: Any, says: bool) -> None:
    """What opens a message, a response or a part of one is no word."""
    assert read_named(dumped(event)) is says


def test_what_only_looks_like_an_event_says_something() -> None:
    """It is the client's to read."""
    assert read_named(b'{"type":"ping"') is True


@pytest.mark.parametrize(
    ("event", "status"),
    [
        pytest.param({"type": "message_delta", "delta": {"stop_reason": None}}, 502, id="vllm"),
        pytest.param({"type": "message_delta", "delta": {"stop_reason": "error"}}, 500, id="stop"),
        pytest.param({"type": "response.failed", "response": {}}, 502, id="failed"),
        pytest.param(
            {"type": "response.failed", "response": {"error": {"code": "server_error"}}},
            500,
            id="failed-with-a-code",
        ),
        pytest.param(
            {"type": "response.completed", "response": RESPONSE | {"status": "cancelled"}},
            502,
            id="completed-as-cancelled",
        ),
    ],
)
def test_an_end_before_the_first_word_is_an_error(event: Any, status: int) -> None:
    """Whatever the event is called."""
    assert told(read_named(dumped(event)))[0] == status


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
NAMES = st.sampled_from(
    ["type", "object", "status", "content", "output", "error", "stop_reason", "delta", "response"]
)
VALUES = JSON | st.sampled_from(["message", "response", "failed", "response.failed", "ping"])


@given(st.dictionaries(NAMES, VALUES))
def test_nothing_that_an_engine_may_say_breaks_the_reading(document: dict[str, Any]) -> None:
    """The law: an error or none, never a fault of ours."""
    read_silent(dumped(document))
    read_named(dumped({"a": {"type": "ping"}} | document))
