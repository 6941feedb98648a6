"""The fleet snapshot: who is available, and how a rank is addressed."""

import pytest

from balancer.core.fleet.snapshot import Fleet, Instance, Role
from indexer.core.model_cards import ServedModels
from indexer.core.types import InstanceId, RankId

MODELS = ServedModels(
    base="m", aliases=frozenset({"m", "alias"}), adapters=frozenset({"lora"}), cards=()
)


def instance(
    *,
    healthy: bool = True,
    enabled: bool = True,
    draining: bool = False,
    models: ServedModels | None = MODELS,
    ranks: tuple[int, ...] = (0,),
    rank_base: int = 0,
) -> Instance:
    return Instance(
        id=InstanceId("http://e0:8000"),
        alias="e0",
        healthy=healthy,
        enabled=enabled,
        draining=draining,
        models=models,
        ranks=ranks,
        rank_base=rank_base,
    )


@pytest.mark.parametrize(
    ("candidate", "available"),
    [
        pytest.param(instance(), True, id="ready"),
        pytest.param(instance(healthy=False), False, id="unhealthy"),
        pytest.param(instance(enabled=False), False, id="disabled"),
        pytest.param(instance(draining=True), False, id="draining"),
        pytest.param(instance(models=None), False, id="models-unknown"),
    ],
)
def test_available_needs_everything(candidate: Instance, available: bool) -> None:
    """Healthy, enabled, not draining, and its models known."""
    assert candidate.is_available is available


def test_a_lone_rank_needs_no_header() -> None:
    """Engines without data parallelism may refuse it."""
    assert instance().rank_header(0) is None


def test_a_rank_is_addressed_by_its_local_number() -> None:
    """Events name global rank 5; its instance begins at 4."""
    pair = instance(ranks=(4, 5), rank_base=4)

    assert [pair.rank_header(rank) for rank in pair.ranks] == ["0", "1"]
    assert list(pair.rank_ids()) == [RankId(pair.id, 4), RankId(pair.id, 5)]


def test_prefill_instances_answer_nobody() -> None:
    """They fill caches."""
    assert [role for role in Role if role.answers_clients] == [Role.DECODE, Role.MIXED]


@pytest.mark.parametrize(("name", "count"), [("m", 1), ("alias", 1), ("lora", 1), ("x", 0)])
def test_a_model_is_served_under_any_of_its_names(name: str, count: int) -> None:
    """Unavailable instances count, those whose models are unknown don't."""
    fleet = Fleet(instances=(instance(healthy=False), instance(models=None)))

    assert len(fleet.serving(name)) == count


def test_an_instance_is_found_by_its_address() -> None:
    """None if it isn't there."""
    fleet = Fleet(instances=(instance(),))

    assert fleet.by_id(InstanceId("http://e0:8000")) is fleet.instances[0]
    assert fleet.by_id(InstanceId("http://e1:8000")) is None
