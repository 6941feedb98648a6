"""KV-cache events: from the bytes of any vLLM release to one shape.

Rules:

1. The shape is seen from the bytes, never from a version: events are tagged arrays up to 0.23 and
   maps since 0.24; a batch is `[ts, events]` in 0.9.0 and `[ts, events, rank]` since.
2. Hashes become unsigned 64-bit ints: signed ints by wrapping, byte strings by their last eight
   bytes, big-endian, which is vLLM's own int form of them. So stores and removals always meet.
3. Fields we don't know are ignored, fields that are missing get their default; an array may be
   as short as its release wrote it.
4. A bad event costs only itself: it leaves one constant reason in `rejected`.
   Only a payload that is no batch at all raises.
5. Mediums are read without regard to case; none means GPU (releases before 0.10.2 have none). A
   medium nobody has named yet counts as STORAGE: the slowest tier promises least. One in lower
   case comes from a connector that tells of stores only (LMCache, Mooncake): `is_store_only`.
6. A group's number is below 64: models have a handful. One event of a group that isn't there would
   be a full group that holds nothing, and a hit needs all of them.
7. The usual batch (all is well with it, hashes are unsigned, groups have numbers) is decoded in C
   straight into what the rest of the code reads. Any other is decoded again, event by event.

Cost: 0.4 µs per block of 16 tokens in a long event, 0.7 µs per event with one block; an unusual
batch costs about three times that.
"""

from math import inf
from struct import unpack_from
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec

from indexer.core.sent_events import (
    ArrayEvent,
    MapEvent,
    RemovedAsSent,
    StoredAsSent,
    convert_event,
    reason_to_reject,
)
from indexer.core.types import EngineHash, Tier

_NO_CLOCK_SAYS: Final = 1e20
"""Nanoseconds up to the year 5138."""


class UndecodableBatchError(Exception):
    """The payload is not a batch of events; its argument is a constant reason."""


class _Stored(msgspec.Struct, frozen=True, gc=False, eq=False):
    hashes: list[EngineHash]
    parent: EngineHash | None
    """Block before the first one; None: the first is block 0."""
    token_ids: list[int]
    """Empty in a placeholder, longer than the hashes say where blocks are masked."""
    block_size: int
    """Tokens per block of this group; 0 in a placeholder."""


class BlockStored(_Stored, frozen=True, gc=False, eq=False, kw_only=True):
    """Blocks entered one group and tier. One announcement per physical block.

    Up to `window_tokens` fields are in the order in which arrays have them.
    """

    what: ClassVar[Literal["stored"]] = "stored"
    """Tells events apart at a third of the cost of `isinstance`."""

    lora_id: int | None = None
    """Number of the adapter; another one under the same name is another adapter."""
    medium: str | None = None
    """As sent. What it means is in `tier` and `is_store_only`."""
    lora: str | None = None
    """Adapter's name; `#id` from releases that only tell its number."""
    extra_keys: list[Any] | None = None
    """Per hash: what else the engine hashed (adapter, images, salt, prompt embeds), untagged."""
    group: int = 0
    kind: str | None = None
    window_tokens: int | None = None
    tier: Tier = Tier.GPU
    session_id: str | None = None
    is_store_only: bool = False
    """Nobody will tell when the copies go (`core.store_only`)."""

    def __repr__(self) -> str:
        """Tokens and salts stay out of logs and test output of others."""
        return (
            f"BlockStored({len(self.hashes)} hashes, parent={self.parent}, "
            f"block_size={self.block_size}, tier={self.tier}, group={self.group})"
        )

    def __eq__(self, other: object) -> bool:
        """However they were decoded."""
        return isinstance(other, BlockStored) and _said(self, BlockStored) == _said(
            other, BlockStored
        )

    __hash__ = None  # type: ignore[assignment]


class _Removed(msgspec.Struct, frozen=True, gc=False, eq=False):
    hashes: list[EngineHash]


class BlockRemoved(_Removed, frozen=True, gc=False, eq=False, kw_only=True):
    """One copy of each of these blocks left one group and tier."""

    what: ClassVar[Literal["removed"]] = "removed"

    medium: str | None = None
    """As sent. What it means is in `tier`."""
    group: int = 0
    tier: Tier = Tier.GPU

    def __eq__(self, other: object) -> bool:
        """However they were decoded."""
        return isinstance(other, BlockRemoved) and _said(self, BlockRemoved) == _said(
            other, BlockRemoved
        )

    __hash__ = None  # type: ignore[assignment]


class AllBlocksCleared(msgspec.Struct, frozen=True, gc=False):
    """A cache of the rank was reset; the event does not say which, so all of it counts."""

    what: ClassVar[Literal["cleared"]] = "cleared"


