"""What a name stands for, lookup after lookup."""

import pytest

from kvlb.names.places import MISSING_AFTER, NamedPlaces

A, B, C = "10.0.0.1", "10.0.0.2", "fd00::1"


def test_list_is_whole() -> None:
    """Nothing is kept from before."""
    places = NamedPlaces()

    places.found(frozenset({B, A}))
    places.found(frozenset({C}))

    assert places.addresses == (C,)


@pytest.mark.parametrize(
    ("lookups", "moves"),
    [
        pytest.param([{A}, {A}], [False, False], id="same"),
        pytest.param([{A}, {B}, {A}], [False, True, True], id="another-and-back"),
        pytest.param([{A}, {A, B}, {B}], [False, False, True], id="both-for-a-while"),
        pytest.param([{A, B}, {B}, {A, B}], [False, False, False], id="one-less-one-more"),
    ],
)
def test_name_moves_when_nobody_is_left_of_before(
    lookups: list[set[str]], moves: list[bool]
) -> None:
    """Who may be connected to counts, not what was listed last."""
    places = NamedPlaces()

    assert [places.found(frozenset(each)) for each in lookups] == moves


def test_unknown_name_stands_for_nothing_after_some_answers() -> None:
    """One may be a resolver's fault; and a name that is back hasn't moved by that."""
    places = NamedPlaces()
    places.found(frozenset({A}))

    for _ in range(MISSING_AFTER - 1):
        places.unknown()
    kept = places.addresses
    places.found(frozenset({A}))
    for _ in range(MISSING_AFTER):
        places.unknown()

    assert kept == (A,)
    assert places.addresses == ()
    assert not places.found(frozenset({A}))
    assert places.found(frozenset({B}))
