"""What requests and their legs are counted by."""

from typing import Any

import pytest

from balancer.core.fleet.snapshot import Instance
from balancer.core.routing.plan import Candidate, Choice, OtherWay, Reason, RoutePlan
from indexer.core.types import InstanceId, RankId


def test_requests_are_counted_by_outcome(bench: Any) -> None:
    """Status class and error code, both bounded."""
    bench.observe()
    bench.observe(status=503, error="no_instance", plan=None)
    bench.observe(status=None, error="cancelled", path="/v1/embeddings")

    labels = {"model": "base", "path": "/v1/completions"}
    assert bench.value("kvlb_requests_total", status="2xx", outcome="ok", **labels) == 1
    assert bench.value("kvlb_requests_total", status="5xx", outcome="no_instance", **labels) == 1
    assert (
        bench.value(
            "kvlb_requests_total", model="base", path="other", status="none", outcome="cancelled"
        )
        == 1
    )
    assert bench.value("kvlb_request_duration_seconds_sum", **labels) == 4


def test_three_hit_rates_have_numerator_and_denominator(bench: Any) -> None:
    """Available, chosen, delivered: counters that a dashboard divides."""
    bench.observe(
        bench.leg("prefill", "b", prompt_tokens=100, cached_tokens=30),
        bench.leg("decode", "a", prompt_tokens=100, cached_tokens=99, completion_tokens=7),
        prompt_tokens=100,
        available_tokens=64,
        chosen_tokens=32,
        prompt_source="local",
    )

    assert bench.value("kvlb_prompt_tokens_total", model="base") == 100
    assert bench.value("kvlb_overlap_available_tokens_total", model="base") == 64
    assert bench.value("kvlb_overlap_chosen_tokens_total", model="base") == 32
    for kind, cached in (("prefill", 30), ("decode", 99)):
        labels = {"model": "base", "leg": kind}
        assert bench.value("kvlb_cached_tokens_total", **labels) == cached
        assert bench.value("kvlb_cached_tokens_known_prompt_tokens_total", **labels) == 100
    assert bench.value("kvlb_completion_tokens_total", model="base") == 7
    assert bench.value("kvlb_tokenize_total", source="local", outcome="ok") == 1


def test_unknown_cached_tokens_are_not_zero(bench: Any) -> None:
    """They count in neither part of the ratio."""
    bench.observe(bench.leg(prompt_tokens=100, cached_tokens=None), unscorable="timeout")

    assert bench.value("kvlb_cached_tokens_total", model="base", leg="decode") is None
    assert bench.value("kvlb_prompt_tokens_total", model="base") is None
    assert bench.value("kvlb_tokenize_total", source="none", outcome="timeout") == 1


@pytest.mark.parametrize(
    ("legs", "outcome"),
    [
        pytest.param([{}], "skipped", id="skipped"),
        pytest.param([{"kind": "prefill"}, {}], "run", id="run"),
        pytest.param([{"kind": "prefill", "error": "engine_closed"}, {}], "failed", id="failed"),
    ],
)
def test_prefill_decisions_are_counted(
    bench: Any, legs: list[dict[str, str]], outcome: str
) -> None:
    """With their reason."""
    bench.observe(*(bench.leg(**each) for each in legs))

    labels = {"outcome": outcome, "reason": "decode_has_cache"}
    assert bench.value("kvlb_prefill_legs_total", **labels) == 1


def test_choices_between_both_ways_are_counted_in_seconds(bench: Any) -> None:
    """Estimate and alternative of all, regret of those whose first token was seen."""
    candidate = Candidate(
        rank=RankId(bench.fleet.instances[0].id, 0), instance=bench.fleet.instances[0]
    )
    plan = RoutePlan(
        decode=Choice(
            candidate=candidate,
            cost_s=0.5,
            terms={"work": 0.25, "stall": 0.25},
            other=OtherWay(remote=True, cost_s=0.625, terms={}),
        ),
        reason=Reason.LOCAL_FASTER,
    )
    bench.observe(bench.leg(), plan=plan)
    bench.observe(bench.leg(), plan=plan, stream=True)

    assert bench.value("kvlb_pd_decisions_total", way="local", reason="local_faster") == 2
    assert bench.value("kvlb_pd_estimated_seconds_total", way="local") == 1.0
    assert bench.value("kvlb_pd_alternative_seconds_total", way="local") == 1.25
    assert bench.value("kvlb_pd_paid_seconds_total", way="local") == 0.75
    assert bench.value("kvlb_pd_regret_seconds_total", way="local") == 0.125


