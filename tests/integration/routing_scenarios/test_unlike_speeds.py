"""One engine is slower than the others: it gets what it can do."""

from collections import Counter
from collections.abc import Callable
from statistics import mean
from typing import Any

import pytest

NewStage = Callable[..., Any]
FAST, STEP_S = 5e-5, 0.01
"""Of the other engines: a token of a prompt, a step."""


@pytest.mark.parametrize("per_s", [0.5, 1.5], ids=["idle", "busy"])
@pytest.mark.parametrize("step_s", [STEP_S, 4 * STEP_S], ids=["slow-prompts", "slow-in-all"])
def test_a_slow_engine_gets_what_it_can_do(
    per_s: float, step_s: float, new_stage: NewStage
) -> None:
    """One of four engines is four times slower, in everything or in prompts alone.

    Right, once that is learned: it begins at most half as many sessions as each of the others, and
    sessions stay where they began.
    """
    stage = new_stage(4, s_per_token=4 * FAST, step_s=step_s)
    stage.chats(sessions=120, turns=6, per_s=per_s, first_tokens=4000)
    learned = stage.run().after(100)

    begun = Counter(each.alias for each in learned.made if each.prompt.tokens == 4000)
    assert begun["e0"] <= min(begun[f"e{number}"] for number in (1, 2, 3)) / 2
    assert mean(learned.moves()) <= 0.05


def test_of_a_pair_the_fast_engine_computes_what_is_long(new_stage: NewStage) -> None:
    """One engine computes prompts three times faster than the other.

    Right, once that is learned: it computes about three quarters of all tokens, and warm sessions
    stay at the slow one all the same.
    """
    stage = new_stage(2, s_per_token=3 * FAST)
    stage.chats(sessions=150, turns=5, per_s=1.2, first_tokens=6000)
    learned = stage.run().after(100)

    done = learned.work()
    assert 0.65 <= done["e1"] / sum(done.values()) <= 0.95
    assert mean(learned.moves()) <= 0.05
    assert any(each.alias == "e0" and each.computed_tokens < 200 for each in learned.made)
