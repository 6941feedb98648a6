"""Nothing is learned or nothing is in flight: work spreads all the same, and sessions stay."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

NewStage = Callable[..., Any]


@pytest.mark.parametrize("pause_s", [0.0, 5.0, 60.0])
def test_paced_sessions_spread_over_idle_engines_and_stay(
    pause_s: float, new_stage: NewStage
) -> None:
    """20 sessions take turns, one request after another, so nothing is ever in flight.

    Right: sessions stay, and neither engine does more than 60 % of the work.
    """
    stage = new_stage(2)
    common = stage.fresh(16)
    sessions = [common + stage.fresh(400) for _ in range(20)]
    left = [20] * 20

    def next_one() -> None:
        open_ones = [number for number, turns in enumerate(left) if turns]
        if not open_ones:
            return
        number = stage.chance.choice(open_ones)
        left[number] -= 1
        token_ids = sessions[number]
        sessions[number] = token_ids + stage.fresh(100)
        stage.send_at(stage.now_s + pause_s, token_ids, then=next_one)

    next_one()
    decisions = stage.run()

    done = decisions.work()
    assert len(decisions.made) == 400
    assert max(done.values()) / sum(done.values()) <= 0.6
    assert sum(decisions.moves(first_own_block=1)) <= 8


def test_nobody_waits_behind_a_long_prompt(new_stage: NewStage) -> None:
    """40,000 tokens, and at the same moment 24 prompts of 1,000; nothing is learned of anybody.

    Right: those go to the three other engines, since none of these has as much to do.
    """
    stage = new_stage(4)
    stage.send_at(0.0, stage.fresh(40_000))
    for _ in range(24):
        stage.send_at(0.0, stage.fresh(1000))
    decisions = stage.run()

    first = decisions.made[0]
    beside = [each.alias for each in decisions.made if each.alias == first.alias]
    assert first.prompt.tokens == 40_000
    assert len(beside) - 1 <= 1


def test_a_cold_fleet_spreads_by_work_and_keeps_sessions(new_stage: NewStage) -> None:
    """24 unlike prompts at once, and nothing is learned of anybody.

    Right: six each, give or take one, and every second turn goes where its first went.
    """
    stage = new_stage(4)
    prompts = [stage.fresh(3000) for _ in range(24)]
    for token_ids in prompts:
        stage.send_at(0.0, token_ids)
        stage.send_at(3.0, token_ids + stage.fresh(100))
    decisions = stage.run()

    firsts = Counter(each.alias for each in decisions.made if each.prompt.tokens == 3000)
    assert sorted(firsts.values()) == pytest.approx([6, 6, 6, 6], abs=1)
    assert decisions.moves() == [False] * 24
