"""How `kvlb audit --live` judges the legs that a balancer has finished."""

from typing import Any

import pytest

from kvlb.audit.live_rules import (
    Decision,
    Leg,
    RankFacts,
    assign_causes,
    judge,
    read_facts,
)
from kvlb.audit.report import AuditReport, Row, Verdict, build_report

QUIET = RankFacts(epoch=1, last_seq=4)
RANK = ("m0", 0)


def leg(**changes: Any) -> Leg:
    """A leg predicted at 64 tokens, all of them held by events."""
    known = {
        "leg": "decode",
        "instance": "m0",
        "rank": 0,
        "overlap_tokens": 64,
        "held_tokens": 64,
        "trust": "exact",
        "prompt_tokens": 100,
        "cached_tokens": 64,
    }
    return Leg(**{**known, **changes})


def judged(*legs: Leg, after: RankFacts = QUIET, **decision: Any) -> list[Row]:
    asked = Decision(request_id="r", legs=list(legs), **decision)
    return list(judge(asked, {RANK: QUIET}, {RANK: after}))


def verdict(row: Row) -> tuple[Verdict, str | None]:
    return row.verdict, row.rule or row.reason


HEARD = RankFacts(epoch=1, last_seq=5)
AGAIN = RankFacts(epoch=2, last_seq=0)


@pytest.mark.parametrize(
    ("changes", "after", "expected"),
    [
        ({}, QUIET, (Verdict.EXACT, None)),
        ({"cached_tokens": 0}, QUIET, (Verdict.UNEXPLAINED, None)),
        ({"cached_tokens": 0}, HEARD, (Verdict.EXPLAINED, "evicted_since")),
        ({"cached_tokens": 0}, AGAIN, (Verdict.EXPLAINED, "restart_seen_late")),
        ({"cached_tokens": 0, "trust": "degraded"}, QUIET, (Verdict.EXPLAINED, "degraded_trust")),
        ({"cached_tokens": 80}, QUIET, (Verdict.UNEXPLAINED, None)),
        ({"cached_tokens": 80}, HEARD, (Verdict.EXPLAINED, "stored_since")),
        ({"cached_tokens": 80, "trust": "degraded"}, HEARD, (Verdict.EXPLAINED, "degraded_trust")),
        ({"held_tokens": 32, "cached_tokens": 32}, HEARD, (Verdict.EXPLAINED, "predicted_blocks")),
        ({"held_tokens": 32, "cached_tokens": 48}, HEARD, (Verdict.EXPLAINED, "predicted_blocks")),
        ({"held_tokens": 32, "cached_tokens": 16}, QUIET, (Verdict.UNEXPLAINED, None)),
        ({"held_tokens": None, "cached_tokens": 16}, QUIET, (Verdict.UNEXPLAINED, None)),
    ],
)
def test_leg_is_compared_and_what_may_explain_it_is_named(
    changes: dict[str, Any], after: RankFacts, expected: tuple[Verdict, str | None]
) -> None:
    """By what is known of its rank before and after."""
    (row,) = judged(leg(**changes), after=after)

    assert verdict(row) == expected
    assert (row.predicted, row.src, row.label) == (64, "m0", "decode")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"error": "engine_closed"}, "failed"),
        ({"leg": "forward", "overlap_tokens": None}, "forwarded"),
        ({"outcome": "several_answers"}, "several_answers"),
        ({"overlap_tokens": None, "held_tokens": None}, "unscorable"),
        ({"cached_tokens": None}, "no_cached_figure"),
    ],
)
def test_leg_that_says_nothing_of_the_index_is_not_compared(
    changes: dict[str, Any], reason: str
) -> None:
    """With the reason, the balancer's own where it gave one."""
    (row,) = judged(leg(**changes))

    assert verdict(row) == (Verdict.NOT_COMPARABLE, reason)


@pytest.mark.parametrize("error", ["cancelled", "ClientClosedRequest"])
def test_leg_whose_client_left_has_not_failed(error: str) -> None:
    """One that was ended for another reason has, and one that failed before the client left."""
    left = "ClientClosedRequest"

    assert [each.reason for each in judged(leg(error=error), error=left)] == ["client_left"]
    assert [each.reason for each in judged(leg(error=error), error="no_instance")] == ["failed"]
    assert [each.reason for each in judged(leg(error="no_transfer"), error=left)] == ["failed"]


@pytest.mark.parametrize("outcome", ["over", "no_index"])
def test_outcome_of_a_compared_leg_is_no_reason_against_it(outcome: str) -> None:
    """`over` is a difference like any other, and so is nothing predicted of a cold rank."""
    (row,) = judged(leg(outcome=outcome, cached_tokens=0))

    assert row.verdict is Verdict.UNEXPLAINED


def test_why_a_prompt_has_no_tokens_is_told() -> None:
    """As the request says it."""
    (row,) = judged(leg(overlap_tokens=None), unscorable="multimodal")

    assert row.reason == "multimodal"


