"""Which model a request means."""

from dataclasses import replace
from typing import Any

import pytest

from balancer.core.errors import BadRequestError, ModelNotFoundError, NoInstanceError
from balancer.core.fleet.model_lookup import MeantModel, find_model, nobody_answers
from balancer.core.fleet.snapshot import Fleet, Instance, Role
from indexer.core.model_cards import ServedModels
from indexer.core.types import InstanceId


def instance(name: str, base: str | None, *adapters: str, healthy: bool = True) -> Instance:
    models = base and ServedModels(
        base=base,
        aliases=frozenset({base, f"{base}-alias"}),
        adapters=frozenset(adapters),
        cards=(),
    )
    return Instance(
        id=InstanceId(f"http://{name}"), alias=name, models=models or None, healthy=healthy
    )


def fleet(*instances: Instance) -> Fleet:
    return Fleet(instances=instances)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("m", MeantModel(model="m", base_model="m", lora=None)),
        ("m-alias", MeantModel(model="m-alias", base_model="m", lora=None)),
        ("ad1", MeantModel(model="ad1", base_model="m", lora="ad1")),
        (None, MeantModel(model="m", base_model="m", lora=None)),
        ("", MeantModel(model="m", base_model="m", lora=None)),
    ],
)
def test_names_lead_to_their_base_model(name: Any, expected: MeantModel) -> None:
    """Base, alias, adapter, or none where there is only one (F59)."""
    assert find_model(fleet(instance("a", "m", "ad1"), instance("b", None)), name) == expected


def test_unknown_name_is_the_clients_fault() -> None:
    """404, however healthy the fleet is (F59)."""
    with pytest.raises(ModelNotFoundError):
        find_model(fleet(instance("a", "m"), instance("b", None)), "nope")


@pytest.mark.parametrize("name", [42, ["m"], {"a": 1}, True])
def test_name_of_a_wrong_type_is_refused(name: Any) -> None:
    """400, as an engine would say."""
    with pytest.raises(BadRequestError):
        find_model(fleet(instance("a", "m")), name)


def test_no_name_among_several_models_is_refused() -> None:
    """Nobody guesses."""
    with pytest.raises(BadRequestError):
        find_model(fleet(instance("a", "m"), instance("b", "n")), None)


@pytest.mark.parametrize("name", ["m", None])
@pytest.mark.parametrize("known", [fleet(), fleet(instance("a", None))])
def test_fleet_that_told_nothing_yet_is_503(known: Fleet, name: Any) -> None:
    """An engine that is still loading is no reason for 404."""
    with pytest.raises(NoInstanceError):
        find_model(known, name)


def test_model_of_a_dead_instance_is_known() -> None:
    """So that its requests become 503 and not 404 (F59)."""
    assert find_model(fleet(instance("a", "m", healthy=False)), "m").base_model == "m"


def test_living_instance_decides_what_a_shared_name_means() -> None:
    """A dead one may be from before a change."""
    dead = instance("a", "m", "x", healthy=False)
    living = instance("b", "n", "x")

    assert find_model(fleet(dead, living), "x").base_model == "n"


@pytest.mark.parametrize(
    ("decode", "words"),
    [
        pytest.param(instance("d", "m"), "load it on one that answers", id="without-it"),
        pytest.param(instance("d", "m", "ad1"), "is available", id="down"),
        pytest.param(instance("d", None), "is available", id="unknown"),
    ],
)
def test_who_would_have_to_load_a_model_is_told(decode: Instance, words: str) -> None:
    """A prefill instance that has it answers no client."""
    prefill = replace(instance("p", "m", "ad1"), role=Role.PREFILL)

    error = nobody_answers(fleet(prefill, replace(decode, role=Role.DECODE)), "ad1")

    assert isinstance(error, NoInstanceError)
    assert words in error.message
