"""Series follow the fleet: its models, its instances, their load."""

from dataclasses import replace
from typing import Any

from prometheus_client import generate_latest

from balancer.core.fleet.snapshot import Fleet
from balancer.core.load.ledger import LegWork
from indexer.core.model_cards import parse_model_list
from indexer.core.types import RankId


def test_model_labels_are_those_of_the_fleet(bench: Any) -> None:
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


def test_series_of_removed_instances_disappear(bench: Any) -> None:
    """Also those of a leg that ends after its instance left."""
    bench.observe(bench.leg(alias="a"), bench.leg(alias="b"), stream=True)
    bench.serve("a")
    bench.metrics.forget_absent(bench.fleet)
    bench.observe(bench.leg(alias="b"), stream=True)

    text = generate_latest(bench.registry).decode()
    assert 'instance="a"' in text
    assert 'instance="b"' not in text
    assert 'instance="other"' in text


def test_series_of_models_that_nobody_serves_disappear(bench: Any) -> None:
    """Adapters come and go under ever new names: all that counted them goes, the others' stay."""
    cards = [{"id": "base"}, *({"id": f"user-{n}", "parent": "base"} for n in range(60))]
    first, second = bench.fleet.instances
    loaded = replace(first, models=parse_model_list({"data": cards}))
    asked = bench.leg(prompt_tokens=100, cached_tokens=30, completion_tokens=5)
    tokens = {"prompt_tokens": 100, "available_tokens": 64, "chosen_tokens": 64}
    bench.observe(asked, stream=True, first_byte_s=11.0, **tokens)
    before = generate_latest(bench.registry).decode()
    bench.fleet = Fleet(instances=(loaded, second))
    for number in range(60):
        bench.observe(asked, model=f"user-{number}", stream=True, first_byte_s=11.0, **tokens)
    with_all = generate_latest(bench.registry).decode()
    bench.serve("a", "b")
    bench.metrics.forget_absent(bench.fleet)

    after = generate_latest(bench.registry).decode()
    assert with_all.count('"user-') > 60 * 20
    assert "user-" not in after
    assert after.count('model="base"') == before.count('model="base"') > 20


def test_load_is_read_when_scraped(bench: Any) -> None:
    """Gauges follow the ledger and the fleet."""
    rank = RankId(bench.fleet.instances[0].id, 0)
    work = LegWork(rank=rank, kind="whole", prompt_tokens=10, uncached_tokens=8, work_s=0.1)

    with bench.ledger.hold(work):
        assert bench.value("kvlb_instance_in_flight", instance="a", rank="0") == 1
        assert bench.value("kvlb_instance_queued_tokens", instance="a", rank="0") == 8

    assert bench.value("kvlb_instance_in_flight", instance="a", rank="0") == 0
    assert bench.value("kvlb_instance_healthy", instance="a", role="decode") == 1
    assert bench.value("kvlb_instance_available", instance="b", role="decode") == 1
    served = [bench.value("kvlb_model_instances", model=name) for name in ("base", "ad", "alias")]
    assert served == [2, 2, None]


def test_lookups_are_counted_by_outcome(bench: Any) -> None:
    """A lookup that was skipped took no time."""
    bench.metrics.on_lookup("ok", 0.001)
    bench.metrics.on_lookup("skipped", 0.0)

    assert bench.value("kvlb_index_lookups_total", outcome="ok") == 1
    assert bench.value("kvlb_index_lookups_total", outcome="skipped") == 1
    assert bench.value("kvlb_index_lookup_seconds_count") == 1


def test_ranks_that_only_the_index_knows_are_counted(bench: Any) -> None:
    """Read from the router when scraped."""
    bench.unknown_ranks = 3
    bench.silent_ranks = 2

    assert bench.value("kvlb_index_silent_ranks") == 2
    assert bench.value("kvlb_index_unknown_ranks_total") == 3
    assert bench.value("kvlb_fleet_bugs_total") == 0