def test_decode_leg_is_compared_unless_blocks_were_sent_to_it() -> None:
    """A prefill leg that failed has sent none."""
    failed = leg(leg="prefill", error="no_transfer")

    assert [each.reason for each in judged(leg(leg="prefill"), leg())] == [None, "after_transfer"]
    assert [each.reason for each in judged(failed, leg())] == ["failed", None]


def test_ranks_nobody_knows_of_explain_nothing() -> None:
    """Another process has the index."""
    asked = Decision(request_id="r", legs=[leg(rank=None, cached_tokens=0)])
    (row,) = judge(asked, {}, {})

    assert verdict(row) == (Verdict.UNEXPLAINED, None)


def test_facts_are_read_as_far_as_they_are_told() -> None:
    """Releases differ in what a rank's status holds."""
    shown = {"epoch": 3, "last_seq": 9, "counts": {"contradictions": {"ghost": 2}}}

    assert read_facts(shown) == RankFacts(epoch=3, last_seq=9, contradictions={"ghost": 2})
    assert read_facts({"epoch": 3, "counts": {"contradictions": None}}) == RankFacts(epoch=3)
    assert read_facts(None) == RankFacts()


def test_causes_that_the_indexer_weighed_replace_ours() -> None:
    """As many as it counted, by direction; a ghost is no excuse."""
    over = judged(leg(cached_tokens=0), leg(cached_tokens=0), leg(cached_tokens=0), after=HEARD)
    under = judged(leg(cached_tokens=80), leg(cached_tokens=80), after=HEARD)
    counted = {RANK: {"evicted_since": 1, "ghost": 1, "unseen": 1}}
    rows = assign_causes([*over, *under], counted)

    assert [verdict(each) for each in rows] == [
        (Verdict.EXPLAINED, "evicted_since"),
        (Verdict.WRONG, "ghost"),
        (Verdict.EXPLAINED, "evicted_since"),
        (Verdict.WRONG, "unseen"),
        (Verdict.EXPLAINED, "stored_since"),
    ]


def test_index_that_differs_may_promise_too_little_or_too_much() -> None:
    """Its count doesn't say which."""
    rows = judged(leg(cached_tokens=80), leg(cached_tokens=0))

    named = assign_causes(rows, {RANK: {"index_differs": 2}})

    assert [verdict(row) for row in named] == [(Verdict.WRONG, "index_differs")] * 2


def test_what_did_not_differ_gets_no_cause() -> None:
    """Nor does a guess that didn't come true: the index never claimed it."""
    rows = judged(leg(), leg(held_tokens=32, cached_tokens=32), leg(error="x"))

    assert assign_causes(rows, {RANK: {"ghost": 9}, ("m1", 0): {"ghost": 9}}) == rows


def report_of(*rows: Row) -> AuditReport:
    return build_report(list(rows), {})


def test_cause_is_counted_once_under_its_verdict() -> None:
    """A ghost explains nothing, and what is explained is no ghost."""
    over = judged(*[leg(cached_tokens=0)] * 3, leg(), after=HEARD)
    rows = assign_causes([*over, *judged(leg(cached_tokens=0))], {RANK: {"ghost": 2}})

    tally = report_of(*rows).phases["live"]

    assert tally.wrong == {"ghost": 2}
    assert tally.explained == {"evicted_since": 1}
    assert (tally.exact, tally.unexplained, tally.requests) == (1, 1, 5)


@pytest.mark.parametrize(
    ("leg_", "weighed", "is_explained"),
    [
        pytest.param(leg(), {}, True, id="exact"),
        pytest.param(leg(cached_tokens=0), {"evicted_since": 1}, True, id="evicted"),
        pytest.param(leg(cached_tokens=0), {"ghost": 1}, False, id="ghost"),
        pytest.param(leg(cached_tokens=80), {"unseen": 1}, False, id="unseen"),
        pytest.param(leg(cached_tokens=0), {}, False, id="no-cause"),
        pytest.param(leg(error="x"), {}, True, id="not-comparable"),
    ],
)
def test_live_report_holds_if_causes_excuse_every_difference(
    leg_: Leg, weighed: dict[str, int], is_explained: bool
) -> None:
    """As a recording's does; it decides about the exit code."""
    rows = assign_causes(judged(leg_), {RANK: weighed})

    assert report_of(*rows).is_explained is is_explained


def test_errors_are_counted_by_direction() -> None:
    """Requests and tokens; what an engine reports by convention is none."""
    rows = judged(leg(), leg(cached_tokens=0), leg(cached_tokens=80), leg(error="x"))
    by_convention = Row(
        i=1,
        phase="serial",
        label=None,
        src="d",
        rank=0,
        prompt_tokens=9,
        predicted=64,
        reported=0,
        verdict=Verdict.EXPLAINED,
        rule="remote_load",
    )
    report = report_of(*rows, by_convention)

    assert (report.over, report.over_tokens) == (1, 64)
    assert (report.under, report.under_tokens) == (1, 16)
