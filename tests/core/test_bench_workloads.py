"""Workloads of `kvlb bench routing`: what is shared, what continues, what a seed changes."""

from collections.abc import Sequence

import pytest

from kvlb.bench.calls import Call
from kvlb.bench.oracle import endless_share
from kvlb.bench.workloads import WORKLOADS


def calls(name: str, *, engines: int = 4, speed: float = 1.0, seed: int = 0) -> Sequence[Call]:
    return WORKLOADS[name].calls(engines, speed, seed)


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_call_fits_its_engine(name: str) -> None:
    """Prompt and answer, and there is a key for each of their full blocks."""
    workload = WORKLOADS[name]
    size = workload.block_size

    for call in calls(name):
        whole = call.prompt.tokens + call.output_tokens
        assert whole <= workload.cache_tokens
        assert len(call.keys) == whole // size
        assert list(call.prompt.keys(size)) == list(call.keys[: call.prompt.tokens // size])


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_seed_is_a_workload(name: str) -> None:
    """The same again, and another one of about the same size."""

    def told(made: Sequence[Call]) -> list[tuple[float, int]]:
        return [(call.at_s, call.prompt.tokens) for call in made]

    assert told(calls(name)) == told(calls(name))
    assert told(calls(name)) != told(calls(name, seed=1))


@pytest.mark.parametrize("name", WORKLOADS)
def test_speed_brings_first_calls_sooner(name: str) -> None:
    """And leaves pauses after an answer alone."""
    slow, fast = calls(name), calls(name, speed=2.0)

    for one, other in zip(slow, fast, strict=True):
        expected = one.at_s / 2 if one.after is None else one.at_s
        assert other.at_s == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        pytest.param("conversation", 0.2, 0.4, id="conversation"),
        pytest.param("arxiv", 0.36, 0.40, id="arxiv"),
        pytest.param("weka", 0.90, 0.92, id="weka"),
        pytest.param("swe", 0.8, 0.95, id="swe"),
        pytest.param("chat", 0.8, 0.95, id="chat"),
        pytest.param("agents", 0.8, 0.95, id="agents"),
    ],
)
def test_as_much_is_shared_as_the_source_says(name: str, least: float, most: float) -> None:
    """By one cache that forgets nothing."""
    workload = WORKLOADS[name]

    assert least <= endless_share(calls(name), workload.block_size) <= most


@pytest.mark.parametrize("name", ["weka", "swe", "chat", "agents"])
def test_larger_fleets_get_more_of_it(name: str) -> None:
    """Other sessions, which share among each other what sessions share."""
    few, many = calls(name), calls(name, engines=8)

    assert len(many) == pytest.approx(2 * len(few), rel=0.1)
    assert len({call.session for call in many}) == 2 * len({call.session for call in few})


@pytest.mark.parametrize("name", ["swe", "chat", "agents"])
def test_the_next_call_repeats_the_answer_before_it(name: str) -> None:
    """So whatever is full of prompt and answer is found again by who waited for it."""
    made = calls(name)
    followers = [call for call in made if call.after is not None]

    assert followers
    for call in followers:
        assert call.after is not None
        before = made[call.after]
        assert call.session == before.session
        assert list(call.keys[: len(before.keys)]) == list(before.keys)


def test_copies_share_the_system_prompt_only() -> None:
    """What two sessions of one trace have in common they have in common with every copy."""
    by_session: dict[str, set[int]] = {}
    for call in calls("weka", engines=8):
        by_session.setdefault(str(call.session), set()).update(call.keys)
    one, other = by_session["trace_0019/0"], by_session["trace_0019/1"]
    strangers = set().union(*(keys for name, keys in by_session.items() if "0019" not in name))

    assert one & other == one & strangers
