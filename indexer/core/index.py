"""The index contract: what the indexer writes and the balancer asks.

Rules:

1. Only *reachable* full-attention blocks are written: a block is held while its whole chain from
   the root is held on that rank. `core.rank_blocks` sees to it, so membership (over all tiers)
   is monotone along a chain and a backend may search it any way it likes.
2. Window and state groups of hybrid models are written beside it, block by block, and checked
   at the hit boundary (`GroupSpec`).
3. A hit ends where every group of the rank agrees: the largest end that all full groups reach
   and at which every other group holds its last `boundary_blocks` (all blocks, where the end is
   shorter), on any tier. Groups of different block sizes agree on multiples of all their sizes.
4. A group is described before its first block. Describing it anew in another way empties it.
5. Updates of one rank carry its epoch. A newer epoch makes everything of an older one stop
   counting at once; an older one is refused.
6. A lookup never raises for a rank it doesn't know: the rank is absent from the answer.
7. An index in the writer's own process may read full groups where the writer keeps them
   (`BlocksShared`), instead of having a copy. Nothing awaits while an update is worked out and
   applied, so no lookup sees part of it; and a life that has ended isn't asked any more.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol, runtime_checkable

import msgspec

from indexer.core.block_rows import GroupRows, RankFacts
from indexer.core.hashing import (
    MediumPlace,
    Namespace,
    block_keys,
    media_extras,
    pack_tokens,
    root_key,
)
from indexer.core.types import BlockKey, EngineHash, RankId, Tier, Trust


class GroupKind(StrEnum):
    """What a KV-cache group needs for a hit."""

    FULL = "full"
    """Every block from the root on."""
    WINDOW = "window"
    """The blocks that cover the last `window_tokens - 1` tokens before the hit's end."""
    STATE = "state"
    """The block that ends at the hit's end (mamba)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """One KV-cache group of one rank, as its events describe it."""

    group: int
    kind: GroupKind
    block_size: int
    """Tokens per block."""
    window_tokens: int | None = None

    @property
    def boundary_blocks(self) -> int:
        """How many blocks before the hit's end must be held; 0 for a full group."""
        if self.kind is GroupKind.WINDOW:
            return -(-((self.window_tokens or 1) - 1) // self.block_size)
        return 1 if self.kind is GroupKind.STATE else 0


class BlocksHeld(msgspec.Struct, frozen=True, gc=False):
    """These keys are held from now on, in one group and tier. Adding a held key changes nothing."""

    group: int
    tier: Tier
    keys: Sequence[BlockKey]


class BlocksDropped(msgspec.Struct, frozen=True, gc=False):
    """These keys are not held any more. Dropping an absent key changes nothing."""

    group: int
    tier: Tier
    keys: Sequence[BlockKey]


class AllDropped(msgspec.Struct, frozen=True, gc=False):
    """Nothing is held any more, in any tier, and no group is known. The epoch goes on."""


Holds = Callable[[BlockKey], bool]
"""Whether a block is held."""


class KnownBlock(Protocol):
    """A block that some rank may have, as the writer's tree has it."""

    @property
    def engine_hash(self) -> EngineHash:
        """What most ranks call it."""
        ...

    @property
    def parent(self) -> "KnownBlock | None":
        """The block before it; of the first one, something without a parent."""
        ...


class KnownPart(NamedTuple):
    """Blocks of a prompt that some rank may have. Good until their writer goes on."""

    blocks: int
    named: Sequence[KnownBlock]
    """Every so manieth of them, from the last one on."""
    names: Sequence[EngineHash]
    """Of these."""


class KnownBlocks(Protocol):
    """Blocks of every rank of one writer."""

    def known(self, backwards: Sequence[BlockKey]) -> KnownPart:
        """Of a prompt's keys, last first, those that any rank may have."""
        ...


class SharedBlocks(Protocol):
    """What one full group holds, as its writer keeps it."""

    @property
    def tree(self) -> KnownBlocks: ...
    @property
    def reachable_entries(self) -> int:
        """Reachable blocks, each counted on every tier."""
        ...

    def depth(self, known: KnownPart) -> int | None:
        """How many of these, which `tree` told, are reachable, if all is on the fastest tier.

        None: it isn't that simple. Ask `lookups`.
        """
        ...

    def lookups(self) -> Sequence[tuple[Tier, Holds]]:
        """Tiers that hold any, fastest first: does a reachable block lie there.

        Good until the writer goes on.
        """
        ...


class BlocksShared(msgspec.Struct, frozen=True, gc=False):
    """What this full group holds is read there from now on.

    No more keys are told of it, but those dropped: that is news for others.
    """

    group: int
    blocks: SharedBlocks


Change = GroupSpec | BlocksShared | BlocksHeld | BlocksDropped | AllDropped


class RankUpdate(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one batch of events changes for one rank. Applied as a whole, in order."""

    rank: RankId
    model: str
    """Base model of the instance."""
    epoch: int
    seq: int
    """Number of the batch; what a restarted indexer resumes from."""
    changes: Sequence[Change]
    digest: int = 0
    """Of the batch's payload; like what follows only for a backend that keeps it."""
    rows: Sequence[GroupRows] = ()
    facts: RankFacts | None = None


class Prompt:
    """A prompt as the index sees it: namespace and tokens, hashed once per block size asked."""

    __slots__ = (
        "_backwards",
        "_creditable_tokens",
        "_keys",
        "_media",
        "_packed",
        "namespace",
        "tokens",
    )

    def __init__(
        self,
        namespace: Namespace,
        token_ids: Sequence[int],
        *,
        creditable_tokens: int | None = None,
        media: Sequence[MediumPlace] = (),
    ) -> None:
        """Only the first `creditable_tokens` can be matched (text before an image); None: all.

        `media`: pictures and the like whose tokens are among `token_ids`, in their order.

        Raises OverflowError or TypeError if a token id is not an unsigned 32-bit int.
        """
        self.namespace = namespace
        self.tokens = len(token_ids)
        self._packed = pack_tokens(token_ids)
        self._media = media
        self._creditable_tokens = self.tokens if creditable_tokens is None else creditable_tokens
        self._keys: dict[int, Sequence[BlockKey]] = {}
        self._backwards: dict[int, Sequence[BlockKey]] = {}

    def keys(self, block_size: int) -> Sequence[BlockKey]:
        """Keys of the prompt's full, creditable blocks."""
        keys = self._keys.get(block_size)
        if keys is None:
            extras = media_extras(self._media, block_size) if self._media else None
            keys = block_keys(root_key(self.namespace), self._packed, block_size, extras)
            credited = self._creditable_tokens // block_size
            keys = keys if credited >= len(keys) else keys[:credited]
            self._keys[block_size] = keys
        return keys

    def keys_backwards(self, block_size: int) -> Sequence[BlockKey]:
        """Keys of the blocks that an engine may take from its cache, last first."""
        keys = self._backwards.get(block_size)
        if keys is None:
            limit = self.hit_limit_blocks(block_size)
            keys = self.keys(block_size)[limit - 1 :: -1] if limit else ()
            self._backwards[block_size] = keys
        return keys

    def hit_limit_blocks(self, block_size: int) -> int:
        """Most blocks an engine takes from its cache: it always computes the last token anew."""
        return min(max(0, self.tokens - 1), self._creditable_tokens) // block_size


class PrefixMatch(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """How much of a prompt's beginning one rank holds. `tokens` never counts a gap."""

    tokens_by_tier: Mapping[Tier, int]
    """Matched tokens, each counted at the fastest tier that holds it (in the rank's first full
    group). Tiers without any are left out. Of a long match the split is told by sample: the sum is
    exact, and so is the split where a tier holds long runs."""
    block_size: int | None
    """Of the rank's first full group; None until its events have described one."""
    trust: Trust
    epoch: int
    """Another number than last time: the rank restarted, and what was known of it is void."""
    clears: int = 0
    """How often its cache was told to be empty. Another number than last time: what was on its way
    there, and computed before, is void."""
    reason: str | None = None
    """Why it isn't exact, as written; `core.pulse.SILENT`: trust is lower than was written, whoever writes
    has stopped. None: it is exact, or nobody said."""

    @property
    def tokens(self) -> int:
        """Overlap over all tiers, in tokens, at most the prompt's tokens - 1."""
        return sum(self.tokens_by_tier.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSize:
    """For metrics: keys x holders, summed over tiers and groups.

    Distinct keys are not told: neither backend could count them without reading everything.
    """

    entries: int = 0
    entries_by_rank: Mapping[RankId, int] = field(default_factory=dict)


class PrefixLookup(Protocol):
    """The side of an index that a balancer needs.

    One whose `match` answers without waiting may say so by an attribute `never_waits` that is true:
    no deadline is put around it then.
    """

    async def match(self, prompt: Prompt) -> dict[RankId, PrefixMatch]:
        """Overlap of `prompt` with every rank of its model that an epoch was opened for.

        A rank that holds nothing of it, or hasn't stored anything yet, is present with 0 tokens.
        Raises BlockIndexError; the deadline is the caller's.
        """
        ...


@runtime_checkable
class WatchedLookup(PrefixLookup, Protocol):
    """One whose writer is another process, which may end while what it wrote stays."""

    async def look(self, model: str) -> None:
        """To be called every second or so: ranks whose writer is gone are answered as such then.

        Raises BlockIndexError; the deadline is the caller's.
        """
        ...


class BlockIndex(PrefixLookup, Protocol):
    """Every implementation passes tests/conformance/block_index/.

    One that lives in the writer's process and can read its tables says so by an attribute
    `reads_tables` that is true: others are never told of `BlocksShared`.
    """

    async def apply(self, update: RankUpdate) -> None:
        """Apply one batch. Raises StaleEpochError if a newer epoch of the rank is known."""
        ...

    async def set_trust(self, rank: RankId, trust: Trust, reason: str = "") -> None:
        """State from now on how far `rank` can be believed, and why. Kept across epochs until set again.

        Readers are told the reason of what isn't exact.
        """
        ...

    async def retire(self, rank: RankId) -> None:
        """Forget a rank that left the fleet. O(1) for readers; unknown ranks are ignored."""
        ...

    async def size(self) -> IndexSize: ...


class BlockIndexError(Exception):
    """Base of all that a backend raises on purpose."""


class StaleEpochError(BlockIndexError):
    """An update of an epoch that has already ended; nothing was applied."""


class NotOwnerError(BlockIndexError):
    """Another process writes this rank now; nothing was applied."""


class IndexUnavailableError(BlockIndexError):
    """The backend didn't answer, or refused. An update may have been applied all the same."""


class IndexFullError(IndexUnavailableError):
    """The backend has no room. Dropping entries still works."""


class IndexSpoiltError(IndexUnavailableError):
    """Somebody else's value has a name of ours: it has to go, and ours be written anew."""


class IndexLostError(BlockIndexError):
    """The backend doesn't have what was written before: the rank has to be written anew."""
