"""The chaos run's own rules: what it draws, and what it complains of."""

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.chaos.client import Outcome
from benchmarks.chaos.judge import FleetEnd, Verdict, judge
from benchmarks.chaos.requests import Ask, draw_requests
from benchmarks.chaos.schedule import RECOVERY_S, Fault, draw_faults
from simulator.core.history import Condition, FleetHistory
from simulator.life_counts import LifeCounts

ROLES = {"prefill": ("p0", "p1", "p2"), "decode": ("d0", "d1", "d2")}
ASK = Ask(
    id="chaos-1-00001",
    at_s=0.0,
    path="/v1/completions",
    body={"prompt": "x", "max_tokens": 4},
    text="the ",
    tokens=4,
)
STREAM = replace(ASK, body={**ASK.body, "stream": True})
ERROR = {"message": "gone", "type": "BadGatewayError", "param": None, "code": "engine_closed"}
CLEAN = FleetEnd(counts=LifeCounts(), stranded=0, held_share=0.0)
GOOD: dict[str, Any] = {
    "end": "answered",
    "status": 200,
    "text": "the ",
    "finish_reason": "length",
    "completion_tokens": 4,
}


def chance(seed: int) -> random.Random:
    return random.Random(seed)  # noqa: S311 - a schedule, no secret


def spans(faults: list[Fault], names: tuple[str, ...]) -> list[tuple[float, float]]:
    return [(each.at_s, each.clear_s) for each in faults if each.engine in names]


@given(st.integers(0, 10_000))
def test_of_each_role_one_engine_is_always_well(seed: int) -> None:
    """And has been for long enough to be known; when the time is over nothing is wrong any more."""
    faults = draw_faults(chance(seed), ROLES, 30.0)

    for names in ROLES.values():
        for moment in sorted({each.at_s for each in faults}):
            suffering = {
                name
                for name in names
                if any(first <= moment < last for first, last in spans(faults, (name,)))
            }
            assert len(suffering) < len(names)
    assert all(each.clear_s - RECOVERY_S <= 30.0 for each in faults)


@given(st.integers(0, 10_000))
def test_an_engine_suffers_one_thing_at_a_time(seed: int) -> None:
    """The next one comes after it has recovered."""
    faults = draw_faults(chance(seed), ROLES, 30.0)

    for name in (name for names in ROLES.values() for name in names):
        its = sorted(spans(faults, (name,)))
        assert all(before[1] <= after[0] for before, after in pairwise(its))


def test_a_seed_is_a_run() -> None:
    """The same faults and requests each time, others for another seed; every kind is among them."""
    drawn = [draw_faults(chance(seed), ROLES, 60.0) for seed in (1, 1, 2)]
    asked = [draw_requests(chance(seed), seed, 50, 50.0) for seed in (1, 1, 2)]

    assert drawn[0] == drawn[1] != drawn[2]
    assert asked[0] == asked[1] != asked[2]
    assert {each.kind for each in drawn[0]} == {"kill", "restart", "hang", "cut_off", "cut"}
    assert {each.path for each in asked[0]} == {"/v1/completions", "/v1/chat/completions"}


def test_no_prompt_kills_an_engine_with_a_shared_storage() -> None:
    """By its length alone; every other prompt is drawn as before."""
    usual = draw_requests(chance(3), 3, 200, 50.0)
    spared = draw_requests(chance(3), 3, 200, 50.0, spares_storage=True)
    ids = [each.body["prompt"] for each in spared if isinstance(each.body.get("prompt"), list)]

    assert all(len(each) % 16 != 1 for each in ids)
    assert 0 < sum(one != other for one, other in zip(usual, spared, strict=True)) < 40


def judged(outcome: Outcome, history: FleetHistory | None = None, **end: Any) -> Verdict:
    if history is None:
        history = FleetHistory()
        for name in ("d0", "p0"):
            history.note(name, "started", Condition.WELL, 0.0)
        history.begin("d0", "chaos-1-00001", 10.0)
    needed = {"decode": ("d0",), "prefill": ("p0",)}
    return judge([outcome], history, replace(CLEAN, **end), needed)


def outcome(ask: Ask = ASK, **seen: Any) -> Outcome:
    return Outcome(ask=ask, began_s=10.0, ended_s=11.0, **seen)


