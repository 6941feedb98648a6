"""Slots of a Redis Cluster."""

from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from indexer.redis_index.cluster import SlotTable, slot_of
from indexer.redis_index.lane import Address

A, B = Address("a", 1), Address("b", 2)
ANSWER = [[100, 200, [b"b", 2, b"id"], [b"c", 3, b"id"]], [0, 98, [b"a", 1, b"id"]]]


@given(st.text(alphabet="ab{}:é", max_size=12))
def test_slot_is_what_the_client_library_says(key: str) -> None:
    """With braces or without."""
    assert slot_of(key) == key_slot(key.encode())


def test_node_is_the_primary_whose_range_has_the_slot() -> None:
    """Ranges in any order, with holes."""
    table = SlotTable(ANSWER)

    found = [table.node(slot) for slot in (0, 98, 99, 100, 200, 201)]
    assert found == [A, A, None, B, B, None]
    assert table.nodes == {A, B}


def test_server_that_is_no_cluster_has_no_table() -> None:
    """All is asked for where the URL points."""
    assert SlotTable().node(5) is None


def test_node_without_a_name_is_the_one_that_was_asked() -> None:
    """A cluster that doesn't know its own address yet."""
    table = SlotTable([[0, 16383, [None, 7, b"id"]], [16384, 16384, [b"?", 8, b"id"]]], A)

    assert table.node(5) == Address("a", 7)
    assert table.node(16384) == Address("a", 8)
