"""What fields of events mean, which are not needed, and which cost their event."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.core.events import BlockRemoved, BlockStored, UndecodableBatchError, decode_batch
from indexer.core.types import EngineHash, Tier

FULL_KIND = "full_attention"


def encode(*events: object, rank: object = 0) -> bytes:
    return msgspec.msgpack.encode([2.5, events, rank])


def stored_map(**fields: object) -> dict[str, object]:
    return {
        "type": "BlockStored",
        "block_hashes": [1],
        "parent_block_hash": None,
        "token_ids": [5],
        "block_size": 1,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        **fields,
    }


def only_event(payload: bytes) -> Any:
    batch = decode_batch(payload)
    assert batch.rejected == []
    (event,) = batch.events
    return event


@pytest.mark.parametrize("number", [-1, 2**64 - 1, b"\xaa" * 24 + b"\xff" * 8])
def test_f07_a_store_in_one_form_meets_a_removal_in_another(number: object) -> None:
    """F07: signed, unsigned and bytes of one digest are one hash."""
    removed: dict[str, object] = {"type": "BlockRemoved", "block_hashes": [number]}

    assert only_event(encode(stored_map(block_hashes=[number]))).hashes == [2**64 - 1]
    assert only_event(encode(removed)).hashes == [2**64 - 1]
    assert only_event(encode(stored_map(block_hashes=[3, number]))).hashes == [3, 2**64 - 1]


@pytest.mark.parametrize(
    ("medium", "tier"),
    [
        (None, Tier.GPU),
        ("GPU", Tier.GPU),
        ("gpu", Tier.GPU),
        ("cpu", Tier.CPU),
        ("CPU", Tier.CPU),
        ("CPU_PINNED", Tier.CPU),
        ("FS", Tier.STORAGE),
        ("OBJ", Tier.STORAGE),
        ("storage", Tier.STORAGE),
        ("Disk", Tier.STORAGE),
        ("QUANTUM", Tier.STORAGE),
    ],
)
def test_medium_names_a_tier_whatever_its_case(medium: str | None, tier: Tier) -> None:
    """An unknown medium promises least."""
    removed: dict[str, object] = {"type": "BlockRemoved", "block_hashes": [1], "medium": medium}

    assert only_event(encode(stored_map(medium=medium))).tier is tier
    assert only_event(encode(removed)).tier is tier


@pytest.mark.parametrize(
    ("name", "number", "lora"),
    [
        ("sql", 1, "sql"),
        (None, 7, "#7"),
        (None, 0, None),
        (None, None, None),
    ],
)
def test_adapter_is_its_name_else_its_number(
    name: str | None, number: int | None, lora: str | None
) -> None:
    """Releases before 0.14 tell only a number; 0 is no adapter."""
    event = only_event(encode(stored_map(lora_name=name, lora_id=number)))

    assert event.lora == lora


@pytest.mark.parametrize(
    ("medium", "is_store_only"),
    [("cpu", True), ("CPU", False), ("GPU", False), (None, False)],
)
def test_medium_in_lower_case_tells_of_stores_only(medium: str | None, is_store_only: bool) -> None:
    """LMCache and Mooncake never report a removal; engines write their mediums in capitals."""
    sent = {
        "type": "BlockStored",
        "block_hashes": [1],
        "parent_block_hash": None,
        "token_ids": [],
        "block_size": 0,
        "medium": medium,
    }

    (event,) = decode_batch(encode(sent)).events
    assert isinstance(event, BlockStored)
    assert event.is_store_only is is_store_only


def test_unknown_fields_are_ignored() -> None:
    """Later releases add fields at the end of arrays and anywhere in maps."""
    late = stored_map(
        locality="LOCAL", ownership="kvcr", session_id="s", lookahead_token_ids=[[1]], more={"a": 1}
    )
    long_array = ["BlockRemoved", [1], "GPU", 2, "LOCAL", "kvcr", {"more": 1}]

    assert only_event(encode(late)).session_id == "s"
    assert only_event(encode(long_array)).group == 2


def test_array_may_stop_after_its_required_fields() -> None:
    """Trailing fields are optional in every release."""
    assert only_event(encode(["BlockStored", [1], None, [5], 1])).tier is Tier.GPU


@pytest.mark.parametrize("count", [1, 15, 16, 70_000])
@pytest.mark.parametrize("is_map", [False, True], ids=["arrays", "maps"])
def test_batch_may_have_any_number_of_events(count: int, *, is_map: bool) -> None:
    """MessagePack writes short and long lists differently."""
    as_map = {"type": "BlockRemoved", "block_hashes": [9], "medium": "GPU", "group_idx": 0}
    sent = as_map if is_map else [*as_map.values()]

    assert decode_batch(encode(*[sent] * count)).events == [BlockRemoved([EngineHash(9)])] * count


def test_array_may_go_on_after_its_last_field() -> None:
    """Nobody sends it; what the fields of later maps mean they mean here."""
    sent = ["BlockStored", [1], None, [5], 1, None, "GPU", None, [None], 0, FULL_KIND, None]

    event = only_event(encode([*sent, "LOCAL", None, "a-session", 7]))
    assert (event.tier, event.session_id) == (Tier.GPU, "a-session")
    assert only_event(encode([*sent, "gpu"])).tier is Tier.GPU


GOOD: dict[str, object] = {"type": "BlockRemoved", "block_hashes": [9]}


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        pytest.param(7, "not_an_event", id="number"),
        pytest.param(None, "not_an_event", id="nil"),
        pytest.param("BlockStored", "not_an_event", id="text"),
        pytest.param([], "not_an_event", id="empty-array"),
        pytest.param({}, "not_an_event", id="empty-map"),
        pytest.param({"type": 3}, "not_an_event", id="tag-of-wrong-type"),
        pytest.param({"type": "BlockMoved"}, "unknown_event", id="unknown-map"),
        pytest.param(["BlockMoved", [1]], "unknown_event", id="unknown-array"),
        pytest.param({"type": "BlockRemoved"}, "bad_field", id="missing-field"),
        pytest.param(stored_map(token_ids=[1.5]), "bad_field", id="float-token"),
        pytest.param(stored_map(token_ids={}), "bad_field", id="map-of-tokens"),
        pytest.param(stored_map(block_hashes=["x"]), "bad_field", id="text-hash"),
        pytest.param(stored_map(block_size=None), "bad_field", id="no-block-size"),
        pytest.param(["BlockRemoved", 5], "bad_field", id="array-of-wrong-type"),
    ],
)
def test_f06_bad_event_costs_only_itself(bad: object, reason: str) -> None:
    """F06: the good events of the batch are used, the bad one leaves a reason."""
    batch = decode_batch(encode(GOOD, bad, GOOD))

    assert batch.events == [BlockRemoved([EngineHash(9)])] * 2
    assert batch.rejected == [reason]
    assert (batch.ts, batch.rank) == (2.5, 0)


def test_arrays_and_maps_may_mix_in_one_batch() -> None:
    """Nobody sends it; nothing forbids it."""
    batch = decode_batch(encode(GOOD, ["BlockRemoved", [b"\x00" * 8]]))

    assert batch.events == [BlockRemoved([EngineHash(9)]), BlockRemoved([EngineHash(0)])]


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        pytest.param(b"", "not_msgpack", id="empty"),
        pytest.param(b"\xc1", "not_msgpack", id="never-used-byte"),
        pytest.param(encode(GOOD)[:-9], "not_msgpack", id="truncated"),
        pytest.param(b"\x91" * 5000, "not_msgpack", id="too-deep"),
        pytest.param(
            b"\x92\xcb" + bytes(8) + b"\x92\x91\xb0AllBlocksCleared\xc1",
            "not_msgpack",
            id="damaged-behind-an-array-event",
        ),
        pytest.param(msgspec.msgpack.encode({"a": 1}), "not_a_batch", id="map"),
        pytest.param(msgspec.msgpack.encode([1.5]), "not_a_batch", id="no-events"),
        pytest.param(msgspec.msgpack.encode([1.5, 3]), "not_a_batch", id="events-not-a-list"),
        pytest.param(msgspec.msgpack.encode(["x", [GOOD]]), "not_a_batch", id="no-time"),
        pytest.param(encode(GOOD, rank="0"), "not_a_batch", id="rank-of-wrong-type"),
    ],
)
def test_payload_that_is_no_batch_raises(payload: bytes, reason: str) -> None:
    """Only this loses a whole batch, and says why in a constant word."""
    with pytest.raises(UndecodableBatchError, match=f"^{reason}$"):
        decode_batch(payload)


def test_whole_seconds_are_a_time() -> None:
    """An int is as good as a float, with good events and with bad ones."""
    assert decode_batch(msgspec.msgpack.encode([3, [GOOD]])).ts == 3.0
    assert decode_batch(msgspec.msgpack.encode([3, [GOOD, 0]])).ts == 3.0


def test_tokens_and_salts_stay_out_of_repr() -> None:
    """Events turn up in logs and in failing tests; prompts and salts may not."""
    event = BlockStored([EngineHash(1)], None, [77777], 1, extra_keys=[["s3cret"]])

    assert "77777" not in repr(event)
    assert "s3cret" not in repr(event)


# What one release may say, as a logical event, and how it writes it.


hashes = st.integers(-(2**63), 2**64 - 1) | st.binary(min_size=8, max_size=32)
hash_lists = st.lists(hashes, max_size=3)
mediums = st.sampled_from((None, "GPU", "cpu", "STORAGE"))
FIELDS = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
)
stores = st.fixed_dictionaries(
    {
        "block_hashes": hash_lists,
        "parent_block_hash": st.none() | hashes,
        "token_ids": st.lists(st.integers(0, 2**32 - 1), max_size=4),
        "block_size": st.integers(0, 4),
        "lora_id": st.none() | st.integers(0, 3),
        "medium": mediums,
        "lora_name": st.none() | st.text(max_size=2),
        "extra_keys": st.none() | st.lists(st.none() | st.lists(st.text(max_size=2)), max_size=2),
        "group_idx": st.none() | st.integers(0, 3),
        "kv_cache_spec_kind": st.none() | st.sampled_from((FULL_KIND, "mamba")),
        "kv_cache_spec_sliding_window": st.none() | st.integers(1, 4096),
    }
)


@given(st.lists(stores, max_size=4), st.sampled_from((5, 6, 7, 8, 9, 11)))
def test_array_of_each_length_says_what_the_map_says(
    events: list[dict[str, Any]], fields: int
) -> None:
    """Up to 0.23 the fields a release has go by position; maps since leave out what is nil."""
    known = [{name: event[name] for name in FIELDS[:fields]} for event in events]
    arrays = [["BlockStored", *event.values()] for event in known]
    maps = [
        {"type": "BlockStored"}
        | {
            name: value
            for at, (name, value) in enumerate(event.items())
            if at < 7 or value is not None
        }
        for event in known
    ]

    decoded = decode_batch(encode(*arrays))
    assert decoded == decode_batch(encode(*maps))
    assert decoded.rejected == []
    assert [event.hashes for event in decoded.events if isinstance(event, BlockStored)] == [
        [
            int.from_bytes(each[-8:], "big") if isinstance(each, bytes) else each % 2**64
            for each in event["block_hashes"]
        ]
        for event in events
    ]
