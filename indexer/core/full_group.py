"""One full-attention group of one rank: from events and engine hashes to blocks.

Rules:

1. A known hash is never hashed again. A new one gets its key from its parent's key and its
   tokens; under an unknown parent it is parked (`core.orphans`).
2. A removal takes one copy; a removal of what isn't there is counted and changes nothing.
3. With a journal, the newest row of every hash that a batch touched is told once.
4. Tokens that don't fill the hashes exactly can't be aligned: then only known hashes count.

What is held, how often, and what can be reached is kept by `core.held_blocks`.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from struct import Struct
from struct import error as StructError  # noqa: N812 - it is a class

from indexer.core.block_rows import BlockRow
from indexer.core.block_tree import TIERS, BlockTree, Node
from indexer.core.events import BlockStored
from indexer.core.extra_keys import split_extra_keys
from indexer.core.hashing import (
    TOKEN_BYTES,
    Namespace,
    block_key,
    block_keys,
    pack_tokens,
    root_key,
)
from indexer.core.held_blocks import HeldBlocks
from indexer.core.index import GroupSpec, SharedBlocks
from indexer.core.orphans import Orphans, ParkedBlock
from indexer.core.types import BlockKey, EngineHash, Tier

_MOST_ROOTS = 1024
"""Root keys that are remembered: a service may name a new adapter for each of its users."""


class FullGroup:
    """What one full-attention group holds."""

    __slots__ = (
        "_block_bytes",
        "_counts",
        "_held",
        "_model",
        "_named",
        "_pack_block",
        "_plain_roots",
        "_tree",
        "block_size",
        "changes",
        "orphans",
        "shared",
        "spec",
    )

    def __init__(
        self,
        spec: GroupSpec,
        *,
        model: str,
        tree: BlockTree,
        counts: Counter[str],
        max_parked_blocks: int,
    ) -> None:
        self.spec = spec
        self.orphans = Orphans(max_parked_blocks)
        self.block_size = spec.block_size
        self._block_bytes = spec.block_size * TOKEN_BYTES
        self._pack_block = Struct(f"<{spec.block_size}I").pack
        self._held = HeldBlocks(tree)
        self.changes = self._held.changes
        self.shared: SharedBlocks | None = self._held if tree.is_read else None
        """Where an index may read what is held here."""
        self._tree = tree
        self._model = model
        self._counts = counts
        self._named: list[EngineHash] | None = None
        self._plain_roots: dict[str | None, BlockKey] = {}
        """Root keys by adapter, without a salt, as far as they are remembered."""

    @property
    def held(self) -> HeldBlocks:
        """What is held, for who weighs what legs have shown."""
        return self._held

    @property
    def reachable_blocks(self) -> int:
        return self._held.reachable_blocks

    @property
    def held_hashes(self) -> int:
        """For `core.bound`: hashes, each counted on every tier."""
        return self._held.held_hashes

    @property
    def parked(self) -> int:
        """Blocks that wait for their parent."""
        return len(self.orphans.blocks)

    def evict(self, most: int, *, by_force: bool) -> int:
        """Drop up to `most` of the oldest hashes; returns how many."""
        evicted = self._held.evict(most, by_force=by_force)
        if self._held.touched is not None:
            self._held.touched.update(evicted)
        return len(evicted)

    def drop(self, engine_hash: EngineHash, tier: Tier) -> None:
        """Drop all copies of a hash, just announced, on a tier."""
        self._held.drop(engine_hash, TIERS.index(tier))

    def clear(self) -> None:
        """Everything went."""
        self._held.clear()
        self.orphans.clear()
        self.take_named()
        self.take_touched()

    # Rows.

    def keep_rows(self) -> None:
        """From now on remember which hashes were touched."""
        self._held.touched = set()

    def take_touched(self) -> Iterable[EngineHash]:
        """Hashes touched since the last call."""
        touched = self._held.touched
        if touched is None:
            return ()
        self._held.touched = set()
        return touched

    def plain_rows(
        self, hashes: Iterable[EngineHash]
    ) -> tuple[list[int], list[EngineHash], Iterable[EngineHash]]:
        """Rows of blocks with one copy, on the fastest tier, under a block: hash, key and parent.

        Then hashes that are gone, and those for which `row` has to be asked.
        """
        return self._held.plain_rows(hashes)

    def row(self, engine_hash: EngineHash) -> BlockRow | None:
        """What there is to keep of a hash; None: nothing."""
        node = self._held.find(engine_hash)
        if node is None or node.parent is None:
            return None
        is_first = node.parent.parent is None
        copies = self._held.copies(engine_hash)
        return BlockRow(engine_hash, node.key, node.parent.key, is_first, copies)

    def known_hashes(self) -> Iterator[EngineHash]:
        """Every hash that has a row."""
        return self._held.hashes()

    def held_keys(self, tier: int) -> Sequence[BlockKey]:
        """Keys that the index should have on `tier`."""
        return self._held.reachable_keys(tier)

    @property
    def entries(self) -> int:
        """How many keys those are, over all tiers."""
        return self._held.reachable_entries

    def restore(self, rows: Iterable[BlockRow]) -> bool:
        """Take over rows, which the index has already; False if some hang in the air."""
        ready: list[tuple[Node, BlockRow]] = []
        waiting: dict[BlockKey | None, list[BlockRow]] = {}
        for row in rows:
            if row.is_first and row.parent is not None:
                ready.append((self._tree.root(row.parent), row))
            else:
                waiting.setdefault(row.parent, []).append(row)
        while ready:
            above, row = ready.pop()
            if row.key is None:
                return False
            node = self._tree.find_or_add(above, row.key, row.engine_hash)
            self._hold_copies(row.engine_hash, node, row.copies)
            if not any(row.copies):
                self._held.remember(row.engine_hash, node)
            ready += [(node, child) for child in waiting.pop(row.key, ())]
        self.changes.clear()
        return not waiting

    # Events.

    def track_names(self) -> None:
        """From now on remember which hashes got a key, for window groups that wait for it."""
        if self._named is None:
            self._named = []

    def take_named(self) -> Sequence[EngineHash]:
        """Hashes that got a key since the last call."""
        named, self._named = self._named, None if self._named is None else []
        return named or ()

    def key_of(self, engine_hash: EngineHash) -> BlockKey | None:
        node = self._held.find(engine_hash)
        return None if node is None else node.key

    def has_copy(self, engine_hash: EngineHash, tier: int) -> bool:
        """Whether a removal would find one, parked or not."""
        is_held = self._held.copies(engine_hash)[tier] > 0
        return is_held or self.orphans.has_copy(engine_hash, tier)

    def tracked_entries(self) -> int:
        """Entries of all internal tables; 0 when nothing is held and nothing parked."""
        return len(self.orphans) + self._held.tracked_entries()

    def store(self, event: BlockStored, tier: int) -> None:
        """Blocks with tokens were stored. The event is known to be consistent in itself."""
        hashes, token_ids, extra_keys = event.hashes, event.token_ids, event.extra_keys
        try:
            if len(hashes) == 1 and len(token_ids) == self.block_size:
                packed = self._pack_block(*token_ids)
            else:
                packed = pack_tokens(token_ids)
        except (OverflowError, TypeError, StructError):
            self._counts["bad_token"] += 1
            return
        if (
            len(hashes) > 1
            or tier
            or event.parent is None
            or (extra_keys and extra_keys[0])
            or len(packed) != self._block_bytes
            or not self._held.add_one(event.parent, hashes[0], packed)
        ):
            self._add(event, packed, tier)
        if self._held.touched is not None:
            self._held.touched.update(hashes)
        if self._named is not None:
            self._named += hashes
        if self.orphans.blocks:
            self._attach_orphans(hashes)

    def recall(self, hashes: Sequence[EngineHash], tier: int) -> None:
        """Blocks were stored without tokens: only known hashes mean something."""
        unknown = self._hold_known(hashes, tier)
        if unknown:
            self._counts["unknown_placeholder"] += unknown

    def remove(self, hashes: Sequence[EngineHash], tier: int) -> None:
        """One copy of each hash went."""
        held = self._held
        if held.touched is not None:
            held.touched.update(hashes)
        for engine_hash in held.take(hashes, tier):
            if not self.orphans.count_down(engine_hash, tier):
                self._counts["unknown_removal"] += 1

    def _add(self, event: BlockStored, packed: bytes, tier: int) -> None:
        hashes, parent = event.hashes, event.parent
        if len(packed) != len(hashes) * self._block_bytes:
            self._counts["unaligned_tokens"] += 1
            self._hold_known(hashes, tier)
            return
        salt, extras = split_extra_keys(event)
        node = self._root(event.lora, salt) if parent is None else self._find_parent(parent)
        if node is None or extras or not self._extend(node, hashes, packed, tier):
            self._place(event, node, packed, extras, tier)
            if parent is None and node is not None:
                self._tree.free(node)

    def _find_parent(self, parent: EngineHash) -> Node | None:
        node = self._held.find(parent)
        if node is not None:
            self._held.extend(node.key)
        return node

    def _extend(self, node: Node, hashes: Sequence[EngineHash], packed: bytes, tier: int) -> bool:
        """Add the blocks at once if all are new; False if some aren't."""
        if self._held.knows_any(hashes):
            return False
        keys = block_keys(node.key, packed, self.block_size)
        return self._held.add_chain(node, hashes, keys, tier)

    def _place(
        self,
        event: BlockStored,
        node: Node | None,
        packed: bytes,
        extras: Mapping[int, bytes],
        tier: int,
    ) -> None:
        """Place block by block: some are known, some new, some without a known parent."""
        width = self._block_bytes
        previous = event.parent
        for number, engine_hash in enumerate(event.hashes):
            block = packed[number * width : (number + 1) * width]
            known = self._held.find(engine_hash)
            if known is None and node is not None:
                key = block_key(node.key, block, extras.get(number, b""))
                known = self._tree.find_or_add(node, key, engine_hash)
            if known is not None:
                self._held.hold(engine_hash, known, tier)
            elif previous is not None and not self.orphans.count_up(engine_hash, tier):
                parked = ParkedBlock(parent=previous, packed=block, extras=extras.get(number, b""))
                self._park(engine_hash, parked, tier)
            node, previous = known, engine_hash

    def _root(self, lora: str | None, salt: str | None) -> Node:
        key = self._plain_roots.get(lora) if salt is None else None
        if key is None:
            key = root_key(Namespace(model=self._model, lora=lora, cache_salt=salt))
            if salt is None:
                if len(self._plain_roots) >= _MOST_ROOTS:
                    self._plain_roots.clear()  # worked out again for those that are still used
                self._plain_roots[lora] = key
        return self._tree.root(key)

    def _hold_known(self, hashes: Sequence[EngineHash], tier: int) -> int:
        """Count a copy of each known hash. Returns how many are not known."""
        unknown = 0
        if self._held.touched is not None:
            self._held.touched.update(hashes)
        for engine_hash in hashes:
            node = self._held.find(engine_hash)
            if node is not None:
                self._held.hold(engine_hash, node, tier)
            elif not self.orphans.count_up(engine_hash, tier):
                unknown += 1
        return unknown

    def _park(self, engine_hash: EngineHash, block: ParkedBlock, tier: int) -> None:
        block.copies[tier] = 1
        self._counts["orphan_parked"] += 1
        evicted = self.orphans.park(engine_hash, block)
        if evicted:
            self._counts["orphan_evicted"] += evicted

    def _attach_orphans(self, hashes: Sequence[EngineHash]) -> None:
        """Place what waited for these hashes, then what waited for that."""
        waiting = list(hashes)
        while waiting:
            parent = waiting.pop()
            node = self._held.find(parent)
            if node is None:
                continue
            own = self.orphans.take(parent)
            if own is not None:
                self._hold_copies(parent, node, own.copies)
            for child, block in self.orphans.take_children(parent):
                below = self._held.find(child)  # stored elsewhere since: that is what it means
                if below is None:
                    key = block_key(node.key, block.packed, block.extras)
                    below = self._tree.find_or_add(node, key, child)
                self._hold_copies(child, below, block.copies)
                waiting.append(child)
                if self._named is not None:
                    self._named.append(child)
                if self._held.touched is not None:
                    self._held.touched.add(child)

    def _hold_copies(self, engine_hash: EngineHash, node: Node, copies: Sequence[int]) -> None:
        for tier, count in enumerate(copies):
            if count:
                self._held.hold(engine_hash, node, tier, count)