def _said(event: msgspec.Struct, kind: type[msgspec.Struct]) -> list[object]:
    return [getattr(event, name) for name in kind.__struct_fields__ if name != "medium"]


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, frozen=True, gc=False):
    """What one scheduler step published."""

    ts: float
    """Engine's wall clock at publishing, seconds."""
    rank: int | None
    """Global data-parallel rank; None from 0.9.0."""
    events: list[Event]
    rejected: list[str] = []
    """One constant reason per event that could not be used."""


_MOST_GROUPS: Final = 64
_Unsigned = Annotated[EngineHash, msgspec.Meta(ge=0)]
_Group = Annotated[int, msgspec.Meta(ge=0, lt=_MOST_GROUPS)]
_Name = Annotated[str, msgspec.Meta(min_length=1)]
_NAMES_SENT: Final = {
    "hashes": "block_hashes",
    "parent": "parent_block_hash",
    "lora": "lora_name",
    "group": "group_idx",
    "kind": "kv_cache_spec_kind",
    "window_tokens": "kv_cache_spec_sliding_window",
    # Never sent: both are told from the medium.
    "tier": "-tier",
    "is_store_only": "-store_only",
}


class _MapStored(
    BlockStored, frozen=True, gc=False, eq=False, tag="BlockStored", rename=_NAMES_SENT
):
    """As releases since 0.24 send it, where nothing is unusual."""

    # A renamed field has to be declared here again.
    hashes: list[_Unsigned]
    parent: _Unsigned | None
    lora: _Name | None = None
    group: _Group = 0
    kind: str | None = None
    window_tokens: int | None = None
    tier: Tier = Tier.GPU
    is_store_only: bool = False


class _MapRemoved(
    BlockRemoved, frozen=True, gc=False, eq=False, tag="BlockRemoved", rename=_NAMES_SENT
):
    lora_id: ClassVar[int | None] = None
    hashes: list[_Unsigned]
    group: _Group = 0
    tier: Tier = Tier.GPU


class _MapCleared(AllBlocksCleared, frozen=True, gc=False, tag="AllBlocksCleared"):
    lora_id: ClassVar[int | None] = None
    medium: ClassVar[str | None] = None


class _ArrayStored(
    BlockStored, frozen=True, gc=False, eq=False, tag="BlockStored", array_like=True
):
    """As releases up to 0.23 send it, where nothing is unusual."""

    # What is declared here again has its place in the array.
    hashes: list[_Unsigned]
    parent: _Unsigned | None
    lora_id: int | None = None
    medium: str | None = None
    lora: _Name | None = None
    extra_keys: list[Any] | None = None
    group: _Group = 0
    kind: str | None = None
    window_tokens: int | None = None


class _ArrayRemoved(
    BlockRemoved, frozen=True, gc=False, eq=False, tag="BlockRemoved", array_like=True
):
    lora_id: ClassVar[int | None] = None
    hashes: list[_Unsigned]
    medium: str | None = None
    group: _Group = 0


class _ArrayCleared(
    AllBlocksCleared, frozen=True, gc=False, tag="AllBlocksCleared", array_like=True
):
    lora_id: ClassVar[int | None] = None
    medium: ClassVar[str | None] = None


