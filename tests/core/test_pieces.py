"""Cuts in a text before special tokens."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.core.prompt.pieces import MIN_PIECE_CHARS, AddedToken, Cutter

BEGIN, END = "<|begin|>", "<|end|>"
LONG = "word " * (MIN_PIECE_CHARS // 5 + 1)
TOKENS = (AddedToken(text=BEGIN), AddedToken(text=END))

texts = st.lists(st.sampled_from([BEGIN, END, "<|", "|>", "x", LONG]), max_size=12).map("".join)


@given(texts)
def test_pieces_are_the_text(text: str) -> None:
    """Nothing is lost, and nothing added."""
    assert "".join(Cutter(TOKENS).cut(text)) == text


@given(texts, texts)
def test_what_goes_on_is_cut_alike(text: str, more: str) -> None:
    """All pieces of a text but the last are pieces of what begins with it."""
    cutter = Cutter(TOKENS)

    assert cutter.cut(text + more)[: len(cutter.cut(text)) - 1] == cutter.cut(text)[:-1]


@given(texts)
def test_pieces_begin_with_a_border_and_are_long(text: str) -> None:
    """All but the first, and all but the last."""
    pieces = Cutter(TOKENS).cut(text)

    assert all(piece.startswith((BEGIN, END)) for piece in pieces[1:])
    assert all(len(piece) >= MIN_PIECE_CHARS for piece in pieces[:-1])


@pytest.mark.parametrize(
    "token",
    [
        pytest.param(AddedToken(text=BEGIN, special=False), id="not-special"),
        pytest.param(AddedToken(text=BEGIN, normalized=True), id="normalized"),
        pytest.param(AddedToken(text=BEGIN, lstrip=True), id="takes-space-before"),
        pytest.param(AddedToken(text=BEGIN, single_word=True), id="needs-borders"),
        pytest.param(AddedToken(text=""), id="empty"),
    ],
)
def test_other_tokens_are_no_border(token: AddedToken) -> None:
    """Where one of them stands, what is before it may matter."""
    text = LONG + BEGIN + LONG

    assert Cutter([token]).cut(text) == [text]


def test_token_within_a_longer_one_is_no_border() -> None:
    """The tokenizer takes the longest, so there is none of the shorter ones in it."""
    longer = AddedToken(text=BEGIN + "!", special=False)
    cutter = Cutter([*TOKENS, longer])

    assert cutter.cut(LONG + BEGIN + "!") == [LONG + BEGIN + "!"]
    assert cutter.cut(LONG + BEGIN + "?") == [LONG, BEGIN + "?"]


def test_borders_are_known() -> None:
    """Whoever tries out a tokenizer has to hit them."""
    assert Cutter([*TOKENS, AddedToken(text="<plain>", special=False)]).borders == {BEGIN, END}


def test_nothing_is_cut_from_nothing() -> None:
    """An empty text has no pieces."""
    assert Cutter(TOKENS).cut("") == []


@given(st.sets(st.text("ab<|", min_size=1, max_size=4), min_size=1, max_size=8), st.text("ab<|"))
def test_the_longest_of_the_leftmost_is_found(words: set[str], text: str) -> None:
    """As a plain list of all words, longest first, would find it."""
    cutter = Cutter(AddedToken(text=word) for word in words)
    plain = "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))

    assert cutter.find_all(text) == re.findall(plain, text)
