"""The most usual request is counted by one look; anything else the long way, with the same result."""

from typing import Any

import pytest

from balancer.core.fleet.snapshot import Role
from balancer.core.routing.plan import Reason

UNREAD: dict[str, Any] = {"unscorable": "not_asked", "reason": Reason.AGGREGATED}

REQUEST = {"model": "base", "path": "/v1/completions", "status": "2xx", "outcome": "ok"}


def usual(bench: Any, **fields: Any) -> Any:
    """The leg of a request that nobody streams and whose prompt nobody has read."""
    known: dict[str, Any] = {
        "overlap_tokens": None,
        "prompt_tokens": 100,
        "cached_tokens": 64,
        "completion_tokens": 7,
    }
    return bench.leg("decode", "m0", **(known | fields))


def test_most_usual_request_counts_everything_by_one_look(bench: Any) -> None:
    """Ten series, the same that the long way counts, and no other."""
    bench.serve("m0", role=Role.MIXED)
    for _ in range(2):
        bench.observe(usual(bench), **UNREAD)

    told = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in bench.registry.collect()
        for sample in family.samples
        if sample.value and sample.name.endswith(("_total", "_count", "_sum"))
    }
    fleet_wide = {"kvlb_full_reports_total", "kvlb_reports_lost_total"}
    assert {name: value for name, value in told.items() if name[0] not in fleet_wide} == {
        ("kvlb_requests_total", "/v1/completions", "2xx", "base", "ok"): 2,
        ("kvlb_request_duration_seconds_count", "/v1/completions", "base"): 2,
        ("kvlb_request_duration_seconds_sum", "/v1/completions", "base"): 4,
        ("kvlb_tokenize_total", "none", "not_asked"): 2,
        ("kvlb_prefill_legs_total", "aggregated", "skipped"): 2,
        ("kvlb_legs_total", "decode", "m0", "ok"): 2,
        ("kvlb_cached_tokens_total", "base", "decode"): 128,
        ("kvlb_cached_tokens_known_prompt_tokens_total", "base", "decode"): 200,
        ("kvlb_completion_tokens_total", "base"): 14,
        ("kvlb_delivered_tokens_total", "base"): 128,
        ("kvlb_delivered_known_prompt_tokens_total", "base"): 200,
    }


def test_usual_stream_counts_its_pace_too(bench: Any) -> None:
    """Three more than what isn't streamed: both times to the first token, and the pause between two."""
    bench.serve("m0", role=Role.MIXED)
    leg = usual(bench, first_token_s=11.0, ended_s=14.0)

    bench.observe(leg, stream=True, first_byte_s=11.5, **UNREAD)

    of_leg = {"leg": "decode", "instance": "m0"}
    first, whole = "kvlb_time_to_first_token_seconds", "kvlb_request_time_to_first_token_seconds"
    assert bench.value(f"{whole}_sum", model="base") == 1.5
    assert bench.value(f"{first}_sum", **of_leg) == 1.0
    assert bench.value("kvlb_inter_token_seconds_sum", **of_leg) == 0.5
    assert bench.value("kvlb_requests_total", **REQUEST) == 1


def test_instance_that_left_is_not_counted_by_its_name_any_more(bench: Any) -> None:
    """What was looked up ends with the snapshot it was looked up for, and its series with it."""
    bench.serve("m0", "m1", role=Role.MIXED)
    bench.observe(usual(bench), **UNREAD)
    bench.serve("m1", role=Role.MIXED)
    bench.metrics.forget_absent(bench.fleet)
    bench.observe(usual(bench), **UNREAD)

    assert bench.value("kvlb_legs_total", leg="decode", instance="m0", outcome="ok") is None
    assert bench.value("kvlb_legs_total", leg="decode", instance="other", outcome="ok") == 1


@pytest.mark.parametrize(
    ("legs", "fields"),
    [
        pytest.param([{}, {}], {}, id="two-legs"),
        pytest.param([{"error": "engine_closed"}], {}, id="failed-leg"),
        pytest.param([{"cached_tokens": None}], {}, id="no-usage"),
        pytest.param([{"overlap_tokens": 3}], {}, id="predicted"),
        pytest.param([{}], {"stream": True}, id="stream-without-a-token"),
        pytest.param(
            [{"first_token_s": 11.0, "ended_s": 12.0, "completion_tokens": 1}],
            {"stream": True, "first_byte_s": 1.0},
            id="stream-of-one-token",
        ),
        pytest.param([{}], {"plan": None}, id="without-a-plan"),
        pytest.param([{}], {"unscorable": None}, id="read"),
        pytest.param([{}], {"error": "cancelled"}, id="failed"),
        pytest.param([{}], {"status": None}, id="unanswered"),
        pytest.param([{}], {"ended_s": None}, id="unended"),
    ],
)
def test_whatever_is_unusual_goes_the_long_way(
    bench: Any, legs: list[dict[str, Any]], fields: dict[str, Any]
) -> None:
    """One way or the other the request is counted, and its legs are."""
    bench.serve("m0", role=Role.MIXED)

    bench.observe(*(usual(bench, **each) for each in legs), **(UNREAD | fields))

    named = bench.registry.collect()
    counted = {
        family.name: sum(sample.value for sample in family.samples if "_total" in sample.name)
        for family in named
    }
    assert counted["kvlb_requests"] == 1
    assert counted["kvlb_legs"] == len(legs)
