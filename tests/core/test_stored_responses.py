"""Who keeps which response, and how its id is read."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.core.http.stored_responses import ResponseIdReader, StoredResponses
from indexer.core.types import InstanceId

ONE, TWO = InstanceId("http://one"), InstanceId("http://two")
CREATED = (
    b'event: response.created\ndata: {"response":{"id":"resp_1"},"sequence_number":0}\n\n'
    b'event: response.in_progress\ndata: {"response":{"id":"other"}}\n\n'
)


def test_holder_is_remembered_until_dropped() -> None:
    """The last who said so counts."""
    stored = StoredResponses(10)
    stored.put("a", ONE)
    stored.put("a", TWO)

    assert stored.find("a") == TWO
    assert stored.find("b") is None
    stored.drop("a")
    stored.drop("a")
    assert stored.find("a") is None


def test_what_is_unused_for_longest_is_forgotten() -> None:
    """Memory is bounded; asking for a response keeps it."""
    stored = StoredResponses(2)
    stored.put("a", ONE)
    stored.put("b", ONE)
    stored.find("a")
    stored.put("c", ONE)

    assert [stored.find(each) for each in "abc"] == [ONE, None, ONE]
    assert len(stored) == 2


def test_nothing_is_kept_without_room() -> None:
    """0 turns it off."""
    stored = StoredResponses(0)
    stored.put("a", ONE)

    assert stored.find("a") is None


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (json.dumps({"id": "resp_1", "output": []}), "resp_1"),
        (json.dumps({"metadata": {"id": "no"}, "id": "resp_1"}), "resp_1"),
        ("{}", None),
        ("[]", None),
        ('{"id":', None),
        (json.dumps({"id": "x" * 257}), None),
        (json.dumps({"id": "resp_1", "text": "x" * 1_100_000}), None),
    ],
)
def test_id_of_a_whole_answer(body: str, expected: str | None) -> None:
    """Its own, not one inside; unknown if it can't be read."""
    reader = ResponseIdReader(is_stream=False)
    reader.feed(body[:7].encode())
    reader.feed(body[7:].encode())
    reader.finish()

    assert reader.is_over
    assert reader.id == expected


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        (CREATED, "resp_1"),
        (b": keep-alive\n\n" + CREATED, "resp_1"),
        (CREATED.replace(b"\n", b"\r\n"), "resp_1"),
        (b'data: {"type":"error"}\n\n' + CREATED, None),
        (b"data: [DONE]\n\n", None),
        (b"data: {\n\n", None),
        (b": only\n\n", None),
        (b"", None),
    ],
)
def test_id_of_a_stream(stream: bytes, expected: str | None) -> None:
    """Out of the first event with data, cut anywhere."""
    for size in (1, 7, len(stream) or 1):
        reader = ResponseIdReader(is_stream=True)
        for start in range(0, len(stream), size):
            reader.feed(stream[start : start + size])
        reader.finish()
        reader.feed(b"ignored")

        assert reader.id == expected


def test_endless_first_event_is_given_up() -> None:
    """No more than a megabyte is kept of an answer."""
    reader = ResponseIdReader(is_stream=True)
    reader.feed(b"data: " + b"x" * (1 << 20))

    assert reader.is_over


@given(st.lists(st.sampled_from("abcdef"), max_size=40), st.integers(min_value=1, max_value=5))
def test_it_holds_the_last_different_ids(ids: list[str], limit: int) -> None:
    """Never more than the limit, and always those put last."""
    stored = StoredResponses(limit)
    for each in ids:
        stored.put(each, ONE)
    last = list(dict.fromkeys(reversed(ids)))[:limit]

    assert len(stored) == len(last)
    assert all(stored.find(each) == ONE for each in last)
