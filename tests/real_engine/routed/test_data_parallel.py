"""One real engine with two data-parallel ranks: two caches behind one address."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

SEED = 20261202
COUNT, TURNS = 12, 3


@pytest.fixture(scope="module")
def engines(start_engines: Callable[..., Any]) -> Iterator[dict[str, Any]]:
    with start_engines("m0", ranks=2) as running:
        yield running


def test_each_rank_is_a_candidate_with_a_cache_of_its_own(
    engines: dict[str, Any],
    model: Any,
    start_kvlb: Callable[..., Any],
    conversations: Callable[..., Any],
    record_figures: Callable[..., None],
) -> None:
    """Both ranks get conversations, and every turn finds on its rank what was predicted."""
    chats = conversations(SEED, COUNT)
    settings = {
        "tokens": {"models": {"tiny": str(model)}, "deadline_s": 5},
        "routing": {"lookup_timeout_s": 1},
    }
    turns = []
    with start_kvlb(engines, settings=settings) as kvlb:
        for number in chats.order(TURNS):
            turn = chats.read(number, kvlb.ask(chats.body(number)))
            chats.answered(number, turn.text)
            kvlb.catch_up("m0")
            turns.append(turn)
        held = [kvlb.index_of("m0", rank)["held_blocks"] for rank in range(2)]

    exact = sum(turn.overlap_tokens == turn.cached_tokens for turn in turns)
    over = sum(turn.overlap_tokens > turn.cached_tokens for turn in turns)
    record_figures(
        what="data parallel", requests=len(turns), exact=exact, over=over, held_blocks=held
    )
    misses = [turn for turn in turns if turn.overlap_tokens != turn.cached_tokens]
    assert over == 0, misses
    assert exact >= 0.95 * len(turns), misses
    assert min(held) > 0.2 * sum(held), "one rank got nearly everything"
