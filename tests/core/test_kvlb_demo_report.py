"""The demo's arithmetic: ratios from engines' counters, percentiles, the verdict."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlb.demo.counters import count_fleet
from kvlb.demo.report import EngineCounts, PolicyRun, RoutedRequest, judge, percentile
from kvlb.errors import PeerError


def request(turn: int = 0, *, ttft_s: float = 0.1, prefill: str = "p0") -> RoutedRequest:
    return RoutedRequest(
        conversation=0,
        turn=turn,
        text=f"answer {turn}",
        ttft_s=ttft_s,
        instance="d0",
        prefill=prefill,
        reason="remote_prefill",
        overlap_tokens=0,
        prompt_tokens=100,
        cached_tokens=0,
    )


def run(policy: str = "kvlb", *, ttft_s: float = 0.1, prefilled_tokens: int = 40) -> PolicyRun:
    return PolicyRun(
        policy=policy,
        requests=(request(0, ttft_s=ttft_s), request(1, ttft_s=ttft_s, prefill="skipped")),
        counts=EngineCounts(prompt_tokens=100, prefilled_tokens=prefilled_tokens),
        duration_s=1.0,
    )


OURS = run()
THEIRS = run("round_robin", ttft_s=0.2, prefilled_tokens=80)


def failed(ours: PolicyRun, theirs: PolicyRun) -> list[str]:
    return [each.name for each in judge(ours, theirs).criteria if not each.passed]


def test_demo_passes_when_everything_holds() -> None:
    """Three times the cached ratio, half the time, equal texts, both kinds of leg."""
    report = judge(OURS, THEIRS)

    assert report.passed
    assert [each.name for each in report.criteria] == [
        "cached ratio",
        "TTFT p50",
        "equal texts",
        "prefill legs run",
        "prefill legs skipped",
    ]


@pytest.mark.parametrize(
    ("prefilled_tokens", "expected"),
    [
        pytest.param(70, [], id="exactly-1.5-times"),
        pytest.param(71, ["cached ratio"], id="just-under"),
    ],
)
def test_cached_ratio_must_be_half_as_much_again(
    prefilled_tokens: int, expected: list[str]
) -> None:
    """Round robin had 0.2; 0.3 passes, 0.29 doesn't."""
    assert failed(run(prefilled_tokens=prefilled_tokens), THEIRS) == expected


@pytest.mark.parametrize(
    ("ttft_s", "expected"),
    [pytest.param(0.139, [], id="under"), pytest.param(0.141, ["TTFT p50"], id="over")],
)
def test_median_ttft_must_be_at_most_seven_tenths(ttft_s: float, expected: list[str]) -> None:
    """Round robin had 200 ms."""
    assert failed(run(ttft_s=ttft_s), THEIRS) == expected


def test_a_different_text_fails_the_demo() -> None:
    """Routing must not change answers."""
    changed = replace(OURS, requests=(replace(OURS.requests[0], text="other"), OURS.requests[1]))

    assert failed(changed, THEIRS) == ["equal texts"]


def test_a_missing_request_fails_the_demo() -> None:
    """A request that only one run answered is not equal."""
    assert failed(OURS, replace(THEIRS, requests=THEIRS.requests[:1])) == ["equal texts"]


def test_legs_must_be_both_run_and_skipped() -> None:
    """A demo without a choice shows nothing."""
    only_run = replace(OURS, requests=tuple(request(turn) for turn in (0, 1)))
    only_skipped = replace(
        OURS, requests=tuple(request(turn, prefill="skipped") for turn in (0, 1))
    )

    assert failed(only_run, THEIRS) == ["prefill legs skipped"]
    assert failed(only_skipped, THEIRS) == ["prefill legs run"]


def test_nothing_measured_passes_nothing() -> None:
    """Empty runs divide by no zero and fail."""
    empty = PolicyRun(
        policy="kvlb",
        requests=(),
        counts=EngineCounts(prompt_tokens=0, prefilled_tokens=0),
        duration_s=0,
    )

    assert len(failed(empty, empty)) == 5


def test_json_holds_figures_but_no_texts() -> None:
    """The report is for programs; answers stay out of it."""
    text = json.dumps(judge(OURS, THEIRS).to_json())

    assert '"cached_ratio": 0.6' in text
    assert "answer 0" not in text


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 1))
def test_percentile_lies_between_the_extremes(values: list[float], fraction: float) -> None:
    """Whatever the fraction; 0 and 1 are the extremes themselves."""
    assert min(values) <= percentile(values, fraction) <= max(values)
    assert percentile(values, 0) == min(values)
    assert percentile(values, 1) == max(values)


DECODE = """
vllm:prompt_tokens_total{engine="0",model_name="sim"} 100.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="sim",source="local_compute"} 1.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="sim",source="local_cache_hit"} 0.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="sim",source="external_kv_transfer"} 99.0
"""
PREFILL = """
vllm:prompt_tokens_total{engine="0",model_name="sim"} 100.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="sim",source="local_compute"} 59.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="sim",source="local_cache_hit"} 41.0
"""


def test_transferred_tokens_are_not_cached() -> None:
    """The decode engine got 99 tokens by transfer; the prefill engine had to compute 59."""
    counts = count_fleet([DECODE], [PREFILL])

    assert counts == EngineCounts(prompt_tokens=100, prefilled_tokens=60)
    assert counts.cached_ratio == pytest.approx(0.4)


def test_missing_counter_is_an_error() -> None:
    """A ratio from a counter that isn't there would be a lie."""
    with pytest.raises(PeerError, match="vllm:prompt_tokens_total"):
        count_fleet(["up 1\n"], [])
