"""Metrics answer their questions and stay bounded."""

from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from balancer.core.fleet.snapshot import Fleet, Instance, Role
from balancer.core.load.ledger import LegWork
from balancer.core.load.local_ledger import LocalLedger
from balancer.core.record import LegRecord, RequestRecord
from balancer.core.routing.plan import Candidate, Choice, OtherWay, Reason, RoutePlan
from balancer.fleet.metrics import FleetCollector
from balancer.metrics import BalancerMetrics
from indexer.core.model_cards import parse_model_list
from indexer.core.types import InstanceId, RankId, Trust


def instance(alias: str) -> Instance:
    """A healthy decode instance of `base` with one adapter."""
    cards = [{"id": "base"}, {"id": "alias"}, {"id": "ad", "parent": "base"}]
    return Instance(
        id=InstanceId(f"http://{alias}:1"),
        alias=alias,
        role=Role.DECODE,
        healthy=True,
        models=parse_model_list({"data": cards}),
    )


class Bench:
    """Metrics over a fleet that a test changes."""

    def __init__(self) -> None:
        self.fleet = Fleet(instances=(instance("a"), instance("b")))
        self.registry = CollectorRegistry()
        self.ledger = LocalLedger(clock=lambda: 0.0)
        self.metrics = BalancerMetrics(self.registry, lambda: self.fleet)
        self.unknown_ranks = 0
        collector = FleetCollector(
            fleet=lambda: self.fleet,
            ledger=self.ledger,
            unknown_ranks=lambda: self.unknown_ranks,
            fleet_bugs=lambda: 0,
            lost_reports=lambda: 4,
            full_reports=lambda: 5,
            trust=lambda _: Trust.DEGRADED,
        )
        self.registry.register(collector)

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)

    def observe(self, *legs: LegRecord, **fields: Any) -> None:
        plan = RoutePlan(
            decode=Choice(
                candidate=Candidate(
                    rank=RankId(self.fleet.instances[0].id, 0), instance=self.fleet.instances[0]
                ),
                cost_s=0.0,
            ),
            reason=fields.pop("reason", Reason.DECODE_HAS_CACHE),
        )
        known: dict[str, Any] = {
            "request_id": "r",
            "path": "/v1/completions",
            "arrived_s": 10.0,
            "ended_s": 12.0,
            "model": "base",
            "base_model": "base",
            "status": 200,
            "plan": plan,
        }
        self.metrics.observe(RequestRecord(legs=list(legs), **(known | fields)))


@pytest.fixture
def bench() -> Bench:
    return Bench()


def leg(kind: str = "decode", alias: str = "a", **fields: Any) -> LegRecord:
    """One finished leg."""
    known: dict[str, Any] = {"overlap_tokens": 0, "started_s": 10.0, "first_byte_s": 10.5}
    return LegRecord(kind=kind, alias=alias, **(known | fields))


def test_requests_are_counted_by_outcome(bench: Bench) -> None:
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


