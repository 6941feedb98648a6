"""KV-cache events as engines send them, field by field, before anything is made of them.

Arrays and maps have the same fields; an array's are in the order of these structs, and it may be as
short as its release wrote it. What a field means is in `core.events`.
"""

from collections.abc import Sequence
from typing import Any, Final

import msgspec


class StoredAsSent(msgspec.Struct, tag_field="type", tag="BlockStored", gc=False):
    """Any BlockStored, in the field order that arrays have."""

    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: Any = None
    ownership: Any = None
    session_id: str | None = None


class RemovedAsSent(msgspec.Struct, tag_field="type", tag="BlockRemoved", gc=False):
    """Any BlockRemoved."""

    block_hashes: list[int | bytes]
    medium: str | None = None
    group_idx: int | None = None


class ClearedAsSent(msgspec.Struct, tag_field="type", tag="AllBlocksCleared", gc=False):
    """Any AllBlocksCleared."""


class _StoredArray(StoredAsSent, array_like=True, gc=False):
    """The same up to 0.23."""


class _RemovedArray(RemovedAsSent, array_like=True, gc=False):
    """The same up to 0.23."""


class _ClearedArray(ClearedAsSent, array_like=True, gc=False):
    """The same up to 0.23."""


MapEvent = StoredAsSent | RemovedAsSent | ClearedAsSent
ArrayEvent = _StoredArray | _RemovedArray | _ClearedArray

_EVENT_TYPES: Final = frozenset(("BlockStored", "BlockRemoved", "AllBlocksCleared"))


def convert_event(sent: object) -> MapEvent | ArrayEvent:
    """One event that was decoded untyped. Raises msgspec.ValidationError."""
    wanted: Any = MapEvent if isinstance(sent, dict) else ArrayEvent
    converted: MapEvent | ArrayEvent = msgspec.convert(sent, wanted, builtin_types=(bytes,))
    return converted


def reason_to_reject(sent: object) -> str:
    """Name the fault: a bounded set of words, since it becomes a metric's label."""
    tag: object = None
    if isinstance(sent, dict):
        tag = sent.get("type")
    elif isinstance(sent, Sequence) and not isinstance(sent, str | bytes) and sent:
        tag = sent[0]
    if not isinstance(tag, str):
        return "not_an_event"
    return "bad_field" if tag in _EVENT_TYPES else "unknown_event"
