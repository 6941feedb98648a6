"""Event batches as released vLLM versions put them on the wire.

Rules: the batch is an array in every release. Events are tagged arrays up to 0.23, full length with
trailing nils, and maps since 0.24, without fields that are None by default. Fields exist from the
release that introduced them. Hashes are 64-bit integers (the low 8 bytes of the digest; signed up
to 0.10.1) or, from 0.10.2 on request, the digest itself.

Cost: linear in the size of the batch.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, assert_never

import msgspec

from simulator.core.settings import Version
from simulator.core.types import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent

_MEDIUM = "GPU"
_KIND = "full_attention"
_FIRST_RELEASE_WITH_MAPS = (0, 24, 0)
_FIRST_RELEASE_WITH_UNSIGNED = (0, 10, 2)
_FIRST_RELEASE_WITH_RANK = (0, 9, 1)
_FIRST_RELEASE_WITH_SESSION = (0, 30, 0)
_FIRST_RELEASE_WITH_WIDE_HEADER = (0, 33, 0)


class _Stored(msgspec.Struct, tag="BlockStored", omit_defaults=True, kw_only=True):
    """The map of 0.24 to 0.32."""

    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class _WideStored(_Stored, tag="BlockStored"):
    """One field more: msgspec then writes a `map16` header, as 0.33 does."""

    lookahead_token_ids: list[list[int]] | None = None


class _Removed(msgspec.Struct, tag="BlockRemoved", omit_defaults=True, kw_only=True):
    block_hashes: list[int | bytes]
    medium: str | None
    group_idx: int | None = None


class _Cleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Oddities:
    """What no release does, and a consumer has to survive."""

    has_bad_event: bool = False
    has_contradictions: bool = False
    mixes_hash_forms: bool = False
    copies_medium: str | None = None


_NONE_OF_IT = Oddities()
_LIKELY_UNUSED_HASHES = (0xBAD_1, 0xBAD_2)


class EventEncoder:
    """Encodes batches for one release."""

    def __init__(self, release: Version, *, int_hashes: bool = True) -> None:
        self._release = release
        self._int_hashes = int_hashes or release < _FIRST_RELEASE_WITH_UNSIGNED
        self._is_signed = release < _FIRST_RELEASE_WITH_UNSIGNED
        self._encoder = msgspec.msgpack.Encoder()

    def encode_batch(
        self,
        events: Iterable[KvEvent],
        *,
        unix_s: float,
        rank: int,
        oddities: Oddities = _NONE_OF_IT,
    ) -> bytes:
        """Return the payload frame of one batch."""
        rendered = [each for event in events for each in self._render_oddly(event, oddities)]
        if oddities.has_bad_event:
            rendered.insert(len(rendered) // 2, self._render_bad_event())
        if oddities.has_contradictions:
            rendered += self._render_contradictions()
        batch: list[object] = [unix_s, rendered]
        if self._release >= _FIRST_RELEASE_WITH_RANK:
            batch.append(rank)
        return self._encoder.encode(batch)

    def _render_oddly(self, event: KvEvent, oddities: Oddities) -> Iterator[object]:
        if oddities.mixes_hash_forms and isinstance(event, BlockRemoved):
            yield {"type": "BlockRemoved", "block_hashes": [event.hash], "medium": _MEDIUM}
            return
        yield self._render(event)
        if oddities.copies_medium is not None and isinstance(event, BlockStored):
            for block_hash in event.hashes:
                yield {
                    "type": "BlockStored",
                    "block_hashes": [self._render_hash(block_hash)],
                    "parent_block_hash": None,
                    "token_ids": [],
                    "block_size": 0,
                    "lora_id": None,
                    "medium": oddities.copies_medium,
                    "lora_name": None,
                }

    def _render_bad_event(self) -> object:
        if self._release >= _FIRST_RELEASE_WITH_MAPS:
            return {"type": "BlockStored", "block_hashes": "seven"}
        return ["BlockStored", "seven", None, [], 16, None]

    def _render_contradictions(self) -> list[object]:
        first, second = _LIKELY_UNUSED_HASHES
        told = [([first, first], None, 32), ([second], second, 16), ([], None, 0)]
        return [
            {
                "type": "BlockStored",
                "block_hashes": hashes,
                "parent_block_hash": parent,
                "token_ids": list(range(tokens)),
                "block_size": 16,
                "lora_id": None,
                "medium": _MEDIUM,
                "lora_name": None,
            }
            for hashes, parent, tokens in told
        ]

    def _render(self, event: KvEvent) -> object:
        if self._release >= _FIRST_RELEASE_WITH_MAPS:
            return self._render_map(event)
        return self._render_array(event)

    def _render_map(self, event: KvEvent) -> msgspec.Struct:
        match event:
            case BlockStored():
                is_wide = self._release >= _FIRST_RELEASE_WITH_WIDE_HEADER
                names_session = self._release >= _FIRST_RELEASE_WITH_SESSION
                return (_WideStored if is_wide else _Stored)(
                    block_hashes=list(map(self._render_hash, event.hashes)),
                    parent_block_hash=self._render_parent(event.parent),
                    token_ids=event.token_ids,
                    block_size=event.block_size,
                    lora_id=event.lora_id,
                    medium=_MEDIUM,
                    lora_name=event.lora_name,
                    extra_keys=_render_extra_keys(event),
                    group_idx=0,
                    kv_cache_spec_kind=_KIND,
                    session_id=event.session_id if names_session else None,
                )
            case BlockRemoved():
                return _Removed(
                    block_hashes=[self._render_hash(event.hash)], medium=_MEDIUM, group_idx=0
                )
            case AllBlocksCleared():
                return _Cleared()
            case _:
                assert_never(event)

    def _render_array(self, event: KvEvent) -> list[Any]:
        fields: list[tuple[Version, object]]
        match event:
            case BlockStored():
                fields = [
                    ((0, 9, 0), "BlockStored"),
                    ((0, 9, 0), list(map(self._render_hash, event.hashes))),
                    ((0, 9, 0), self._render_parent(event.parent)),
                    ((0, 9, 0), event.token_ids),
                    ((0, 9, 0), event.block_size),
                    ((0, 9, 0), event.lora_id),
                    ((0, 10, 2), _MEDIUM),
                    ((0, 14, 0), event.lora_name),
                    ((0, 17, 0), _render_extra_keys(event)),
                    ((0, 20, 0), 0),
                    ((0, 22, 0), _KIND),
                    ((0, 22, 0), None),
                ]
            case BlockRemoved():
                fields = [
                    ((0, 9, 0), "BlockRemoved"),
                    ((0, 9, 0), [self._render_hash(event.hash)]),
                    ((0, 10, 2), _MEDIUM),
                    ((0, 20, 0), 0),
                ]
            case AllBlocksCleared():
                fields = [((0, 9, 0), "AllBlocksCleared")]
            case _:
                assert_never(event)
        return [value for since, value in fields if self._release >= since]

    def _render_parent(self, parent: bytes | None) -> int | bytes | None:
        return None if parent is None else self._render_hash(parent)

    def _render_hash(self, block_hash: bytes) -> int | bytes:
        if not self._int_hashes:
            return block_hash
        return int.from_bytes(block_hash[-8:], "big", signed=self._is_signed)


def _render_extra_keys(event: BlockStored) -> list[list[str] | None]:
    return [None if keys is None else list(keys) for keys in event.extra_keys]
