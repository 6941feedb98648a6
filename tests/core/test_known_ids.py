"""Token ids that are read from a body's text, and remembered."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.core.prompt.known_ids import CHUNK_BYTES, NAMESPACES, IdTexts
from indexer.core.hashing import Namespace
from indexer.core.index import Prompt

ROOMY = 1 << 24
LONG = list(range(100_000, 100_000 + CHUNK_BYTES))
"""Several chunks."""


def write(ids: Sequence[int], separator: str = ",") -> bytes:
    return separator.join(map(str, ids)).encode()


def read(texts: IdTexts, text: bytes) -> list[int] | None:
    known = texts.read(text)
    return None if known is None else list(known.ids)


@given(
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=3000),
    st.sampled_from([",", ", ", " , ", ",\n"]),
)
def test_a_text_is_its_ids(ids: list[int], separator: str) -> None:
    """However long, whichever way it is spaced, and as often as it is asked."""
    texts = IdTexts(limit_bytes=ROOMY)
    text = write(ids, separator)

    assert [read(texts, text), read(texts, text)] == [ids, ids]


@given(st.integers(1, len(LONG)), st.integers(0, len(LONG)))
def test_texts_that_begin_alike_are_their_ids(shared: int, own: int) -> None:
    """What is known of one is right for the other."""
    texts = IdTexts(limit_bytes=ROOMY)
    other = LONG[:shared] + LONG[:own]

    assert [read(texts, write(LONG)), read(texts, write(other))] == [LONG, other]


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b" ", id="space"),
        pytest.param(b"1,", id="trailing-comma"),
        pytest.param(b"1,,2", id="two-commas"),
        pytest.param(b"-1", id="negative"),
        pytest.param(b"4294967296", id="too-large"),
        pytest.param(b"1e3", id="no-integer"),
        pytest.param(b"01", id="leading-zero"),
        pytest.param(b"true", id="boolean"),
        pytest.param(b'"1"', id="text"),
        pytest.param(b"[1],[2]", id="lists"),
        pytest.param(b"\xff", id="no-unicode"),
        pytest.param(write(LONG) + b",", id="comma-where-a-chunk-would-begin"),
        pytest.param(write(LONG).replace(b",", b",,"), id="two-commas-where-chunks-part"),
    ],
)
def test_what_is_not_ids_is_left_alone(text: bytes) -> None:
    """The body is read as any other then, which says what is wrong with it."""
    assert read(IdTexts(limit_bytes=ROOMY), text) is None


def test_chunk_that_ends_in_a_comma_is_not_ids() -> None:
    """A chunk ends before its comma: nothing may be lost between two."""
    text = write(LONG)
    comma = text.index(b",", CHUNK_BYTES)

    assert read(IdTexts(limit_bytes=ROOMY), text[: comma + 1]) is None


def test_same_text_is_the_same_prompt() -> None:
    """So its blocks are hashed once."""
    texts = IdTexts(limit_bytes=ROOMY)
    first, second = (texts.read(write(LONG)) for _ in range(2))

    assert first is not None
    assert second is not None
    assert first.prompt("m", None, None) is second.prompt("m", None, None)


def test_namespaces_do_not_share_a_prompt() -> None:
    """Keys of tenants and adapters differ, however many ask."""
    known = IdTexts(limit_bytes=ROOMY).read(write(LONG))
    assert known is not None

    for number in range(2 * NAMESPACES):
        expected = Prompt(Namespace(model="m", lora="a", cache_salt=str(number)), LONG)
        assert known.prompt("m", "a", str(number)).keys(16) == expected.keys(16)


def test_room_is_bounded() -> None:
    """The text that wasn't asked for longest is read anew."""
    one_bytes = 11 * len(LONG) + 512
    texts = IdTexts(limit_bytes=2 * int(2.5 * one_bytes))
    first, second, third = (write(LONG[number:] + LONG[:number]) for number in range(3))
    known = texts.read(first), texts.read(second)
    texts.read(first)
    texts.read(third)

    assert texts.read(first) is known[0]
    assert texts.read(second) is not known[1]


def test_without_room_texts_are_still_read() -> None:
    """Nothing is remembered."""
    texts = IdTexts(limit_bytes=0)
    first, second = (texts.read(write(LONG)) for _ in range(2))

    assert first is not None
    assert second is not None
    assert first is not second
    assert list(second.ids) == LONG
