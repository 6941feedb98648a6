"""Chats with pictures: what stands for them, and where credit ends."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.core.prompt.media_prefix import (
    MEDIUM_TOKENS,
    common_prefix,
    count_media,
    guess_rest_tokens,
    with_stand_in,
)
from balancer.core.prompt.shape import ChatShape

IMAGE = {"type": "image"}
CHAT = ChatShape(
    messages=[
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "One"}, IMAGE, "two", IMAGE]},
        {"role": "user", "content": [{"type": "text", "text": "three"}]},
    ],
    has_media=True,
)


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


@pytest.mark.parametrize(
    ("keeps_order", "content"),
    [
        pytest.param(True, [text("One"), text("!"), "two", text("!")], id="in-its-place"),
        pytest.param(False, [text("!"), text("One"), "two"], id="before-the-text"),
    ],
)
def test_stand_ins_are_where_the_engine_puts_media(keeps_order: bool, content: list[Any]) -> None:
    """Other messages stay as they are."""
    first, second, third = with_stand_in(CHAT, "!", keeps_order=keeps_order).messages

    assert (first, third) == (CHAT.messages[0], CHAT.messages[2])
    assert second["content"] == content


def test_rest_is_guessed_by_media_and_letters() -> None:
    """Two pictures and eight letters."""
    assert count_media(CHAT) == 2
    assert guess_rest_tokens(CHAT) == 2 * MEDIUM_TOKENS + 8 // 4


@given(
    st.lists(st.integers(0, 3), max_size=8),
    st.lists(st.lists(st.integers(0, 3), max_size=4), min_size=1, max_size=3),
)
def test_common_prefix_is_the_longest_one(start: list[int], tails: list[list[int]]) -> None:
    """Law: all begin with it, and not all with one id more."""
    tokens = [start + tail for tail in tails]

    length = common_prefix(tokens)

    assert length >= len(start)
    assert len({tuple(each[:length]) for each in tokens}) == 1
    assert length == min(map(len, tokens)) or len({each[length] for each in tokens}) > 1