def test_three_hit_rates_have_numerator_and_denominator(bench: Bench) -> None:
    """Available, chosen, delivered: counters that a dashboard divides."""
    bench.observe(
        leg("prefill", "b", prompt_tokens=100, cached_tokens=30),
        leg("decode", "a", prompt_tokens=100, cached_tokens=99, completion_tokens=7),
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


def test_unknown_cached_tokens_are_not_zero(bench: Bench) -> None:
    """They count in neither part of the ratio."""
    bench.observe(leg(prompt_tokens=100, cached_tokens=None), unscorable="timeout")

    assert bench.value("kvlb_cached_tokens_total", model="base", leg="decode") is None
    assert bench.value("kvlb_prompt_tokens_total", model="base") is None
    assert bench.value("kvlb_tokenize_total", source="none", outcome="timeout") == 1


@pytest.mark.parametrize(
    ("legs", "outcome"),
    [
        pytest.param([leg()], "skipped", id="skipped"),
        pytest.param([leg("prefill"), leg()], "run", id="run"),
        pytest.param([leg("prefill", error="engine_closed"), leg()], "failed", id="failed"),
    ],
)
def test_prefill_decisions_are_counted(bench: Bench, legs: list[LegRecord], outcome: str) -> None:
    """With their reason."""
    bench.observe(*legs)

    labels = {"outcome": outcome, "reason": "decode_has_cache"}
    assert bench.value("kvlb_prefill_legs_total", **labels) == 1


def test_choices_between_both_ways_are_counted_in_seconds(bench: Bench) -> None:
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
    bench.observe(leg(), plan=plan)
    bench.observe(leg(), plan=plan, stream=True)

    assert bench.value("kvlb_pd_decisions_total", way="local", reason="local_faster") == 2
    assert bench.value("kvlb_pd_estimated_seconds_total", way="local") == 1.0
    assert bench.value("kvlb_pd_alternative_seconds_total", way="local") == 1.25
    assert bench.value("kvlb_pd_paid_seconds_total", way="local") == 0.75
    assert bench.value("kvlb_pd_regret_seconds_total", way="local") == 0.125


def test_a_choice_without_an_alternative_counts_no_seconds(bench: Bench) -> None:
    """Forced, or by the threshold; on a mixed instance there was no choice at all."""
    bench.observe(leg())
    mixed = Instance(id=InstanceId("http://m:1"), alias="m")
    candidate = Candidate(rank=RankId(mixed.id, 0), instance=mixed)
    bench.observe(
        leg(),
        plan=RoutePlan(decode=Choice(candidate=candidate, cost_s=0), reason=Reason.AGGREGATED),
    )

    assert bench.value("kvlb_pd_decisions_total", way="local", reason="decode_has_cache") == 1
    assert bench.value("kvlb_pd_decisions_total", way="local", reason="aggregated") is None
    assert bench.value("kvlb_pd_estimated_seconds_total", way="local") is None


def test_first_token_is_timed_where_it_can_be_seen(bench: Bench) -> None:
    """An answer that isn't streamed has its first byte at the end."""
    bench.observe(leg(), leg("prefill"))
    bench.observe(leg(), stream=True, first_byte_s=10.75)

    name = "kvlb_time_to_first_token_seconds_count"
    assert bench.value(name, leg="decode", instance="a") == 1
    assert bench.value(name, leg="prefill", instance="a") == 1
    assert bench.value("kvlb_request_time_to_first_token_seconds_sum", model="base") == 0.75


def test_inter_token_time_is_known_of_streams_with_two_tokens(bench: Bench) -> None:
    """Seconds between the first and the last token, by the tokens between them."""
    bench.observe(leg(completion_tokens=5, ended_s=11.5), stream=True)
    bench.observe(leg(completion_tokens=5, ended_s=11.5))
    bench.observe(leg(completion_tokens=1, ended_s=11.5), stream=True)
    bench.observe(leg(completion_tokens=5, ended_s=11.5, error="stream_cut"), stream=True)

    name = "kvlb_inter_token_seconds"
    assert bench.value(f"{name}_count", leg="decode", instance="a") == 1
    assert bench.value(f"{name}_sum", leg="decode", instance="a") == 0.25


def test_delivered_is_what_the_first_leg_found(bench: Bench) -> None:
    """A decode engine counts what it was sent as cached; that was no hit."""
    bench.observe(
        leg("prefill", cached_tokens=16, prompt_tokens=64),
        leg("decode", cached_tokens=48, prompt_tokens=64),
    )
    bench.observe(leg("decode", cached_tokens=32, prompt_tokens=64))
    bench.observe(leg("decode", cached_tokens=None, prompt_tokens=64))

    assert bench.value("kvlb_delivered_tokens_total", model="base") == 48
    assert bench.value("kvlb_delivered_known_prompt_tokens_total", model="base") == 128


def test_prediction_is_held_against_what_the_engine_said(bench: Bench) -> None:
    """Too much predicted is counted; too little is no loss."""
    bench.observe(leg(overlap_tokens=64, cached_tokens=48, prompt_tokens=80))
    bench.observe(leg(overlap_tokens=16, cached_tokens=32, prompt_tokens=80))
    bench.observe(leg(overlap_tokens=None, cached_tokens=32, prompt_tokens=80))

    name = "kvlb_leg_{}_tokens_total"
    assert bench.value(name.format("predicted"), leg="decode", instance="a") == 80
    assert bench.value(name.format("overpredicted"), leg="decode", instance="a") == 16


def test_model_labels_are_those_of_the_fleet(bench: Bench) -> None:
    """Aliases count as their base model, adapters as themselves, anything else as other."""
    for model in ("alias", "ad", *(f"random-{number}" for number in range(100))):
        bench.observe(model=model)

    series = {
        sample.labels["model"]
        for metric in bench.registry.collect()
        if metric.name == "kvlb_requests"
        for sample in metric.samples
    }
    assert series == {"base", "ad", "other"}


def test_series_of_removed_instances_disappear(bench: Bench) -> None:
    """Also those of a leg that ends after its instance left."""
    bench.observe(leg(alias="a"), leg(alias="b"), stream=True)
    bench.fleet = Fleet(instances=(instance("a"),))
    bench.metrics.forget_absent(bench.fleet)
    bench.observe(leg(alias="b"), stream=True)

    text = generate_latest(bench.registry).decode()
    assert 'instance="a"' in text
    assert 'instance="b"' not in text
    assert 'instance="other"' in text


def test_series_of_models_that_nobody_serves_disappear(bench: Bench) -> None:
    """Adapters come and go under ever new names: all that counted them goes, the others' stay."""
    cards = [{"id": "base"}, *({"id": f"user-{n}", "parent": "base"} for n in range(60))]
    loaded = replace(instance("a"), models=parse_model_list({"data": cards}))
    asked = leg(prompt_tokens=100, cached_tokens=30, completion_tokens=5)
    tokens = {"prompt_tokens": 100, "available_tokens": 64, "chosen_tokens": 64}
    bench.observe(asked, stream=True, first_byte_s=11.0, **tokens)
    before = generate_latest(bench.registry).decode()
    bench.fleet = Fleet(instances=(loaded, instance("b")))
    for number in range(60):
        bench.observe(asked, model=f"user-{number}", stream=True, first_byte_s=11.0, **tokens)
    with_all = generate_latest(bench.registry).decode()
    bench.fleet = Fleet(instances=(instance("a"), instance("b")))
    bench.metrics.forget_absent(bench.fleet)

    after = generate_latest(bench.registry).decode()
    assert with_all.count('"user-') > 60 * 20
    assert "user-" not in after
    assert after.count('model="base"') == before.count('model="base"') > 20


def test_load_is_read_when_scraped(bench: Bench) -> None:
    """Gauges follow the ledger and the fleet."""
    rank = RankId(bench.fleet.instances[0].id, 0)
    work = LegWork(rank=rank, kind="whole", prompt_tokens=10, uncached_tokens=8, work_s=0.1)

    with bench.ledger.hold(work):
        assert bench.value("kvlb_instance_in_flight", instance="a", rank="0") == 1
        assert bench.value("kvlb_instance_queued_tokens", instance="a", rank="0") == 8

    assert bench.value("kvlb_instance_in_flight", instance="a", rank="0") == 0
    assert bench.value("kvlb_instance_healthy", instance="a", role="decode") == 1
    assert bench.value("kvlb_instance_available", instance="b", role="decode") == 1
    assert [
        bench.value("kvlb_model_instances", model=name) for name in ("base", "ad", "alias")
    ] == [
        2,
        2,
        None,
    ]


def test_lookups_are_counted_by_outcome(bench: Bench) -> None:
    """A lookup that was skipped took no time."""
    bench.metrics.on_lookup("ok", 0.001)
    bench.metrics.on_lookup("skipped", 0.0)

    assert bench.value("kvlb_index_lookups_total", outcome="ok") == 1
    assert bench.value("kvlb_index_lookups_total", outcome="skipped") == 1
    assert bench.value("kvlb_index_lookup_seconds_count") == 1


def test_ranks_that_only_the_index_knows_are_counted(bench: Bench) -> None:
    """Read from the router when scraped."""
    bench.unknown_ranks = 3

    assert bench.value("kvlb_index_unknown_ranks_total") == 3
    assert bench.value("kvlb_fleet_bugs_total") == 0


def usual(alias: str = "m0", **fields: Any) -> LegRecord:
    """The leg of a request that nobody streams and whose prompt nobody has read."""
    known: dict[str, Any] = {
        "overlap_tokens": None,
        "prompt_tokens": 100,
        "cached_tokens": 64,
        "completion_tokens": 7,
    }
    return leg("decode", alias, **(known | fields))


UNREAD: dict[str, Any] = {"unscorable": "not_asked", "reason": Reason.AGGREGATED}


def mixed(alias: str) -> Instance:
    return replace(instance(alias), role=Role.MIXED)


def test_most_usual_request_counts_everything_by_one_look(bench: Bench) -> None:
    """Ten series, the same that the long way counts, and no other."""
    bench.fleet = Fleet(instances=(mixed("m0"),))
    for _ in range(2):
        bench.observe(usual(), **UNREAD)

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


def test_instance_that_left_is_not_counted_by_its_name_any_more(bench: Bench) -> None:
    """What was looked up ends with the snapshot it was looked up for, and its series with it."""
    bench.fleet = Fleet(instances=(mixed("m0"), mixed("m1")))
    bench.observe(usual(), **UNREAD)
    bench.fleet = Fleet(instances=(mixed("m1"),))
    bench.metrics.forget_absent(bench.fleet)
    bench.observe(usual(), **UNREAD)

    assert bench.value("kvlb_legs_total", leg="decode", instance="m0", outcome="ok") is None
    assert bench.value("kvlb_legs_total", leg="decode", instance="other", outcome="ok") == 1


@pytest.mark.parametrize(
    ("legs", "fields"),
    [
        pytest.param([usual(), usual()], {}, id="two-legs"),
        pytest.param([usual(error="engine_closed")], {}, id="failed-leg"),
        pytest.param([usual(cached_tokens=None)], {}, id="no-usage"),
        pytest.param([usual(overlap_tokens=3)], {}, id="predicted"),
        pytest.param([usual()], {"stream": True}, id="streamed"),
        pytest.param([usual()], {"plan": None}, id="without-a-plan"),
        pytest.param([usual()], {"unscorable": None}, id="read"),
        pytest.param([usual()], {"error": "cancelled"}, id="failed"),
        pytest.param([usual()], {"status": None}, id="unanswered"),
        pytest.param([usual()], {"ended_s": None}, id="unended"),
    ],
)
def test_whatever_is_unusual_goes_the_long_way(
    bench: Bench, legs: list[LegRecord], fields: dict[str, Any]
) -> None:
    """One way or the other the request is counted, and its legs are."""
    bench.fleet = Fleet(instances=(mixed("m0"),))

    bench.observe(*legs, **(UNREAD | fields))

    named = bench.registry.collect()
    counted = {
        family.name: sum(sample.value for sample in family.samples if "_total" in sample.name)
        for family in named
    }
    assert counted["kvlb_requests"] == 1
    assert counted["kvlb_legs"] == len(legs)
