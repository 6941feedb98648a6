"""What balancer processes tell each other of their legs and their engines. Pure.

Rules:

1. A `Batch` is numbered by its sender, without gaps; an empty one says only that the sender lives.
2. A `Snapshot` is all the legs its sender has in flight, as of its last batch. It repairs whatever
   was missed.
3. Moments are seconds of the sender's own clock, beside `sent_s`, the same clock when it was sent:
   machines need no common time.
4. Block keys are hashes; no prompt, token, header or key of a client is ever part of a message.

5. Of a prompt of more than `MAX_BLOCKS` its beginning is told. Peers then believe that no more of it is
   on its way.

Cost: 8 bytes per block of a booked leg, some 100 bytes beside.
"""

import sys
from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import msgspec

from balancer.core.load.ledger import LegWork
from indexer.core.types import BlockKey, InstanceId, RankId

WIRE_VERSION = 1
MAX_BLOCKS = 16_384
"""128 kB: 262,144 tokens in blocks of 16."""


class PeerMessageError(Exception):
    """Not a message of this version."""


class Booked(msgspec.Struct, frozen=True, array_like=True, tag="b", gc=False):
    """A leg was decided."""

    number: int
    at_s: float
    kind: str
    instance: str
    rank: int
    prompt_tokens: int
    uncached_tokens: int
    work_s: float
    streamed: bool
    believed_s: float
    remembered_s: float
    block_size: int
    keys: bytes
    """Eight bytes each, little-endian."""
    believed_tokens: int = 0
    chain_ends: tuple[int, ...] = ()
    cache_tokens: int = 0
    """All three last, and with defaults: releases before them don't tell them."""


class FirstToken(msgspec.Struct, frozen=True, array_like=True, tag="f", gc=False):
    """Its prompt is computed."""

    number: int
    at_s: float


class HandedOver(msgspec.Struct, frozen=True, array_like=True, tag="h", gc=False):
    """The prefill rank has computed the prompt of a `decode` leg."""

    number: int
    at_s: float
    instance: str
    rank: int


class Ended(msgspec.Struct, frozen=True, array_like=True, tag="e", gc=False):
    """A leg is over; tokens as far as the engine told them."""

    number: int
    at_s: float
    failed: bool
    output_tokens: int | None
    cached_tokens: int | None


class LegOutcome(msgspec.Struct, frozen=True, array_like=True, tag="o", gc=False):
    """How an instance answered: what breakers go by."""

    instance: str
    ok: bool
    reason: str | None


Change = Booked | FirstToken | HandedOver | Ended | LegOutcome


class Batch(msgspec.Struct, frozen=True, array_like=True, tag="batch"):
    """What happened at one process since its last batch."""

    version: int
    peer: str
    seq: int
    sent_s: float
    changes: list[Change]


class OpenLeg(msgspec.Struct, frozen=True, array_like=True):
    """One leg in flight."""

    booked: Booked
    first_s: float | None
    handed_over: HandedOver | None


class Snapshot(msgspec.Struct, frozen=True, array_like=True, tag="snapshot"):
    """Every leg in flight at one process, after its batch `seq`."""

    version: int
    peer: str
    seq: int
    sent_s: float
    legs: list[OpenLeg]


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """Somebody has missed something of `peer`; empty: of everybody."""

    version: int
    peer: str


class Left(msgspec.Struct, frozen=True, array_like=True, tag="left"):
    """`peer` has ended: nothing of it is in flight any more."""

    version: int
    peer: str


Message = Batch | Snapshot | Ask | Left

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def encode_message(message: Message) -> bytes:
    """As it is sent."""
    return _encoder.encode(message)


def decode_message(payload: bytes) -> Message:
    """Raises PeerMessageError for what another version, or nobody, has sent."""
    try:
        message: Message = _decoder.decode(payload)
    except (msgspec.DecodeError, RecursionError) as error:
        raise PeerMessageError(str(error)) from error
    if message.version != WIRE_VERSION:
        raise PeerMessageError(f"version {message.version}")
    return message


def booked(number: int, at_s: float, work: LegWork) -> Booked:
    """The booking of `work`, to be told."""
    return Booked(
        number,
        at_s,
        work.kind,
        work.rank.instance,
        work.rank.rank,
        work.prompt_tokens,
        work.uncached_tokens,
        work.work_s,
        work.streamed,
        work.believed_s,
        work.remembered_s,
        work.block_size,
        pack_keys(work.keys[:MAX_BLOCKS]),
        work.believed_tokens,
        tuple(min(each, MAX_BLOCKS) for each in work.chain_ends),
        work.cache_tokens,
    )


def booked_work(told: Booked) -> LegWork:
    """What was booked. Raises PeerMessageError."""
    keys = unpack_keys(told.keys)
    if any(start > end for start, end in pairwise((0, *told.chain_ends, len(keys)))):
        raise PeerMessageError("prompts that overlap")
    return LegWork(
        rank=RankId(InstanceId(told.instance), told.rank),
        kind=told.kind,
        prompt_tokens=told.prompt_tokens,
        uncached_tokens=told.uncached_tokens,
        work_s=told.work_s,
        keys=keys,
        chain_ends=told.chain_ends,
        streamed=told.streamed,
        believed_s=told.believed_s,
        believed_tokens=told.believed_tokens,
        remembered_s=told.remembered_s,
        block_size=told.block_size,
        cache_tokens=told.cache_tokens,
    )


def pack_keys(keys: Sequence[BlockKey]) -> bytes:
    """Eight bytes each."""
    return _little_endian(array("Q", keys)).tobytes()


def unpack_keys(packed: bytes) -> list[BlockKey]:
    """Raises PeerMessageError."""
    keys = array("Q")
    try:
        keys.frombytes(packed)
    except ValueError as error:
        raise PeerMessageError("keys cut short") from error
    return cast("list[BlockKey]", _little_endian(keys).tolist())


def _little_endian(keys: "array[int]") -> "array[int]":
    if sys.byteorder == "big":  # pragma: no cover - no machine of ours is
        keys.byteswap()
    return keys
