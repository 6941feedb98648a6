"""What values in Redis look like: block keys, rows, descriptions of ranks. Pure.

Numbers are little-endian. A description says all that a lookup needs of a rank beside its blocks,
so that a reader who has it knows every key to ask for.
"""

from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache
from struct import Struct
from sys import byteorder

import msgspec

from indexer.core.block_rows import BlockRow, plain_row
from indexer.core.block_tree import TIERS
from indexer.core.index import GroupKind, GroupSpec
from indexer.core.types import BlockKey, EngineHash, InstanceId, RankId, Tier, Trust

TIER_NUMBER = {tier: number for number, tier in enumerate(TIERS)}

_ROW = Struct("<QQQBHHH")
ROW_BYTES = _ROW.size
PLAIN_ROW_BYTES = 24
"""Engine hash, key, parent: what `GroupRows.plain` has of a row."""
_VALUE = Struct("<QQBHHH")
_PLAIN_VALUE = Struct("<QQ")
_HASH_BYTES = 8
_HAS_KEY, _HAS_PARENT, _IS_FIRST = 1, 2, 4
_MOST_COPIES = 2**16 - 1


class GroupEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One KV-cache group of a rank."""

    group: int
    kind: GroupKind
    block_size: int
    window_tokens: int | None
    tiers: int = 0
    """Bits of the tiers that have ever held a block in this epoch."""

    @property
    def spec(self) -> GroupSpec:
        return GroupSpec(
            group=self.group,
            kind=self.kind,
            block_size=self.block_size,
            window_tokens=self.window_tokens,
        )


class RankEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Description of one rank: a value of the table of ranks."""

    instance: InstanceId
    rank: int
    epoch: int
    trust: Trust
    groups: tuple[GroupEntry, ...]
    """Lowest number first."""
    clears: int = 0
    """As `PrefixMatch` has them."""
    reason: str = ""
    """Why trust isn't exact."""

    @property
    def id(self) -> RankId:
        return RankId(self.instance, self.rank)


_entry_decoder = msgspec.msgpack.Decoder(RankEntry)


def group_entry(spec: GroupSpec, tiers: int = 0) -> GroupEntry:
    """What a lookup needs of one group."""
    return GroupEntry(spec.group, spec.kind, spec.block_size, spec.window_tokens, tiers)


def encode_entry(entry: RankEntry) -> bytes:
    """A value of the table of ranks."""
    return msgspec.msgpack.encode(entry)


def decode_entry(value: bytes) -> RankEntry:
    """Raises msgspec.DecodeError."""
    return _entry_decoder.decode(value)


def read_entry(value: bytes | None) -> RankEntry | None:
    """The same; None: there is none, or none that can be read."""
    try:
        return None if value is None else decode_entry(value)
    except msgspec.DecodeError:
        return None


def tiers_in(bits: int) -> tuple[tuple[int, Tier], ...]:
    """Tiers of a set of bits with their numbers, fastest first."""
    return tuple((number, tier) for number, tier in enumerate(TIERS) if bits >> number & 1)


def pack_numbers(numbers: Iterable[int]) -> bytes:
    """Block keys or engine hashes, eight bytes each."""
    packed = array("Q", numbers)
    if byteorder == "big":  # pragma: no cover - no big-endian machine to run it on
        packed.byteswap()
    return packed.tobytes()


def pack_rows(rows: Iterable[BlockRow]) -> bytes:
    """Engine hash and value of each row."""
    return b"".join([_pack_row(row) for row in rows])


def _pack_row(row: BlockRow) -> bytes:
    flags = _IS_FIRST if row.is_first else 0
    key, parent = row.key, row.parent
    if key is None:
        key = BlockKey(0)
    else:
        flags |= _HAS_KEY
    if parent is None:
        parent = BlockKey(0)
    else:
        flags |= _HAS_PARENT
    gpu, cpu, storage = row.copies
    if gpu > _MOST_COPIES or cpu > _MOST_COPIES or storage > _MOST_COPIES:
        gpu, cpu, storage = (min(copies, _MOST_COPIES) for copies in row.copies)
    return _ROW.pack(row.engine_hash, key, parent, flags, gpu, cpu, storage)


def unpack_row(field: bytes, value: bytes) -> BlockRow:
    """Raises struct.error."""
    engine_hash = EngineHash(int.from_bytes(field, "little"))
    if len(value) == _PLAIN_VALUE.size:
        return plain_row(engine_hash, *_PLAIN_VALUE.unpack(value))
    key, parent, flags, *copies = _VALUE.unpack(value)
    gpu, cpu, storage = copies
    return BlockRow(
        engine_hash=engine_hash,
        key=BlockKey(key) if flags & _HAS_KEY else None,
        parent=BlockKey(parent) if flags & _HAS_PARENT else None,
        is_first=bool(flags & _IS_FIRST),
        copies=(gpu, cpu, storage),
    )


def unpack_tokens(answer: bytes) -> Sequence[int]:
    """Tokens by tier of each rank, as the match script tells them."""
    tokens = array("I", answer)
    if byteorder == "big":  # pragma: no cover - no big-endian machine to run it on
        tokens.byteswap()
    return tokens


def pack_part(part: bytes) -> bytes:
    """One argument of a command, as it goes over the wire."""
    return b"$%d\r\n%b\r\n" % (len(part), part)


def pack_command(*parts: str | bytes | int) -> bytes:
    """A whole command, as it goes over the wire."""
    packed = [pack_part(part if isinstance(part, bytes) else str(part).encode()) for part in parts]
    return b"*%d\r\n%b" % (len(packed), b"".join(packed))


@lru_cache(maxsize=65_536)
def _pack_key(key: str) -> bytes:
    # Written to again and again, and looked up with every prompt.
    return pack_part(key.encode())


class PackedKeys:
    """Keys of a script, with their number in front, ready to be sent any number of times."""

    __slots__ = ("count", "first", "packed")

    def __init__(self, keys: Sequence[str]) -> None:
        self.count = len(keys)
        self.first = keys[0]
        """Says which node of a cluster has all of them."""
        self.packed = pack_part(b"%d" % len(keys)) + b"".join(map(_pack_key, keys))
