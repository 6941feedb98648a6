"""Event batches, byte for byte as released vLLM versions encode them."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.core.settings import parse_version
from simulator.core.types import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from simulator.core.wire import EventEncoder, Oddities

HASH = bytes.fromhex("1122334455667788")


def stored(**changes: Any) -> BlockStored:
    fields: dict[str, Any] = {
        "hashes": (HASH,),
        "parent": None,
        "token_ids": [10, 11],
        "block_size": 2,
        "extra_keys": (None,),
    }
    return BlockStored(**(fields | changes))


EVENTS: list[KvEvent] = [stored(), BlockRemoved(HASH), AllBlocksCleared()]

MAP = (
    "93cb3ff8000000000000938ba474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391cf11"
    "22334455667788b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473920a0baa626c6f636b"
    "5f73697a6502a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa65787472615f6b"
    "65797391c0a967726f75705f69647800b26b765f63616368655f737065635f6b696e64ae66756c6c5f61747465"
    "6e74696f6e84a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391cf112233445566"
    "7788a66d656469756da3475055a967726f75705f6964780081a474797065b0416c6c426c6f636b73436c656172"
    "656400"
)


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        pytest.param(
            "0.10.2",
            "93cb3ff80000000000009397ab426c6f636b53746f72656491cf1122334455667788c0920a0b02c0a3475055"
            "93ac426c6f636b52656d6f76656491cf1122334455667788a347505591b0416c6c426c6f636b73436c656172"
            "656400",
            id="0.10.2-to-0.13",
        ),
        pytest.param(
            "0.16",
            "93cb3ff80000000000009398ab426c6f636b53746f72656491cf1122334455667788c0920a0b02c0a3475055"
            "c093ac426c6f636b52656d6f76656491cf1122334455667788a347505591b0416c6c426c6f636b73436c6561"
            "72656400",
            id="0.14-to-0.16",
        ),
        pytest.param(
            "0.19",
            "93cb3ff80000000000009399ab426c6f636b53746f72656491cf1122334455667788c0920a0b02c0a3475055"
            "c091c093ac426c6f636b52656d6f76656491cf1122334455667788a347505591b0416c6c426c6f636b73436c"
            "656172656400",
            id="0.17-to-0.19",
        ),
        pytest.param(
            "0.21",
            "93cb3ff8000000000000939aab426c6f636b53746f72656491cf1122334455667788c0920a0b02c0a3475055"
            "c091c00094ac426c6f636b52656d6f76656491cf1122334455667788a34750550091b0416c6c426c6f636b73"
            "436c656172656400",
            id="0.20-to-0.21",
        ),
        pytest.param(
            "0.23",
            "93cb3ff8000000000000939cab426c6f636b53746f72656491cf1122334455667788c0920a0b02c0a3475055"
            "c091c000ae66756c6c5f617474656e74696f6ec094ac426c6f636b52656d6f76656491cf1122334455667788"
            "a34750550091b0416c6c426c6f636b73436c656172656400",
            id="0.22-to-0.23",
        ),
        pytest.param("0.24", MAP, id="0.24"),
        pytest.param("0.32", MAP, id="0.32"),
        pytest.param("0.33", MAP.replace("938ba4", "93de000ba4", 1), id="0.33"),
    ],
)
def test_batch_is_encoded_as_the_release_does(version: str, expected: str) -> None:
    """The bytes are those that vLLM's own structures gave."""
    encoder = EventEncoder(parse_version(version))

    assert encoder.encode_batch(EVENTS, unix_s=1.5, rank=0).hex() == expected


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        pytest.param(
            "0.9.0",
            "92cb3ff80000000000009396ab426c6f636b53746f7265649207f8c0940102030402c092ac426c6f636b5265"
            "6d6f766564910791b0416c6c426c6f636b73436c6561726564",
            id="0.9.0-without-rank",
        ),
        pytest.param(
            "0.9.1",
            "93cb3ff80000000000009396ab426c6f636b53746f7265649207f8c0940102030402c092ac426c6f636b5265"
            "6d6f766564910791b0416c6c426c6f636b73436c656172656400",
            id="0.9.1-to-0.10.1",
        ),
    ],
)
def test_old_releases_send_signed_hashes(version: str, expected: str) -> None:
    """Up to 0.10.1 a hash is a signed number."""
    seven, minus_eight = (7).to_bytes(8, "big"), (-8).to_bytes(8, "big", signed=True)
    events: list[KvEvent] = [
        stored(hashes=(seven, minus_eight), token_ids=[1, 2, 3, 4], extra_keys=(None, None)),
        BlockRemoved(seven),
        AllBlocksCleared(),
    ]
    encoder = EventEncoder(parse_version(version))

    assert encoder.encode_batch(events, unix_s=1.5, rank=0).hex() == expected


