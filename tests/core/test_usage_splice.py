"""The details of one leg's usage in another leg's answer: one value changes, no byte beside it."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.core.http.sse import SseReader
from balancer.core.http.usage_splice import render_details, with_details

OURS = b'{"cached_tokens":64}'


@pytest.mark.parametrize(
    ("usage", "details"),
    [
        ({"prompt_tokens_details": {"cached_tokens": 64}}, OURS),
        ({"prompt_tokens_details": None}, b"null"),
        ({}, b"null"),
        (None, None),
        ("odd", None),
    ],
)
def test_details_are_those_of_a_usage(usage: Any, details: bytes | None) -> None:
    """Missing ones are nothing cached, as old engines say it; without usage nothing is known."""
    assert render_details(usage) == details


def test_only_the_value_is_replaced() -> None:
    """Blanks, order and unknown fields stay as the engine wrote them."""
    before = (
        b'{ "x":"\\"usage\\": {}", "usage" : {"a":[1, 2],\n "prompt_tokens_details": '
        b'{"cached_tokens": 992,"created_cache_tokens":1} , "b":1e3 } , "z":[]}'
    )

    assert with_details(before, OURS) == before.replace(
        b'{"cached_tokens": 992,"created_cache_tokens":1}', OURS
    )


def test_the_usage_at_the_top_is_meant() -> None:
    """Not one of the same name deeper down, nor details of the same name within another object."""
    before = (
        b'{"choices":[{"usage":{"prompt_tokens_details":{"cached_tokens":1}}}],'
        b'"usage":{"more":{"prompt_tokens_details":5},"prompt_tokens_details":{"cached_tokens":2}}}'
    )

    assert with_details(before, OURS) == before.replace(b'{"cached_tokens":2}', OURS)


@pytest.mark.parametrize(
    "document",
    [
        b'{"choices":[]}',
        b'{"usage":null}',
        b'{"usage":{"prompt_tokens":3}}',
        b'{"usage":',
        b'{"usage":{"prompt_tokens_details":}}',
        b'{"a":"usage"}',
        b"",
    ],
)
def test_what_has_no_details_stays(document: bytes) -> None:
    """Nothing is added, and what can't be read is nobody's business."""
    assert with_details(document, OURS) == document


values = st.recursive(
    st.none() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), values, max_size=4), st.dictionaries(st.text(), values), values)
def test_the_answer_says_the_same_but_for_its_details(
    answer: dict[str, Any], usage: dict[str, Any], details: Any
) -> None:
    """The law, for any answer with any usage."""
    answer["usage"] = usage | {"prompt_tokens_details": {"cached_tokens": 7}}
    ours = json.dumps(details).encode()

    told = json.loads(with_details(json.dumps(answer).encode(), ours))

    answer["usage"]["prompt_tokens_details"] = details
    assert told == answer


def test_a_stream_has_them_wherever_its_usage_is() -> None:
    """However the network cuts; what the engine said stays known to us."""
    usage = b'"usage":{"prompt_tokens":3,"prompt_tokens_details":{"cached_tokens":2}}'
    stream = (
        b'data: {"choices":[{"text":"a"}]}\n\ndata: {"choices":[{"text":"b"}],'
        + usage
        + b"}\r\n\r\n"
        b': ping\n\ndata:{"choices":[],' + usage + b"}\n\ndata: [DONE]\n\n"
    )
    reader = SseReader(withhold_usage=False, details=OURS)

    passed = b"".join(reader.feed(stream[at : at + 7]) for at in range(0, len(stream), 7))

    assert passed + reader.finish() == stream.replace(b'{"cached_tokens":2}', OURS)
    assert reader.usage is not None
    assert reader.usage.cached_tokens == 2


def test_a_chunk_that_was_held_in_vain_has_them_too() -> None:
    """It looked like the last one, which only we asked for; it was the engine's own."""
    early = b'data: {"choices":[],"usage":{"prompt_tokens_details":{"cached_tokens":2}}}\n\n'
    rest = b'data: {"choices":[{"text":"a"}]}\n\ndata: [DONE]\n\n'
    reader = SseReader(withhold_usage=True, details=OURS)

    passed = reader.feed(early) + reader.feed(rest) + reader.finish()

    assert passed == early.replace(b'{"cached_tokens":2}', OURS) + rest