class _Maps(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[_MapStored | _MapRemoved | _MapCleared]
    rank: int | None = None


class _Arrays(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[_ArrayStored | _ArrayRemoved | _ArrayCleared]
    rank: int | None = None


_MAPS: Final = msgspec.msgpack.Decoder(_Maps)
_ARRAYS: Final = msgspec.msgpack.Decoder(_Arrays)
_ANYTHING: Final = msgspec.msgpack.Decoder()

_TIER_OF_MEDIUM: Final = {
    None: Tier.GPU,
    "GPU": Tier.GPU,
    "CPU": Tier.CPU,
    "CPU_PINNED": Tier.CPU,
    "FS": Tier.STORAGE,
    "OBJ": Tier.STORAGE,
    "STORAGE": Tier.STORAGE,
    "DISK": Tier.STORAGE,
}
_MASK_64: Final = 0xFFFF_FFFF_FFFF_FFFF


def decode_batch(payload: bytes) -> EventBatch:
    """Decode one message's payload. Raises UndecodableBatchError if it is no batch at all."""
    try:
        usual = (_ARRAYS if _has_arrays(payload) else _MAPS).decode(payload)
    except (msgspec.DecodeError, RecursionError):
        return _decode_singly(payload)
    events: list[Any] = usual.events
    for number, event in enumerate(events):
        if event.medium != "GPU" or event.lora_id:
            events[number] = _settle(event)
    return EventBatch(usual.ts, usual.rank, events)


def _has_arrays(payload: bytes) -> bool:
    """Whether the first event is an array, if the batch is what vLLM writes."""
    # fixarray, float64, then up to 15 events, or up to 65,535; an event is a fixarray.
    return len(payload) > 13 and payload[11 if payload[10] < 0xA0 else 13] >> 4 == 9


def batch_ts(payload: bytes) -> float | None:
    """Read a batch's timestamp without decoding it; None if there is none where vLLM writes it.

    What no clock says, in any unit, is -inf, before all time: nothing that follows is older than it.
    """
    # fixarray of at least two, then a float64.
    if len(payload) < 10 or not 0x92 <= payload[0] <= 0x9F or payload[1] != 0xCB:
        return None
    ts: float = unpack_from(">d", payload, 2)[0]
    return ts if 0 <= ts < _NO_CLOCK_SAYS else -inf  # NaN is neither


def _settle(sent: BlockStored | BlockRemoved | AllBlocksCleared) -> Event:
    """Tell the tier and the adapter where they aren't the usual ones."""
    if isinstance(sent, BlockStored):
        return BlockStored(
            sent.hashes,
            sent.parent,
            sent.token_ids,
            sent.block_size,
            lora_id=sent.lora_id or None,
            medium=sent.medium,
            lora=_adapter_of(sent.lora, sent.lora_id),
            extra_keys=sent.extra_keys,
            group=sent.group,
            kind=sent.kind,
            window_tokens=sent.window_tokens,
            tier=_tier_of(sent.medium),
            session_id=sent.session_id,
            is_store_only=sent.medium is not None and sent.medium.islower(),
        )
    if isinstance(sent, BlockRemoved):
        return BlockRemoved(
            sent.hashes, medium=sent.medium, group=sent.group, tier=_tier_of(sent.medium)
        )
    return AllBlocksCleared()


def _normalise(sent: MapEvent | ArrayEvent) -> Event:
    """What is sent otherwise than usual, as if it were."""
    if isinstance(sent, StoredAsSent):
        parent = sent.parent_block_hash
        return _settle(
            BlockStored(
                [_unsigned(each) for each in sent.block_hashes],
                None if parent is None else _unsigned(parent),
                sent.token_ids,
                sent.block_size,
                lora_id=sent.lora_id,
                medium=sent.medium,
                lora=sent.lora_name,
                extra_keys=sent.extra_keys,
                group=sent.group_idx or 0,
                kind=sent.kv_cache_spec_kind,
                window_tokens=sent.kv_cache_spec_sliding_window,
                session_id=sent.session_id,
            )
        )
    if isinstance(sent, RemovedAsSent):
        hashes = [_unsigned(each) for each in sent.block_hashes]
        return _settle(BlockRemoved(hashes, medium=sent.medium, group=sent.group_idx or 0))
    return AllBlocksCleared()


def _adapter_of(name: str | None, number: int | None) -> str | None:
    # Adapter ids begin at 1; 0 has meant "no adapter".
    return name or (f"#{number}" if number else None)


def _unsigned(sent: int | bytes) -> EngineHash:
    if type(sent) is bytes:
        sent = int.from_bytes(sent[-8:], "big")
    return sent & _MASK_64  # type: ignore[operator, return-value]


def _tier_of(medium: str | None) -> Tier:
    return _TIER_OF_MEDIUM.get((medium or "GPU").upper(), Tier.STORAGE)


def _decode_singly(payload: bytes) -> EventBatch:
    """Decode a batch in which something is unusual or wrong, event by event."""
    try:
        batch = _ANYTHING.decode(payload)
    except (msgspec.DecodeError, RecursionError, TypeError) as error:
        raise UndecodableBatchError("not_msgpack") from error
    if not isinstance(batch, list) or len(batch) < 2 or not isinstance(batch[1], list):
        raise UndecodableBatchError("not_a_batch")
    ts, sent_events, rank = batch[0], batch[1], batch[2] if len(batch) > 2 else None
    if type(ts) not in {int, float} or type(rank) not in {int, type(None)}:
        raise UndecodableBatchError("not_a_batch")
    events: list[Event] = []
    rejected: list[str] = []
    for sent in sent_events:
        try:
            event = _normalise(convert_event(sent))
        except msgspec.ValidationError:
            rejected.append(reason_to_reject(sent))
            continue
        if event.what == "cleared" or 0 <= event.group < _MOST_GROUPS:
            events.append(event)
        else:
            rejected.append("impossible_group")
    return EventBatch(float(ts), rank, events, rejected)
