"""Who encodes an item, and how long what was encoded may be counted on."""

import pytest

from balancer.core.fleet.snapshot import Instance, Role
from balancer.core.prompt.encoded_items import EncodedItems
from balancer.core.settings.encode import EncodeSettings
from indexer.core.types import InstanceId

SETTINGS = EncodeSettings(reuse_s=60, affinity_legs=2, remembered_items=3)


def encoder(number: int) -> Instance:
    return Instance(id=InstanceId(f"http://e{number}:1"), alias=f"e{number}", role=Role.ENCODE)


E0, E1, E2 = encoder(0), encoder(1), encoder(2)


def idle(_: Instance) -> int:
    return 0


def test_an_item_goes_where_it_was_seen_last() -> None:
    """The engine's own cache may spare the encoder."""
    items = EncodedItems(SETTINGS)
    items.put(b"cat", E1.id, "handle", 0)
    items.put(b"dog", E0.id, "handle", 0)

    chosen = items.choose(b"cat", [E0, E1, E2], idle)

    assert (chosen.instance, chosen.reason) == (E1, "affinity")


def test_affinity_ends_where_others_are_less_busy() -> None:
    """`affinity_legs` is how much more it may have than the least loaded."""
    items = EncodedItems(SETTINGS)
    items.put(b"cat", E1.id, None, 0)

    at_limit = items.choose(b"cat", [E0, E1], lambda each: 3 if each is E1 else 1)
    beyond = items.choose(b"cat", [E0, E1], lambda each: 4 if each is E1 else 1)

    assert (at_limit.instance, at_limit.reason) == (E1, "affinity")
    assert (beyond.instance, beyond.reason) == (E0, "least_loaded")


def test_equals_take_turns() -> None:
    """New items are spread although nobody is busy."""
    items = EncodedItems(SETTINGS)
    chosen = []
    for number in range(4):
        chosen.append(items.choose(b"new", [E0, E1], idle).instance)
        items.put(bytes([number]), E0.id, None, 0)

    assert chosen == [E0, E1, E0, E1]


def test_a_lone_instance_is_no_choice() -> None:
    """The reason says so."""
    chosen = EncodedItems(SETTINGS).choose(b"cat", [E2], idle)

    assert (chosen.instance, chosen.reason) == (E2, "only_one")


def test_an_encoding_is_counted_on_for_a_while() -> None:
    """`reuse_s` from when it was made."""
    items = EncodedItems(SETTINGS)
    items.put(b"cat", E0.id, "handle", 100)

    seen = items.usable(b"cat", [E0, E1], 159.9)

    assert seen is not None
    assert seen.encoding == "handle"
    assert items.usable(b"cat", [E0], 160) is None
    assert items.usable(b"dog", [E0], 101) is None


def test_what_serves_one_request_only_is_not_counted_on() -> None:
    """It is remembered for affinity alone."""
    items = EncodedItems(SETTINGS)
    items.put(b"cat", E0.id, None, 100)

    assert items.usable(b"cat", [E0], 100) is None


@pytest.mark.parametrize("how", ["unavailable", "restarted", "dropped"])
def test_an_encoding_ends_with_its_instance(how: str) -> None:
    """Gone, in another life, or found to be missing."""
    items = EncodedItems(SETTINGS)
    items.put(b"cat", E0.id, "handle", 100)
    available = [E1] if how == "unavailable" else [E0, E1]
    if how == "restarted":
        items.forget(E0.id)
    if how == "dropped":
        items.drop([b"cat", b"never seen"])

    assert items.usable(b"cat", available, 101) is None


def test_a_restarted_instance_serves_anew() -> None:
    """What it encodes after that counts."""
    items = EncodedItems(SETTINGS)
    items.forget(E0.id)
    items.put(b"cat", E0.id, "handle", 100)

    assert items.usable(b"cat", [E0], 101) is not None


def test_the_longest_unseen_item_is_forgotten_first() -> None:
    """Use counts as being seen."""
    items = EncodedItems(SETTINGS)
    for name in (b"a", b"b", b"c"):
        items.put(name, E0.id, "handle", 0)
    items.usable(b"a", [E0], 1)
    items.put(b"d", E0.id, "handle", 1)

    assert len(items) == 3
    assert items.usable(b"b", [E0], 1) is None
    assert items.usable(b"a", [E0], 1) is not None
