"""Usage is read from any answer, and only what is there."""

import json
from typing import Any

import pytest

from balancer.core.http.usage import (
    Usage,
    decode_head,
    prefill_fault,
    read_usage,
    usage_of,
    usage_of_chunk,
)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        pytest.param(
            {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": None},
            Usage(prompt_tokens=3, completion_tokens=2),
            id="no-details",
        ),
        pytest.param(
            {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 0}},
            Usage(prompt_tokens=3, cached_tokens=0),
            id="zero-is-known",
        ),
        pytest.param(
            {
                "input_tokens": 3,
                "output_tokens": 2,
                "input_tokens_details": {"cached_tokens": 1},
            },
            Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1),
            id="responses",
        ),
        pytest.param({"prompt_tokens": "3", "completion_tokens": True}, Usage(), id="odd-types"),
        pytest.param({"prompt_tokens": -1}, Usage(), id="negative"),
        pytest.param(None, None, id="null"),
        pytest.param([], None, id="list"),
    ],
)
def test_read_usage(value: Any, expected: Usage | None) -> None:
    """A figure that is missing or odd is unknown, which is not 0."""
    assert read_usage(value) == expected


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        pytest.param(
            b'{"id":"c","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}',
            Usage(prompt_tokens=3, completion_tokens=2),
            id="usual",
        ),
        pytest.param(
            b'{"choices":[],"usage":{"prompt_tokens":3,"prompt_tokens_details":{"cached_tokens":1}},'
            b'"error":null}',
            Usage(prompt_tokens=3, cached_tokens=1),
            id="cached",
        ),
        pytest.param(b'{"choices":[{}],"usage":{"prompt_tokens":3}}', None, id="choices"),
        pytest.param(b'{"usage":{"prompt_tokens":3}}', None, id="no-choices-named"),
        pytest.param(b'{"choices":[],"usage":{"prompt_tokens":"3"}}', None, id="odd-type"),
        pytest.param(b'{"choices":[],"usage":{"input_tokens":3}}', None, id="other-words"),
        pytest.param(b'{"choices":[],"usage":{"prompt_tokens":3},"error":{}}', None, id="error"),
        pytest.param(b'{"choices":[],"usage":null}', None, id="null"),
        pytest.param(b"\xff", None, id="no-json"),
    ],
)
def test_usual_chunk_of_usage_is_read_at_once(data: bytes, expected: Usage | None) -> None:
    """Anything else is for the tolerant look."""
    assert usage_of_chunk(data) == expected


def test_lone_surrogates_and_nan_are_read_leniently() -> None:
    """Engines write both; the usage beside them counts."""
    head = decode_head(b'{"choices":[],"logprob":NaN,"text":"\\ud800","usage":{"prompt_tokens":1}}')

    assert head is not None
    assert head.usage == {"prompt_tokens": 1}
    assert json.loads(bytes(head.choices)) == []


@pytest.mark.parametrize("data", [b"", b"[NaN]", b"{", b"\xff"])
def test_what_is_no_object_has_no_head(data: bytes) -> None:
    """Nothing is raised for an engine's nonsense."""
    assert decode_head(data) is None


@pytest.mark.parametrize(
    ("answer", "is_fault"),
    [
        pytest.param({"choices": [{"finish_reason": "length"}]}, False, id="length"),
        pytest.param({"choices": [{"finish_reason": "stop"}], "error": None}, False, id="stop"),
        pytest.param({"choices": [{"finish_reason": "error"}]}, True, id="error"),
        pytest.param({"choices": [{}, {"finish_reason": "abort"}]}, True, id="abort"),
        pytest.param({"error": {"message": "x"}}, True, id="error-object"),
        pytest.param({"object": "error", "message": "x"}, True, id="flat-error"),
        pytest.param({"choices": None}, False, id="no-choices"),
        pytest.param({"choices": ["odd"]}, False, id="odd-choice"),
        pytest.param([], True, id="list"),
    ],
)
def test_prefill_fault(answer: object, is_fault: bool) -> None:
    """A 200 can hold a failure (F37)."""
    assert (prefill_fault(answer) is not None) == is_fault


@pytest.mark.parametrize(
    ("usage", "read"),
    [
        pytest.param(
            {
                "prompt_tokens": 9,
                "completion_tokens": 2,
                "prompt_tokens_details": {"cached_tokens": 4},
            },
            (9, 2, 4),
            id="plain",
        ),
        pytest.param(
            {"prompt_tokens": 9, "prompt_tokens_details": None}, (9, None, None), id="bare"
        ),
        pytest.param({"input_tokens": 9, "output_tokens": 2}, (9, 2, None), id="other-words"),
        pytest.param(
            {"prompt_tokens": True, "completion_tokens": -1}, (None, None, None), id="odd"
        ),
    ],
)
def test_usage_of_a_whole_answer(usage: Any, read: tuple[int | None, ...]) -> None:
    """Read in one go where it is plain, tolerantly where it isn't: the same figures."""
    told = usage_of(json.dumps({"id": "x", "choices": [], "usage": usage}).encode())

    assert told is not None
    assert (told.prompt_tokens, told.completion_tokens, told.cached_tokens) == read


@pytest.mark.parametrize("body", [b"", b"[]", b'{"choices":[]}', b'{"usage":null}', b"{"])
def test_answer_that_tells_no_usage(body: bytes) -> None:
    """Nothing is known then."""
    assert usage_of(body) is None
