"""Whether JSON is whole whose end nothing else tells."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.core.http.json_end import JsonEnd, is_json_kind

VALUES = st.recursive(
    st.none() | st.integers() | st.text(alphabet='ab"\\{}[],é\u2028'),
    lambda each: st.lists(each, max_size=4) | st.dictionaries(st.text('a"\\}]'), each, max_size=4),
    max_leaves=12,
)
DOCUMENTS = st.lists(VALUES, max_size=4) | st.dictionaries(st.text('a"\\}]'), VALUES, max_size=4)


def whole(*pieces: bytes) -> bool:
    end = JsonEnd()
    for piece in pieces:
        end.feed(piece)
    return end.is_whole


@given(
    document=DOCUMENTS,
    spaced=st.booleans(),
    readable=st.booleans(),
    cut=st.integers(min_value=0),
    size=st.integers(min_value=1, max_value=9),
)
def test_object_or_array_is_whole_with_its_last_byte_and_never_before(
    document: object, *, spaced: bool, readable: bool, cut: int, size: int
) -> None:
    """However it comes in pieces: inside an escape, a name or a character, behind a nested one."""
    raw = json.dumps(document, ensure_ascii=not readable, indent=1 if spaced else None).encode()
    pieces = [raw[start : start + size] for start in range(0, len(raw), size)]
    assert whole(*pieces)

    shorter = raw[: cut % len(raw)]
    assert not whole(*(shorter[start : start + size] for start in range(0, len(shorter), size)))


@pytest.mark.parametrize(
    ("document", "is_whole"),
    [
        pytest.param(b'{"a": {"b": [1]}}\r\n', True, id="blank-behind"),
        pytest.param(b'\xef\xbb\xbf{"a": 1}', True, id="byte-order-mark"),
        pytest.param(b'{"a": ' + b"1" * 5000 + b"}", True, id="long-number"),
        pytest.param(b"[" * 9000 + b"]" * 9000, True, id="deep"),
        pytest.param(b"[" * 9000 + b"]" * 8999, False, id="deep-cut"),
        pytest.param(b'{"a": {"b": 1}', False, id="behind-a-nested-one"),
        pytest.param(b'{"a": "}', False, id="inside-a-string"),
        pytest.param(b'"a', False, id="string-cut"),
        pytest.param(b'"a"', True, id="string"),
        pytest.param(b"17", True, id="number"),
        pytest.param(b"", False, id="nothing"),
        pytest.param(b" \n", False, id="blank"),
    ],
)
def test_document_is_whole_if_all_that_it_opened_is_closed(
    document: bytes, *, is_whole: bool
) -> None:
    """What can't be told, as of a number, isn't called cut."""
    assert whole(document) is is_whole


@pytest.mark.parametrize(
    ("kind", "is_json"),
    [
        (b"application/json", True),
        (b"Application/JSON", True),
        (b"application/json;charset=utf-8", True),
        (b"application/problem+json ; charset=utf-8", True),
        (b"application/jsonl", False),
        (b"application/json-seq", False),
        (b"text/event-stream; x=+json", False),
        (b"text/plain", False),
        (b"", False),
        (None, False),
    ],
)
def test_json_is_known_by_its_kind(kind: bytes | None, *, is_json: bool) -> None:
    """In any case, with whatever parameters."""
    assert is_json_kind(kind) is is_json