@pytest.mark.parametrize(
    ("seen", "rules"),
    [
        pytest.param(GOOD, [], id="right"),
        pytest.param(GOOD | {"text": "thx "}, ["wrong_answer"], id="another-text"),
        pytest.param(GOOD | {"text": "the"}, ["wrong_answer"], id="cut-short"),
        pytest.param(GOOD | {"finish_reason": None}, ["wrong_answer"], id="no-finish-reason"),
        pytest.param(GOOD | {"completion_tokens": 3}, ["wrong_answer"], id="wrong-usage"),
        pytest.param({"end": "hung"}, ["hung"], id="over-the-deadline"),
        pytest.param({"end": "broken", "status": 200}, ["broken"], id="no-word-at-the-end"),
        pytest.param({"end": "left", "text": "th"}, [], id="left-with-a-beginning"),
        pytest.param({"end": "left", "text": "##"}, ["wrong_answer"], id="left-with-nonsense"),
        pytest.param(
            {"end": "error", "status": 502, "error": ERROR}, ["avoidable_error"], id="avoidable"
        ),
        pytest.param(
            {"end": "error", "status": 500, "error": ERROR},
            ["error_form", "avoidable_error"],
            id="another-status",
        ),
        pytest.param(
            {"end": "error", "status": 503, "error": "no"},
            ["error_form", "avoidable_error"],
            id="another-form",
        ),
        pytest.param(
            {"end": "error_event", "status": 200, "error": ERROR},
            ["avoidable_error"],
            id="event-before-the-first-word",
        ),
        pytest.param(
            {"end": "error_event", "status": 200, "error": ERROR, "text": "th"},
            ["unfounded_event"],
            id="event-without-a-reason",
        ),
    ],
)
def test_what_a_client_saw_is_judged(seen: dict[str, Any], rules: list[str]) -> None:
    """While both engines were well."""
    asked = STREAM if seen.get("end") == "error_event" else ASK

    assert [each.rule for each in judged(outcome(asked, **seen)).complaints] == rules


def killed(at_s: float) -> FleetHistory:
    history = FleetHistory()
    for name in ("d0", "p0"):
        history.note(name, "started", Condition.WELL, 0.0)
    history.begin("p0", "chaos-1-00001-ab", 10.0)
    history.begin("d0", "cmpl-chaos-1-00001-ab", 10.1)
    history.note("d0", "killed", Condition.DOWN, at_s)
    return history


def test_an_error_that_nobody_could_help_is_none_to_complain_of() -> None:
    """No decode engine was well for long enough before it."""
    seen = outcome(end="error", status=502, error=ERROR)

    assert judged(seen, killed(at_s=10.5)).complaints == ()


def test_an_event_behind_what_befell_its_engine_is_right() -> None:
    """Found by the request's attempts, whatever a connector made of its id."""
    seen = outcome(STREAM, end="error_event", status=200, error=ERROR, text="th")

    verdict = judged(seen, killed(at_s=10.5))

    assert verdict.complaints == ()
    assert verdict.again == 0


@pytest.mark.parametrize(
    "more", [{"finish_reason": "length"}, {"after_error": True}], ids=["finish", "more"]
)
def test_nothing_looks_like_an_end_behind_an_error(more: dict[str, Any]) -> None:
    """No finish reason, and no further event."""
    seen = outcome(STREAM, end="error_event", status=200, error=ERROR, text="th", **more)

    assert [each.rule for each in judged(seen, killed(10.5)).complaints] == ["made_up_end"]


@pytest.mark.parametrize(
    ("end", "rule"),
    [
        ({"stranded": 1}, "stranded"),
        ({"held_share": 0.1}, "stranded"),
        ({"counts": LifeCounts(corrupt_reads=1)}, "corrupt"),
        ({"legs_left": 1}, "leaked"),
    ],
    ids=["reservation", "blocks", "wrong-blocks", "leg"],
)
def test_what_the_engines_say_is_judged(end: dict[str, Any], rule: str) -> None:
    """Once everything is over."""
    verdict = judged(outcome(**GOOD), **end)

    assert [each.rule for each in verdict.complaints] == [rule]
