"""Prompts that begin alike: computed seldom, and no engine drowns in them."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

NewStage = Callable[..., Any]


@pytest.mark.parametrize("per_s", [2.0, 20.0, 100.0])
def test_a_hot_system_prompt_is_computed_once_per_engine_and_spreads(
    per_s: float, new_stage: NewStage
) -> None:
    """200 chats share 2,000 tokens, at 2 to 100 in a second on four engines.

    Right: no engine computes the shared part twice. Where one engine could not do it all, nobody
    gets more than 1.3 of the mean work.
    """
    stage = new_stage(4)
    system = stage.fresh(2000)
    at_s = 0.0
    for _ in range(200):
        at_s += stage.chance.expovariate(per_s)
        stage.send_at(at_s, system + stage.fresh(stage.chance.randrange(50, 600)))
    decisions = stage.run()

    copies = Counter(each.alias for each in decisions.made if each.computed_tokens > 2000)
    assert max(copies.values()) == 1
    if per_s > 50:
        done = decisions.work()
        assert max(done.values()) / (sum(done.values()) / 4) <= 1.3


@pytest.mark.parametrize(("prefixes", "most_copies"), [(1, 4), (8, 10)])
def test_a_burst_of_siblings_shares_few_copies(
    prefixes: int, most_copies: int, new_stage: NewStage
) -> None:
    """64 at once on four engines; each has 8,000 tokens in common with its siblings, 200 of its own.

    Right: each engine takes its share. Of one prefix that is a copy each: 64 times 200 tokens are more
    than the prefix. Of eight, in any order, it is hardly more than one of each: who doesn't see where
    siblings were sent a moment ago computes each of them nearly everywhere.
    """
    stage = new_stage(4)
    shared = [stage.fresh(8000) for _ in range(prefixes)]
    turns = [number % prefixes for number in range(64)]
    stage.chance.shuffle(turns)
    for number in turns:
        stage.send_at(1.0, shared[number] + stage.fresh(200))
    decisions = stage.run()

    copies = [each for each in decisions.made if each.computed_tokens > 8000]
    assert len({(each.alias, each.prompt.keys(16)[0]) for each in copies}) == len(copies)
    assert len(copies) <= most_copies
    assert max(Counter(each.alias for each in decisions.made).values()) <= 0.3 * 64


def test_a_few_siblings_wait_for_one_another(new_stage: NewStage) -> None:
    """8 at once with 8,000 tokens in common and 40 of their own.

    Right: two engines compute what they share. On all four it would be no sooner, and twice the work.
    """
    stage = new_stage(4)
    shared = stage.fresh(8000)
    for _ in range(8):
        stage.send_at(1.0, shared + stage.fresh(40))
    decisions = stage.run()

    assert sum(each.computed_tokens > 8000 for each in decisions.made) <= 2
