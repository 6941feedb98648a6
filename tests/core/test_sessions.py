"""Which conversation a request belongs to, and where its home is."""

from collections import Counter
from typing import Any

import pytest

from balancer.core.routing.sessions import OPENING_MESSAGES, affinity, opening
from indexer.core.types import InstanceId, RankId

SYSTEM = {"role": "system", "content": "be brief"}


def said(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def test_later_turns_begin_like_the_first() -> None:
    """What was answered and asked since changes nothing."""
    first = {"messages": [SYSTEM, said("user", "a")]}
    later = {"messages": [*first["messages"], said("assistant", "b"), said("user", "c")]}

    assert opening(first) == opening(later) is not None


def test_a_common_system_prompt_is_not_a_conversation() -> None:
    """Else all would have one home."""
    assert opening({"messages": [SYSTEM, said("user", "a")]}) != opening(
        {"messages": [SYSTEM, said("user", "b")]}
    )


def test_text_begins_with_its_beginning() -> None:
    """A longer text of the same beginning is the same conversation."""
    text = "a" * 3000

    assert opening({"prompt": text}) == opening({"prompt": text + "b"})
    assert opening({"prompt": text}) != opening({"prompt": "b" + text})


@pytest.mark.parametrize(
    "body", [{}, {"prompt": ""}, {"prompt": [1, 2]}, {"messages": []}, {"messages": "a"}]
)
def test_without_text_there_is_no_opening(body: dict[str, Any]) -> None:
    """Such a request goes by load."""
    assert opening(body) is None


def test_what_no_user_says_is_cut_somewhere() -> None:
    """Messages may be anything: engines refuse them."""
    odd = ["\ud800", 1, *[said("assistant", "x")] * OPENING_MESSAGES]

    assert opening({"messages": odd}) == opening({"messages": [*odd, said("user", "late")]})


def test_homes_are_spread() -> None:
    """About as many sessions on each rank."""
    ranks = [RankId(InstanceId(f"http://e{number}:8000"), 0) for number in range(4)]
    homes = Counter(
        max(ranks, key=lambda rank: affinity(session, rank)) for session in map(str, range(2000))
    )

    assert max(homes.values()) < 1.2 * 2000 / 4
