"""Connectors that are found by name, that can't be, and pairs that don't fit."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from balancer.connectors.available import connector_conflicts, connector_fault, connectors
from balancer.core.fleet.snapshot import Instance, Role
from balancer.core.settings.transfer import MoriioSettings, read_transfer

InstanceOf = Callable[..., Instance]


def test_connectors_are_found_by_their_name() -> None:
    """The name in the configuration is the connector's own."""
    known = connectors()

    assert {name: each.name for name, each in known.items()} == {name: name for name in known}
    assert sorted(known) == [
        "example",
        "lmcache",
        "mooncake",
        "moriio",
        "multi",
        "nixl",
        "nixl_push",
        "none",
        "offloading",
        "p2p_nccl",
    ]


@pytest.mark.parametrize(
    ("name", "transfer", "words"),
    [
        pytest.param("nixll", {}, "connector`: no connector `nixll`; did you mean", id="unknown"),
        pytest.param(
            "multi",
            {"children": {"nixl": {}, "nixl_push": {}}},
            "transfer.children`: 'nixl' and 'nixl_push' both use `do_remote_decode`",
            id="clash",
        ),
        pytest.param(
            "multi",
            {"children": {"nixl": {}, "ofloading": {}}},
            "transfer.children`: no connector `ofloading`; did you mean `offloading`?",
            id="unknown-child",
        ),
    ],
)
def test_a_connector_that_cant_be_is_told_by_its_key(
    name: str, transfer: dict[str, Any], words: str, instance: InstanceOf
) -> None:
    """At start, beginning with the key at fault."""
    told = connector_fault(
        replace(instance("p0", Role.PREFILL, name), transfer=read_transfer(name, transfer))
    )

    assert told is not None
    assert words in told


def test_ranks_that_an_id_cant_name_are_refused_by_name(instance: InstanceOf) -> None:
    """Blocks of any rank but the first would be waited for in vain."""
    ranked = replace(instance("p0", Role.PREFILL, "p2p_nccl"), ranks=(0, 1))
    target = replace(instance("d0", Role.DECODE, "p2p_nccl"), models=ranked.models)

    told = connector_fault(ranked)
    assert told is not None
    assert told.startswith("ranks`: connector `p2p_nccl`")
    assert connector_fault(replace(ranked, connector="nixl")) is None
    (seen,) = connector_conflicts([ranked, target])
    assert "p0 has 2 ranks" in seen
    assert connector_conflicts([replace(ranked, ranks=(0,)), target]) == []


@pytest.mark.parametrize(
    ("name", "transfer"),
    [
        ("nixl", {}),
        ("none", {}),
        ("multi", {"children": {"nixl": {}, "offloading": {}, "lmcache": {}}}),
    ],
)
def test_a_connector_that_can_be(name: str, transfer: dict[str, Any], instance: InstanceOf) -> None:
    """Children of different protocols share an engine."""
    settings = read_transfer(name, transfer)

    assert connector_fault(replace(instance("p", Role.PREFILL, name), transfer=settings)) is None


def test_a_mismatch_of_settings_is_a_conflict_by_name(instance: InstanceOf) -> None:
    """Both have the connector, but one would write and the other wait to read."""
    writes = replace(instance("p0", Role.PREFILL, "moriio"), transfer=MoriioSettings(mode="WRITE"))
    reads = replace(instance("d0", Role.DECODE, "moriio"), transfer=MoriioSettings(mode="READ"))
    other = replace(instance("d1", Role.DECODE, "moriio", "other"), transfer=reads.transfer)
    strange = instance("d2", Role.DECODE, "unheard-of")

    conflicts = connector_conflicts([writes, reads, other, instance("p1", Role.PREFILL, "x")])

    (told,) = [each for each in conflicts if "mode" in each]
    assert told == (
        "prefill instance p0 and decode instance d0 both use connector 'moriio', but one runs in "
        "mode WRITE, one in READ"
    )
    assert len(connector_conflicts([writes, strange])) == 1


def test_a_pair_with_different_connectors_is_a_conflict(instance: InstanceOf) -> None:
    """The sentence names both instances and both connectors."""
    conflicts = connector_conflicts(
        [instance("p0", Role.PREFILL), instance("d0", Role.DECODE, "none")]
    )

    assert len(conflicts) == 1
    assert all(word in conflicts[0] for word in ("p0", "'nixl'", "d0", "'none'"))


@pytest.mark.parametrize(
    "fleet",
    [
        pytest.param(
            [("p0", Role.PREFILL, "nixl", "m"), ("d0", Role.DECODE, "nixl", "m")], id="fit"
        ),
        pytest.param(
            [
                ("p0", Role.PREFILL, "nixl", "m"),
                ("d0", Role.DECODE, "nixl", "m"),
                ("d1", Role.DECODE, "none", "other"),
            ],
            id="another-model",
        ),
        pytest.param(
            [
                ("p0", Role.PREFILL, "nixl", None),
                ("d0", Role.DECODE, "nixl", None),
                ("d1", Role.DECODE, "none", None),
            ],
            id="models-unknown-but-one-fits",
        ),
        pytest.param(
            [
                ("p0", Role.PREFILL, "nixl", "m"),
                ("d0", Role.DECODE, "nixl", "m"),
                ("p1", Role.PREFILL, "mooncake", "m"),
                ("d1", Role.DECODE, "mooncake", "m"),
            ],
            id="two-whole-pairs",
        ),
        pytest.param(
            [("p0", Role.PREFILL, "nixl", "m"), ("e0", Role.MIXED, "none", "m")], id="mixed"
        ),
    ],
)
def test_fleets_without_a_conflict(
    fleet: list[tuple[str, Role, str, str | None]], instance: InstanceOf
) -> None:
    """Nothing is refused that may be right."""
    assert connector_conflicts([instance(*each) for each in fleet]) == []


def test_a_prefill_instance_that_fits_nobody_is_a_conflict_before_models_are_known(
    instance: InstanceOf,
) -> None:
    """At configuration time there is nothing else to go by."""
    conflicts = connector_conflicts(
        [
            instance("p0", Role.PREFILL, "nixl", None),
            instance("d0", Role.DECODE, "none", None),
        ]
    )

    assert len(conflicts) == 1


@pytest.mark.parametrize(
    ("connectors_of", "pairs"),
    [
        pytest.param(
            {"p0": "nixl", "p1": "mooncake", "d0": "nixl"}, [("p1", "d0")], id="no-decode"
        ),
        pytest.param({"p0": "nixl", "d0": "nixl", "d1": "none"}, [("p0", "d1")], id="no-prefill"),
        pytest.param(
            {"p0": "nixl", "p1": "nixl", "d0": "none", "d1": "none"},
            [("p0", "d0"), ("p1", "d0"), ("p0", "d1")],
            id="nobody-fits",
        ),
    ],
)
def test_only_who_has_no_partner_is_a_conflict(
    connectors_of: dict[str, str], pairs: list[tuple[str, str]], instance: InstanceOf
) -> None:
    """Each once, with one that it could be made to fit."""
    roles = {"p": Role.PREFILL, "d": Role.DECODE}
    told = connector_conflicts(
        [instance(name, roles[name[0]], connector) for name, connector in connectors_of.items()]
    )

    assert len(told) == len(pairs)
    assert [
        all(name in sentence for name in pair) for sentence, pair in zip(told, pairs, strict=True)
    ] == [True] * len(pairs)
