"""The fleet as clients and operators see it."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.core.fleet.snapshot import Fleet, Instance, Role
from balancer.core.fleet.view import (
    example_status,
    merge_models,
    readiness,
    render_instance,
    unavailable_reason,
)
from balancer.core.load.local_ledger import LocalLedger
from indexer.core.model_cards import parse_model_list
from indexer.core.types import InstanceId, RankId, Trust


def instance(alias: str, *adapters: str, **fields: Any) -> Instance:
    """A healthy instance of model `base` with adapters."""
    cards = [{"id": "base", "max_model_len": 2048, "of": alias}]
    cards += [{"id": name, "parent": "base"} for name in adapters]
    made = Instance(
        id=InstanceId(f"http://{alias}:1"),
        alias=alias,
        healthy=True,
        models=parse_model_list({"data": cards}),
    )
    return replace(made, **fields)


def test_each_role_has_its_count() -> None:
    """An encode instance is no prefill instance; a mixed one answers as a decode instance does."""
    roles = (Role.ENCODE, Role.PREFILL, Role.DECODE, Role.MIXED)
    fleet = Fleet(instances=tuple(instance(each.value, role=each) for each in roles))

    assert example_status(fleet) == {
        "prefill_node_count": 1,
        "decode_node_count": 2,
        "encode_node_count": 1,
        "prefill_nodes": ["prefill:1"],
        "decode_nodes": ["decode:1", "mixed:1"],
        "encode_nodes": ["encode:1"],
    }


def test_models_are_a_union_without_duplicates() -> None:
    """Each name once, the first instance's fields kept, the down instance ignored."""
    fleet = Fleet(
        instances=(
            instance("down", "only-there", healthy=False),
            instance("a", "one"),
            instance("b", "one", "two"),
        )
    )

    merged = merge_models(fleet)

    assert [card["id"] for card in merged] == ["base", "one", "two"]
    assert merged[0] == {"id": "base", "max_model_len": 2048, "of": "a"}


def test_models_that_nobody_answers_for_are_not_listed() -> None:
    """An adapter on a prefill instance alone can't be asked for."""
    fleet = Fleet(
        instances=(
            instance("p", "there", "both", role=Role.PREFILL),
            instance("d", "here", "both", role=Role.DECODE),
        )
    )

    assert [card["id"] for card in merge_models(fleet)] == ["base", "here", "both"]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        pytest.param({}, None, id="available"),
        pytest.param({"enabled": False}, "disabled", id="disabled"),
        pytest.param({"draining": True}, "draining", id="draining"),
        pytest.param(
            {"healthy": False, "unhealthy_reason": "unauthorized"}, "unauthorized", id="unhealthy"
        ),
        pytest.param({"models": None}, "models_unknown", id="no-models"),
    ],
)
def test_instance_says_why_it_gets_no_requests(fields: dict[str, Any], reason: str | None) -> None:
    """The first thing an operator asks."""
    assert unavailable_reason(instance("a", **fields)) == reason


def test_ready_needs_an_instance_that_answers() -> None:
    """Prefill instances alone answer nobody."""
    prefill = instance("p0", role=Role.PREFILL)
    down = instance("d0", role=Role.DECODE, healthy=False, unhealthy_reason="probe_timeout")

    assert readiness(Fleet()) == (False, ["no instance is configured"])
    assert readiness(Fleet(instances=(prefill,)))[0] is False
    encode = instance("e0", role=Role.ENCODE)
    assert "decode or mixed" in readiness(Fleet(instances=(prefill, encode)))[1][0]
    assert readiness(Fleet(instances=(prefill, down))) == (False, ["d0: probe_timeout"])
    assert readiness(Fleet(instances=(instance("a"), down))) == (True, ["d0: probe_timeout"])


def test_instance_is_shown_with_its_ranks() -> None:
    """Load is ours, cache knowledge the indexer's."""
    shown = instance("a", "one", ranks=(0, 1))
    ledger = LocalLedger(clock=lambda: 0.0)
    facts = {RankId(shown.id, 1): {"trust": "exact"}}

    view = render_instance(shown, ledger, facts, lambda _: (Trust.EXACT, None))

    assert view["models"] == {"base": "base", "aliases": [], "adapters": ["one"]}
    assert [each["index"] for each in view["ranks"]] == [None, {"trust": "exact"}]
    assert view["ranks"][0]["load"]["requests"] == 0
    assert [each["trust"] for each in view["ranks"]] == ["exact", "exact"]


def test_instance_without_models_is_shown() -> None:
    """It may not have answered yet."""
    view = render_instance(
        instance("a", models=None),
        LocalLedger(clock=lambda: 0.0),
        {},
        lambda _: (Trust.LOAD_ONLY, None),
    )

    assert view["models"] is None


@given(st.lists(st.tuples(st.booleans(), st.lists(st.sampled_from("xyz"), max_size=3))))
def test_merged_models_are_those_of_available_instances(
    shape: list[tuple[bool, list[str]]],
) -> None:
    """Law: a name is listed exactly if an available instance serves it."""
    instances = tuple(
        instance(f"i{number}", *adapters, healthy=healthy)
        for number, (healthy, adapters) in enumerate(shape)
    )

    names = [card["id"] for card in merge_models(Fleet(instances=instances))]

    assert len(names) == len(set(names))
    assert set(names) == {
        name
        for each in instances
        if each.is_available and each.models
        for name in each.models.aliases | each.models.adapters
    }
