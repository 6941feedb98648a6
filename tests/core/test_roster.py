"""Who is a member: sources, removals, holds, names."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.core.fleet.roster import (
    MAX_RUNTIME_MEMBERS,
    Changes,
    Hold,
    Member,
    Origin,
    fingerprint,
    join_members,
    named_otherwise,
)
from balancer.core.fleet.snapshot import Role
from balancer.core.settings.control import InstanceSettings
from balancer.core.settings.errors import Secret
from indexer.core.types import InstanceId

A, B = InstanceId("http://a:1"), InstanceId("http://b:1")


def entry(url: str = A, **fields: Any) -> InstanceSettings:
    return InstanceSettings(url=url, **fields)


def ids(members: tuple[Member, ...]) -> list[str]:
    return [each.id for each in members]


def test_earlier_source_wins() -> None:
    """File, operator, registered, discovered; the later ones wait."""
    named = {
        Origin.DISCOVERED: (entry(alias="dns"), entry(B, alias="dns-b")),
        Origin.REGISTERED: (entry(alias="registered"),),
        Origin.FILE: (entry(alias="file"),),
    }

    members = join_members(named, Changes(added={A: entry(alias="added")}))
    without_file = join_members(
        {**named, Origin.FILE: ()}, Changes(added={A: entry(alias="added")})
    )

    assert [(each.settings.alias, each.origin) for each in members] == [
        ("file", Origin.FILE),
        ("dns-b", Origin.DISCOVERED),
    ]
    assert without_file[0].settings.alias == "added"


def test_names_of_this_machine_are_one_place() -> None:
    """A registered 127.0.0.1 is the file's localhost."""
    named = {
        Origin.FILE: (entry("http://localhost:1"),),
        Origin.REGISTERED: (entry("http://127.0.0.1:1"),),
    }

    assert ids(join_members(named, Changes())) == ["http://localhost:1"]


def test_removal_lasts_while_the_source_says_the_same() -> None:
    """Another alias or key is the same, another role isn't; no later source steps in."""
    changes = Changes(removed={A: fingerprint(entry())})
    renamed = entry(alias="new", api_key=Secret("k"))

    assert join_members({Origin.FILE: (entry(),)}, changes) == ()
    assert join_members({Origin.FILE: (renamed,)}, changes) == ()
    assert (
        join_members({Origin.FILE: (renamed,), Origin.DISCOVERED: (entry(ranks=2),)}, changes) == ()
    )
    assert ids(join_members({Origin.FILE: (entry(ranks=2),)}, changes)) == [A]


def test_operators_word_counts_after_a_removal() -> None:
    """Who is removed and added again, otherwise, is as it was added; the file's entry stays out."""
    again = entry(role=Role.DECODE)
    changes = Changes(added={A: again}, removed={A: fingerprint(entry())})

    (member,) = join_members({Origin.FILE: (entry(),)}, changes)

    assert (member.settings, member.origin) == (again, Origin.ADDED)


@pytest.mark.parametrize(
    ("now", "otherwise"),
    [
        pytest.param((entry(),), frozenset(), id="as-before"),
        pytest.param((entry(alias="x"),), frozenset(), id="another-name"),
        pytest.param((entry(ranks=2),), {A}, id="other-settings"),
        pytest.param((), {A}, id="not-named"),
        pytest.param((entry(), entry(B)), frozenset(), id="one-more"),
    ],
)
def test_source_that_changes_its_mind_ends_removals(
    now: tuple[InstanceSettings, ...], otherwise: set[str]
) -> None:
    """Only of what it had named."""
    assert named_otherwise((entry(),), now) == otherwise


def test_holds_have_an_order() -> None:
    """The operator's word is shown first; silence is of those that register."""
    named = {Origin.FILE: (entry(),), Origin.REGISTERED: (entry(B),)}
    both = frozenset({A, B})

    drained = join_members(named, Changes(drained=both, asleep=both), both)
    asleep = join_members(named, Changes(asleep=both), both)
    silent = join_members(named, Changes(), both)

    assert [each.hold for each in drained] == [Hold.DRAINED, Hold.DRAINED]
    assert [each.hold for each in asleep] == [Hold.ASLEEP, Hold.ASLEEP]
    assert [each.hold for each in silent] == [None, Hold.SILENT]


def test_alias_belongs_to_the_first() -> None:
    """The other gets one made of role and address."""
    named = {Origin.FILE: (entry(alias="x"),), Origin.DISCOVERED: (entry(B, alias="x"),)}

    first, second = join_members(named, Changes())

    assert first.settings.name == "x"
    assert second.settings.alias is None
    assert second.settings.name.startswith("mixed-")


def test_run_time_members_are_bounded() -> None:
    """The file's are not."""
    many = tuple(entry(f"http://h{number}:1") for number in range(MAX_RUNTIME_MEMBERS + 5))

    assert len(join_members({Origin.FILE: many}, Changes())) == len(many)
    assert len(join_members({Origin.DISCOVERED: many}, Changes())) == MAX_RUNTIME_MEMBERS


hosts = st.lists(st.sampled_from("abcdef"), max_size=4)


@given(hosts, hosts, hosts, hosts, st.frozensets(st.sampled_from("abcdef")))
def test_nobody_is_a_member_twice_and_nobody_is_lost(
    file: list[str], added: list[str], registered: list[str], found: list[str], out: frozenset[str]
) -> None:
    """Members are all that are named but those removed and not added, each once, under its own name."""

    def entries(names: list[str]) -> tuple[InstanceSettings, ...]:
        return tuple(entry(f"http://{name}:1", alias=name) for name in names)

    named = {
        Origin.FILE: entries(file),
        Origin.REGISTERED: entries(registered),
        Origin.DISCOVERED: entries(found),
    }
    changes = Changes(
        added={each.id: each for each in entries(added)},
        removed={each.id: fingerprint(each) for each in entries(sorted(out))},
    )

    members = join_members(named, changes)

    expected = (set(file) | set(registered) | set(found)) - out | set(added)
    assert sorted(ids(members)) == sorted(f"http://{name}:1" for name in expected)
    assert len({each.settings.name for each in members}) == len(members)