def decode_first(payload: bytes) -> Any:
    return msgspec.msgpack.decode(payload)[1][0]


def test_hashes_go_out_as_bytes_on_request() -> None:
    """`int_hashes` False sends the digest itself."""
    encoder = EventEncoder((0, 33, 0), int_hashes=False)
    event = decode_first(encoder.encode_batch([stored(parent=b"p" * 32)], unix_s=1.0, rank=0))

    assert event["block_hashes"] == [HASH]
    assert event["parent_block_hash"] == b"p" * 32


def test_adapter_and_salt_are_named() -> None:
    """The adapter is a field and an extra key, the salt is an extra key of the first block."""
    encoder = EventEncoder((0, 33, 0))
    event = stored(lora_id=2, lora_name="sql", extra_keys=(("sql", "salt"),))

    sent = decode_first(encoder.encode_batch([event], unix_s=1.0, rank=0))

    assert (sent["lora_id"], sent["lora_name"]) == (2, "sql")
    assert sent["extra_keys"] == [["sql", "salt"]]


@pytest.mark.parametrize(
    ("version", "is_named"), [("0.29", False), ("0.30", True)], ids=["before", "since"]
)
def test_session_is_named_since_0_30(version: str, is_named: bool) -> None:
    """The session of the triggering request rides on the event from 0.30 on."""
    encoder = EventEncoder(parse_version(version))

    sent = decode_first(encoder.encode_batch([stored(session_id="s")], unix_s=1.0, rank=0))

    assert ("session_id" in sent) == is_named


def test_rank_is_the_third_element() -> None:
    """The batch names the rank that published it."""
    payload = EventEncoder((0, 33, 0)).encode_batch([], unix_s=1.0, rank=3)

    assert msgspec.msgpack.decode(payload) == [1.0, [], 3]


kinds = st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared"])
releases = st.tuples(st.just(0), st.integers(9, 40), st.integers(0, 3))


@given(st.lists(kinds, max_size=8), releases)
def test_every_release_keeps_number_and_order_of_events(
    wanted: list[str], release: tuple[int, int, int]
) -> None:
    """Whatever the form, the tags come out as the events went in."""
    made: dict[str, KvEvent] = {
        "BlockStored": stored(),
        "BlockRemoved": BlockRemoved(HASH),
        "AllBlocksCleared": AllBlocksCleared(),
    }
    payload = EventEncoder(release).encode_batch([made[kind] for kind in wanted], unix_s=1, rank=0)

    sent = msgspec.msgpack.decode(payload)[1]
    tags = [event["type"] if isinstance(event, dict) else event[0] for event in sent]
    assert tags == wanted


@pytest.mark.parametrize("version", ["0.16", "0.33"])
def test_oddities_are_put_beside_what_is_true(version: str) -> None:
    """Whoever follows has to find the good events among the others."""
    oddities = Oddities(
        has_bad_event=True, has_contradictions=True, mixes_hash_forms=True, copies_medium="CPU"
    )
    payload = EventEncoder(parse_version(version)).encode_batch(
        EVENTS, unix_s=1.5, rank=0, oddities=oddities
    )
    _, events, _ = msgspec.msgpack.decode(payload)

    plain = EventEncoder(parse_version(version)).encode_batch(EVENTS, unix_s=1.5, rank=0)
    stored_as_sent, _, cleared_as_sent = msgspec.msgpack.decode(plain)[1]
    assert stored_as_sent in events
    assert cleared_as_sent in events
    assert len(events) == len(EVENTS) + 5
    named = [each for each in events if isinstance(each, dict)]
    assert [HASH] in [each["block_hashes"] for each in named if each["type"] == "BlockRemoved"]
    assert "CPU" in [each.get("medium") for each in named]
