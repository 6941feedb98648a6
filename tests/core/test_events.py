"""Every wire format of every release decodes to one shape; damaged bytes raise one error."""

import gzip
import json
from math import inf
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.core.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    UndecodableBatchError,
    batch_ts,
    decode_batch,
)
from indexer.core.types import EngineHash

CAPTURES = Path(__file__).parent.parent / "captures"
H = 0x1122334455667788

# Encoded with msgspec from vLLM's own struct classes of each release.
ARRAY_090 = (
    "92cb3ff80000000000009396ab426c6f636b53746f7265649207f8c0940102030402c092ac426c6f636b52656d6f"
    "766564910791b0416c6c426c6f636b73436c6561726564"
)
ARRAY_091 = "93" + ARRAY_090[2:] + "00"
ARRAY_0102 = (
    "93cb3ff80000000000009397ab426c6f636b53746f72656491cf1122334455667788c0920a0b02c0a347505593ac"
    "426c6f636b52656d6f76656491cf1122334455667788a347505591b0416c6c426c6f636b73436c656172656400"
)
ARRAY_014 = (
    "93cb3ff80000000000009398ab426c6f636b53746f72656491cf1122334455667788c0920a0b02c0a3475055c093"
    "ac426c6f636b52656d6f76656491cf1122334455667788a347505591b0416c6c426c6f636b73436c656172656400"
)
ARRAY_017 = (
    "93cb3ff80000000000009399ab426c6f636b53746f72656491cf1122334455667788c0920a0b02c0a3475055c091"
    "c093ac426c6f636b52656d6f76656491cf1122334455667788a347505591b0416c6c426c6f636b73436c65617265"
    "6400"
)
ARRAY_020 = (
    "93cb3ff8000000000000939aab426c6f636b53746f72656491cf1122334455667788c0920a0b02c0a3475055c091"
    "c00094ac426c6f636b52656d6f76656491cf1122334455667788a34750550091b0416c6c426c6f636b73436c6561"
    "72656400"
)
ARRAY_022 = (
    "93cb3ff8000000000000939cab426c6f636b53746f72656491cf1122334455667788c0920a0b02c0a3475055c091"
    "c000ae66756c6c5f617474656e74696f6ec094ac426c6f636b52656d6f76656491cf1122334455667788a3475055"
    "0091b0416c6c426c6f636b73436c656172656400"
)
MAP_024 = (
    "93cb3ff8000000000000938ba474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391cf1122"
    "334455667788b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473920a0baa626c6f636b5f73"
    "697a6502a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa65787472615f6b657973"
    "91c0a967726f75705f69647800b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f"
    "6e84a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391cf1122334455667788a66d65"
    "6469756da3475055a967726f75705f6964780081a474797065b0416c6c426c6f636b73436c656172656400"
)
MAP_033 = MAP_024.replace("938ba474", "93de000ba474", 1)
MAP_RICH = (
    "93cb3ff8000000000000918ca474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391c42000"
    "0102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1fb1706172656e745f626c6f636b5f68"
    "617368c4200000000000000000000000000000000000000000000000000000000000000000a9746f6b656e5f6964"
    "73920a0baa626c6f636b5f73697a6502a76c6f72615f696401a66d656469756da3475055a96c6f72615f6e616d65"
    "a373716caa65787472615f6b6579739193a373716c92a7696d6768617368fda473616c74a967726f75705f696478"
    "01b26b765f63616368655f737065635f6b696e64ae736c6964696e675f77696e646f77bc6b765f63616368655f73"
    "7065635f736c6964696e675f77696e646f77cc8003"
)

FULL_KIND = "full_attention"


def plain_events(kind: str | None, extra_keys: list[Any] | None) -> list[Any]:
    return [
        BlockStored([EngineHash(H)], None, [10, 11], 2, extra_keys=extra_keys, kind=kind),
        BlockRemoved([EngineHash(H)]),
        AllBlocksCleared(),
    ]


@pytest.mark.parametrize(
    ("payload", "kind", "extra_keys"),
    [
        pytest.param(ARRAY_0102, None, None, id="0.10.2"),
        pytest.param(ARRAY_014, None, None, id="0.14"),
        pytest.param(ARRAY_017, None, [None], id="0.17"),
        pytest.param(ARRAY_020, None, [None], id="0.20"),
        pytest.param(ARRAY_022, FULL_KIND, [None], id="0.22"),
        pytest.param(MAP_024, FULL_KIND, [None], id="0.24"),
        pytest.param(MAP_033, FULL_KIND, [None], id="0.33-map16"),
    ],
)
def test_bytes_of_each_release_decode_to_the_same_events(
    payload: str, kind: str | None, extra_keys: list[Any] | None
) -> None:
    """Arrays and maps, whatever their length, say the same."""
    batch = decode_batch(bytes.fromhex(payload))

    assert batch == EventBatch(1.5, 0, plain_events(kind, extra_keys))


