"""What answers in one piece tell of prefill, and what they can't."""

import random
from collections.abc import Callable

import pytest

from balancer.core.load.whole_answers import LEAST, Means, PrefillSlope, WholeAnswer

PREFILL_S, STEP_S = 2e-4, 0.02

Sizes = Callable[[random.Random], tuple[int, int]]
"""Tokens to compute and to generate."""


def varied(chance: random.Random) -> tuple[int, int]:
    return chance.randint(100, 8_000), chance.randint(20, 200)


def seen(sizes: Sizes, *, answers: int = 200, wait_s: float = 0.1) -> float | None:
    """The slope after so many answers, which waited for so long on average."""
    chance = random.Random(1)  # noqa: S311 - a test's dice
    means, slope = Means(), PrefillSlope()
    for _ in range(answers):
        computed, generated = sizes(chance)
        waited_s = chance.expovariate(1 / wait_s)
        answer = WholeAnswer(
            seconds=waited_s + PREFILL_S * computed + STEP_S * generated,
            uncached_tokens=computed,
            computed_tokens=computed,
            tokens=generated,
            others=0,
        )
        slope.add(means.off(answer))
    return slope.s_per_token


@pytest.mark.parametrize(
    "sizes",
    [varied, lambda chance: (varied(chance)[0], 128)],
    ids=["varied", "answers-alike"],
)
def test_longer_prompts_show_what_a_token_takes(sizes: Sizes) -> None:
    """Whatever answers waited for, and whether their lengths differ or not."""
    assert seen(sizes) == pytest.approx(PREFILL_S, rel=0.1)


@pytest.mark.parametrize(
    "sizes",
    [
        lambda chance: (1_000, varied(chance)[1]),
        lambda _: (1_000, 128),
        lambda chance: (tokens := chance.randint(20, 200), tokens),
    ],
    ids=["prompts-alike", "all-alike", "as-long-as-answers"],
)
def test_what_cannot_be_told_apart_is_not_known(sizes: Sizes) -> None:
    """Nothing is better than a guess: what isn't known has a prior that all ranks share."""
    assert seen(sizes) is None


def test_noise_does_not_decide() -> None:
    """Where answers wait for much longer than prompts take, a slope would be chance."""
    assert seen(lambda chance: (chance.randint(100, 400), 128), wait_s=3.0) is None


def test_who_stays_longer_is_not_slower_at_prompts() -> None:
    """Where prompts take no time, more of them come while an answer is there for whatever reason."""
    chance = random.Random(1)  # noqa: S311 - a test's dice
    means, slope = Means(), PrefillSlope()
    for _ in range(500):
        own, seconds = varied(chance)[0], chance.uniform(1, 9)
        answer = WholeAnswer(
            seconds=seconds,
            uncached_tokens=own,
            computed_tokens=own + round(10_000 * seconds),
            tokens=128,
            others=0,
        )
        slope.add(means.off(answer))

    assert slope.s_per_token is None


def test_a_few_answers_decide_nothing() -> None:
    """However well they fit."""
    assert seen(varied, answers=LEAST - 2, wait_s=1e-6) is None
    assert seen(varied, answers=LEAST + 2, wait_s=1e-6) == pytest.approx(PREFILL_S, rel=0.01)


def test_a_rank_that_has_changed_is_followed() -> None:
    """Old answers fade."""
    chance = random.Random(1)  # noqa: S311 - a test's dice
    means, slope = Means(), PrefillSlope()
    for number in range(3_000):
        pace = PREFILL_S if number < 500 else 4 * PREFILL_S
        computed = varied(chance)[0]
        answer = WholeAnswer(
            seconds=pace * computed + 2.56,
            uncached_tokens=computed,
            computed_tokens=computed,
            tokens=128,
            others=0,
        )
        slope.add(means.off(answer))

    assert slope.s_per_token == pytest.approx(4 * PREFILL_S, rel=0.05)
