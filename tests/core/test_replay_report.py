"""`kvlb.replay.core.outcomes`, `report_rows`, `curves`: figures, their rows, their plots."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlb.replay.core.curves import HEIGHT, MOST_POINTS, WIDTH, distribution, round_axis, scatter
from kvlb.replay.core.outcomes import Limits, Outcome, Report, spread, summarize
from kvlb.replay.core.report_rows import (
    UNKNOWN,
    engine_rows,
    figure_rows,
    lateness_warning,
    render_report,
    time_rows,
)

GOOD = Outcome(
    line=1,
    session="a",
    at_s=0.0,
    ttft_s=0.1,
    e2e_s=0.5,
    gaps_s=(0.1, 0.3),
    prompt_tokens=100,
    cached_tokens=40,
    output_tokens=3,
    engine="m0",
)
FAILED = Outcome(line=3, session=None, at_s=2.0, error="status_503")


def report(*outcomes: Outcome, limits: Limits | None = None, planned: int = 0) -> Report:
    """Of ten seconds."""
    return summarize(outcomes, planned=planned, duration_s=10.0, limits=limits or Limits())


def test_only_whole_answers_have_times() -> None:
    """Failures are counted by kind."""
    found = report(GOOD, FAILED, replace(FAILED, error="cut"), FAILED)

    assert (found.due, found.answered) == (4, 1)
    assert found.errors == {"status_503": 2, "cut": 1}
    assert found.ttft_s is not None
    assert (found.ttft_s.most, found.requests_per_s) == (0.1, 0.1)


def test_cached_ratio_is_of_those_that_told() -> None:
    """Cached tokens over prompt tokens."""
    untold = replace(GOOD, cached_tokens=None, prompt_tokens=1000)

    assert report(GOOD, untold).cached_ratio == 0.4
    assert report(untold).cached_ratio is None


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        pytest.param(Limits(), None, id="none-given"),
        pytest.param(Limits(ttft_s=0.1), 1, id="ttft-kept"),
        pytest.param(Limits(ttft_s=0.099), 0, id="ttft-missed"),
        pytest.param(Limits(itl_s=0.2), 1, id="mean-pause-kept"),
        pytest.param(Limits(itl_s=0.19), 0, id="mean-pause-missed"),
    ],
)
def test_goodput_counts_answers_within_limits(limits: Limits, good: int | None) -> None:
    """Of all that were due: what failed wasn't good."""
    found = report(GOOD, FAILED, limits=limits)

    assert found.good == good
    assert found.goodput == (None if good is None else good / 2)


def test_answer_of_one_token_has_no_pause() -> None:
    """So it keeps any limit on pauses."""
    assert report(replace(GOOD, gaps_s=()), limits=Limits(itl_s=0.0)).good == 1


def test_nothing_due_is_no_goodput() -> None:
    """Stopped before the first request."""
    found = report(limits=Limits(ttft_s=1.0))

    assert (found.goodput, found.ttft_s, found.most_over_mean) == (None, None, None)
    assert found.kept_up


def test_engines_are_told_with_their_share() -> None:
    """And how far the busiest is above the mean."""
    found = report(GOOD, GOOD, GOOD, replace(GOOD, engine="m1"), replace(GOOD, engine=None))

    assert [(each.engine, each.requests, each.share) for each in found.engines] == [
        ("m0", 3, 0.6),
        ("m1", 1, 0.2),
    ]
    assert found.most_over_mean == 1.5
    assert engine_rows(found)[0] == ("m0", "3", "60.0%", "300", "0.400")


def test_late_client_is_told() -> None:
    """What wasn't sent at all was not late."""
    on_time = report(GOOD, replace(FAILED, error="in_flight_limit", late_s=9.0))
    late = report(replace(GOOD, late_s=0.06))

    assert (on_time.kept_up, lateness_warning(on_time)) == (True, None)
    assert not late.kept_up
    assert "late" in (lateness_warning(late) or "")


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_spread_lies_within_its_values(values: list[float]) -> None:
    """And grows with the percentile."""
    found = spread(values)

    assert found is not None
    assert min(values) <= found.p50 <= found.p90 <= found.p95 <= found.p99 <= found.most


def test_document_holds_every_request_in_order() -> None:
    """Times only of whole answers; all of it is JSON."""
    outcomes = [FAILED, GOOD, replace(GOOD, line=2, at_s=1.0, gaps_s=())]
    document = json.loads(json.dumps(render_report(report(*outcomes), outcomes)))

    assert [each["line"] for each in document["requests"]] == [1, 2, 3]
    assert [each["itl_s"] for each in document["requests"]] == [pytest.approx(0.2), None, None]
    assert (document["kept_up"], document["errors"]) == (True, {"status_503": 1})


def test_rows_say_unknown_where_nothing_was_told() -> None:
    """And leave out what nobody asked for."""
    rows = dict(figure_rows(report(replace(GOOD, cached_tokens=None, engine=None), planned=1)))

    assert rows["cached ratio"] == UNKNOWN
    assert not {"goodput", "busiest engine", "stopped"} & rows.keys()


def test_rows_name_what_was_asked_for() -> None:
    """Goodput, the busiest engine, and what a stop left undone."""
    rows = dict(figure_rows(report(GOOD, limits=Limits(ttft_s=1.0), planned=5)))

    assert rows["stopped"] == "4 were not due yet"
    assert rows["goodput"] == "100.0%, 0.10 requests/s"
    assert rows["busiest engine"] == "1.00 x the mean"


def test_times_are_rows_of_milliseconds() -> None:
    """One row per kind of time."""
    rows = time_rows(report(GOOD))

    assert [row[0] for row in rows] == ["TTFT", "ITL", "E2E", "sent late by"]
    assert rows[1] == ("ITL", "200.0", "200.0", "280.0", "290.0", "298.0", "300.0")


@pytest.mark.parametrize(
    ("most", "end"), [(0, 1), (0.7, 0.8), (1, 1), (3, 4), (11, 20), (99, 100), (1.5e6, 2e6)]
)
def test_axis_ends_at_a_round_number(most: float, end: float) -> None:
    """Just above the largest value."""
    axis = round_axis(most, "ms")

    assert axis.end == pytest.approx(end)
    assert axis.labels[0] == (0.0, "0 ms")


def test_distribution_climbs_to_the_last_value() -> None:
    """From the top left of nothing to everything."""
    points = distribution([4.0, 2.0], 4.0).split()

    assert points == [f"{WIDTH / 2:.1f},{HEIGHT / 2:.1f}", f"{WIDTH:.1f},0.0"]


def test_large_sets_are_thinned() -> None:
    """A page of a long replay must still open."""
    many = [float(each) for each in range(5 * MOST_POINTS)]

    assert len(distribution(many, many[-1]).split()) <= MOST_POINTS + 1
    assert len(scatter([(each, each) for each in many], many[-1], many[-1])) <= MOST_POINTS
    assert distribution([], 1.0) == ""
