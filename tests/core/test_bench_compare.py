"""Paired differences: what counts as better, level and worse."""

from typing import Any

import msgspec
import pytest

from kvlb.bench.compare import compare, geometric_mean, paired
from kvlb.bench.figures import METRICS, Figures

EVEN = Figures(
    ttft_mean=1.0,
    ttft_p50=1.0,
    ttft_p90=1.0,
    ttft_p99=1.0,
    e2e_mean=1.0,
    e2e_p99=1.0,
    goodput=0.5,
    cached=0.5,
    most_over_mean=1.0,
    calls=10,
)


def runs(name: str, *values: float) -> list[Figures]:
    """One per seed, even but for one figure."""
    change: Any = {name: None}
    return [msgspec.structs.replace(EVEN, **(change | {name: value})) for value in values]


def standing(name: str, ours: list[float], **others: list[float]) -> str:
    measured = {policy: runs(name, *values) for policy, values in others.items()}
    found = compare({"kvlb": runs(name, *ours), **measured}, "kvlb")
    return next(each.standing for each in found if each.metric == name)


@pytest.mark.parametrize(
    ("ours", "expected"),
    [
        pytest.param([0.8, 1.8, 2.8], "better", id="always less"),
        pytest.param([1.2, 2.2, 3.2], "worse", id="always more"),
        pytest.param([0.8, 2.2, 2.9], "level", id="now less, now more"),
        pytest.param([1.0, 2.0, 3.0], "level", id="equal"),
    ],
)
def test_differences_are_paired_by_seed(ours: list[float], expected: str) -> None:
    """How much seeds differ from each other doesn't matter."""
    assert standing("ttft_mean", ours, session=[1.0, 2.0, 3.0]) == expected


def test_more_goodput_is_better() -> None:
    """Of every other metric less is."""
    assert standing("goodput", [0.9, 0.8], session=[0.8, 0.7]) == "better"
    assert standing("goodput", [0.7, 0.6], session=[0.8, 0.7]) == "worse"


def test_the_best_other_policy_is_chosen_for_each_metric() -> None:
    """After the fact, by its mean."""
    measured = {
        "kvlb": runs("ttft_mean", 1.0, 1.0),
        "session": runs("ttft_mean", 3.0, 3.0),
        "round_robin": runs("ttft_mean", 2.0, 2.0),
    }

    found = {each.metric: each for each in compare(measured, "kvlb")}

    assert list(found) == list(METRICS)
    assert found["ttft_mean"].other == "round_robin"
    assert found["ttft_mean"].ratio == 0.5
    assert found["ttft_mean"].mean == -1.0


def test_one_seed_decides_nothing() -> None:
    """Its interval has no end."""
    assert standing("e2e_mean", [1.0], session=[9.0]) == "level"
    assert paired([3.0])[0] == 3.0


def test_the_interval_is_students() -> None:
    """Five seeds: 2.776 standard errors."""
    mean, half_width = paired([1.0, 2.0, 3.0, 4.0, 5.0])

    assert mean == 3.0
    assert half_width == pytest.approx(2.776 * 1.5811388 / 5**0.5, rel=1e-6)
    assert paired([float(number % 2) for number in range(40)])[1] > 0


def test_geometric_mean_is_of_ratios() -> None:
    """Twice as long and half as long are even."""
    assert geometric_mean([2.0, 0.5]) == pytest.approx(1.0)