def test_a_choice_without_an_alternative_counts_no_seconds(bench: Any) -> None:
    """Forced, or by the threshold; on a mixed instance there was no choice at all."""
    bench.observe(bench.leg())
    mixed = Instance(id=InstanceId("http://m:1"), alias="m")
    candidate = Candidate(rank=RankId(mixed.id, 0), instance=mixed)
    bench.observe(
        bench.leg(),
        plan=RoutePlan(decode=Choice(candidate=candidate, cost_s=0), reason=Reason.AGGREGATED),
    )

    assert bench.value("kvlb_pd_decisions_total", way="local", reason="decode_has_cache") == 1
    assert bench.value("kvlb_pd_decisions_total", way="local", reason="aggregated") is None
    assert bench.value("kvlb_pd_estimated_seconds_total", way="local") is None


def test_first_token_is_timed_where_it_can_be_seen(bench: Any) -> None:
    """An answer that isn't streamed has its first byte at the end."""
    bench.observe(bench.leg(), bench.leg("prefill"))
    bench.observe(bench.leg(), stream=True, first_byte_s=10.75)

    name = "kvlb_time_to_first_token_seconds_count"
    assert bench.value(name, leg="decode", instance="a") == 1
    assert bench.value(name, leg="prefill", instance="a") == 1
    assert bench.value("kvlb_request_time_to_first_token_seconds_sum", model="base") == 0.75


def test_inter_token_time_is_known_of_streams_with_two_tokens(bench: Any) -> None:
    """Seconds between the first and the last token, by the tokens between them."""
    bench.observe(bench.leg(completion_tokens=5, ended_s=11.5), stream=True)
    bench.observe(bench.leg(completion_tokens=5, ended_s=11.5))
    bench.observe(bench.leg(completion_tokens=1, ended_s=11.5), stream=True)
    bench.observe(bench.leg(completion_tokens=5, ended_s=11.5, error="stream_cut"), stream=True)

    name = "kvlb_inter_token_seconds"
    assert bench.value(f"{name}_count", leg="decode", instance="a") == 1
    assert bench.value(f"{name}_sum", leg="decode", instance="a") == 0.25


def test_delivered_is_what_the_first_leg_found(bench: Any) -> None:
    """A decode engine counts what it was sent as cached; that was no hit."""
    bench.observe(
        bench.leg("prefill", cached_tokens=16, prompt_tokens=64),
        bench.leg("decode", cached_tokens=48, prompt_tokens=64),
    )
    bench.observe(bench.leg("decode", cached_tokens=32, prompt_tokens=64))
    bench.observe(bench.leg("decode", cached_tokens=None, prompt_tokens=64))

    assert bench.value("kvlb_delivered_tokens_total", model="base") == 48
    assert bench.value("kvlb_delivered_known_prompt_tokens_total", model="base") == 128


def test_prediction_is_held_against_what_the_engine_said(bench: Any) -> None:
    """Too much predicted is counted; too little is no loss."""
    bench.observe(bench.leg(overlap_tokens=64, cached_tokens=48, prompt_tokens=80))
    bench.observe(bench.leg(overlap_tokens=16, cached_tokens=32, prompt_tokens=80))
    bench.observe(bench.leg(overlap_tokens=None, cached_tokens=32, prompt_tokens=80))

    name = "kvlb_leg_{}_tokens_total"
    assert bench.value(name.format("predicted"), leg="decode", instance="a") == 80
    assert bench.value(name.format("overpredicted"), leg="decode", instance="a") == 16