@pytest.mark.parametrize(
    ("payload", "rank"),
    [pytest.param(ARRAY_090, None, id="0.9.0"), pytest.param(ARRAY_091, 0, id="0.9.1")],
)
def test_signed_hashes_become_unsigned(payload: str, rank: int | None) -> None:
    """The first releases published signed ints, and 0.9.0 no rank."""
    batch = decode_batch(bytes.fromhex(payload))

    assert batch.rank == rank
    assert batch.events == [
        BlockStored([EngineHash(7), EngineHash(2**64 - 8)], None, [1, 2, 3, 4], 2),
        BlockRemoved([EngineHash(7)]),
        AllBlocksCleared(),
    ]


def test_every_field_of_a_late_release_is_read() -> None:
    """Bytes hashes, adapter, image, salt, window and group of 0.32."""
    batch = decode_batch(bytes.fromhex(MAP_RICH))

    assert batch.rank == 3
    assert batch.events == [
        BlockStored(
            [EngineHash(0x18191A1B1C1D1E1F)],
            EngineHash(0),
            [10, 11],
            2,
            lora="sql",
            extra_keys=[["sql", ["imghash", -3], "salt"]],
            group=1,
            kind="sliding_window",
            window_tokens=128,
            lora_id=1,
        )
    ]


@given(st.binary(max_size=200))
def test_random_bytes_decode_or_raise_one_error(payload: bytes) -> None:
    """Nothing else escapes, whatever arrives on the socket."""
    batch_ts(payload)
    try:
        decode_batch(payload)
    except UndecodableBatchError:
        return


@given(st.data())
def test_damaged_batches_decode_or_raise_one_error(data: st.DataObject) -> None:
    """The same for bytes that were a batch before one of them changed."""
    payload = bytearray.fromhex(data.draw(st.sampled_from((MAP_RICH, MAP_024, ARRAY_022))))
    payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode_batch(bytes(payload))
    except UndecodableBatchError:
        return


@pytest.mark.parametrize(
    ("payload", "ts"),
    [
        pytest.param(bytes.fromhex(MAP_024), 1.5, id="map"),
        pytest.param(bytes.fromhex(ARRAY_090), 1.5, id="two-elements"),
        pytest.param(msgspec.msgpack.encode([3, []]), None, id="int"),
        pytest.param(msgspec.msgpack.encode([float("nan"), [], 0]), -inf, id="nan"),
        pytest.param(msgspec.msgpack.encode([inf, [], 0]), -inf, id="infinite"),
        pytest.param(msgspec.msgpack.encode([1e20, [], 0]), -inf, id="absurd"),
        pytest.param(msgspec.msgpack.encode([1.8e18, [], 0]), 1.8e18, id="nanoseconds"),
        pytest.param(msgspec.msgpack.encode([0.0, [], 0]), 0.0, id="zero"),
        pytest.param(msgspec.msgpack.encode([-0.5, [], 0]), -inf, id="negative"),
        pytest.param(b"\x93\xcb\x3f", None, id="short"),
        pytest.param(b"\xc0" * 20, None, id="no-array"),
    ],
)
def test_time_is_read_without_decoding(payload: bytes, ts: float | None) -> None:
    """Where vLLM writes it, or not at all; what no clock says is before all time."""
    assert batch_ts(payload) == ts


# What one release may say, as a logical event, and how it writes it.


@pytest.mark.parametrize(
    "capture", [pytest.param(path, id=path.name) for path in CAPTURES.glob("*.events.jsonl.gz")]
)
def test_whole_capture_decodes_without_a_reject(capture: Path) -> None:
    """What real engines published is understood to the last event."""
    with gzip.open(capture) as lines:
        frames = [json.loads(line)["frames"] for line in lines]

    batches = [decode_batch(bytes.fromhex(each[2])) for each in frames]
    assert batches
    assert [batch for batch in batches if batch.rejected or not batch.events] == []


@pytest.mark.parametrize("group", [-1, 64])
def test_event_of_a_group_that_no_model_has_is_rejected(group: int) -> None:
    """The events beside it are kept, a clear among them; 63 is a number like any other."""
    gone = ["BlockRemoved", [1], "GPU"]
    payload = msgspec.msgpack.encode([1.0, [[*gone, group], [*gone, 63], ["AllBlocksCleared"]], 0])

    batch = decode_batch(payload)
    assert batch.events == [BlockRemoved([EngineHash(1)], group=63), AllBlocksCleared()]
    assert batch.rejected == ["impossible_group"]
