"""Engines that share blocks must hash them alike: what tells that they share, and what to change."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from balancer.core.settings.transfer import ChildSettings, OffloadingSettings
from kvlb.doctor.core import fleet_checks
from kvlb.doctor.core.examination import examine
from kvlb.doctor.core.exposition import EngineMetrics
from kvlb.doctor.core.facts import FleetFacts, InstanceFacts

MakeEngine = Callable[..., InstanceFacts]
MakeFleet = Callable[..., FleetFacts]
PEERS = OffloadingSettings(p2p_host="10.0.0.1")


def hashed(value: int, **metrics: Any) -> dict[str, Any]:
    """Facts of an engine that gave its first block this hash."""
    known = {"block_size": 16, "has_prefix_caching": True, "hash_algorithm": "xxhash"}
    return {"stream": {"first_hash": value}, "metrics": EngineMetrics(**{**known, **metrics})}


def test_unseeded_hashes_matter_where_blocks_are_shared(
    engine: MakeEngine, second: MakeEngine, fleet: MakeFleet
) -> None:
    """Another hash for the same block: nothing to us nor to who shares nothing, everything to a shared tier."""
    tier = "kv_offloading_size=4.0"
    one, other = engine(**hashed(1)), second(**hashed(2))
    shared = engine(**hashed(1, offload=tier))
    (finding,) = examine(fleet(shared, second(**hashed(2, offload=tier))))

    assert (finding.name, finding.instance) == ("hash_seed_differs", "m0, m1")
    assert "PYTHONHASHSEED" in finding.change
    assert "xxhash" in finding.change
    assert examine(fleet(one, other)) == []
    assert examine(fleet(shared, other)) == []
    assert examine(fleet(shared, second(**hashed(1, offload=tier)))) == []


def test_ranks_of_one_engine_draw_seeds_of_their_own(engine: MakeEngine, fleet: MakeFleet) -> None:
    """Each is a process: the first one's hash doesn't speak for the others."""
    one = engine(**hashed(1, offload="kv_offloading_size=4.0"))
    ranks = [replace(one.streams[0], rank=rank, first_hash=1 + rank) for rank in range(2)]
    (finding,) = fleet_checks.hash_seed_differs(fleet(replace(one, streams=ranks)))

    assert (finding.instance, finding.seen[:8]) == ("m0", "2 hashes")


def test_shared_tier_is_seen_by_its_events(
    engine: MakeEngine, second: MakeEngine, fleet: MakeFleet
) -> None:
    """Blocks on the CPU say so."""
    tiers = frozenset({"gpu", "cpu"})
    one = engine(stream={"first_hash": 1, "tiers": tiers}, metrics=hashed(1)["metrics"])
    tiered = second(stream={"first_hash": 2, "tiers": tiers})
    (finding,) = fleet_checks.hash_seed_differs(fleet(one, tiered))

    assert "events of tier cpu" in finding.seen
    assert "same --prefix-caching-hash-algo" in finding.change


@pytest.mark.parametrize(
    ("connector", "transfer", "seen"),
    [
        ("offloading", None, "`connector: offloading`"),
        ("offloading", PEERS, "transfer.p2p_host: 10.0.0.1"),
        ("multi", ChildSettings(children={"offloading": None}), "child `offloading`"),
        (
            "multi",
            ChildSettings(children={"nixl": None, "offloading": PEERS}),
            "transfer.children.offloading.p2p_host: 10.0.0.1",
        ),
    ],
    ids=["storage", "peers", "child-storage", "child-peers"],
)
def test_shared_tier_is_told_by_the_connector(
    connector: str,
    transfer: OffloadingSettings | ChildSettings | None,
    seen: str,
    engine: MakeEngine,
    second: MakeEngine,
    fleet: MakeFleet,
) -> None:
    """Peers read each other's blocks by name, or meet in a storage: no metric need say so."""
    told = {"connector": connector, "transfer": transfer}
    one, other = engine(told=told, **hashed(1)), second(told=told, **hashed(2))
    (finding,) = fleet_checks.hash_seed_differs(fleet(one, other))

    assert seen in finding.seen


def test_children_without_a_tier_share_nothing(
    engine: MakeEngine, second: MakeEngine, fleet: MakeFleet
) -> None:
    """They hand over what a request names."""
    children = {"connector": "multi", "transfer": ChildSettings(children={"nixl": None})}
    one = engine(told=children, **hashed(1))

    other = second(told=children, **hashed(2))
    assert list(fleet_checks.hash_seed_differs(fleet(one, other))) == []


def test_old_sha256_is_told_of_its_seed(
    engine: MakeEngine, second: MakeEngine, fleet: MakeFleet
) -> None:
    """Up to 0.28 it was random, too."""
    one = engine(**hashed(1, hash_algorithm="sha256", offload="x"))
    other = second(**hashed(2, hash_algorithm="sha256", offload="x"))
    (finding,) = fleet_checks.hash_seed_differs(fleet(one, other))

    assert "sha256 up to vLLM 0.28" in finding.change


def test_rank_that_has_stored_nothing_says_nothing(
    engine: MakeEngine, second: MakeEngine, fleet: MakeFleet
) -> None:
    """Of a sharing engine that nobody has asked yet there is no hash to compare."""
    tier = {"offload": "kv_offloading_size=4.0"}
    silent = engine(**{**hashed(1, **tier), "stream": {"first_hash": None}})

    assert list(fleet_checks.hash_seed_differs(fleet(silent, second(**hashed(2, **tier))))) == []
