"""One full-attention group of one rank: from engine hashes to shown block keys.

Rules:

1. Copies are counted per (tier, engine hash), since engines announce per physical block. A
   removal takes one; a removal of what isn't there is counted and changes nothing.
2. A known hash is never hashed again. A new one gets its key from its parent's key and its
   tokens; under an unknown parent it is parked (`core.orphans`).
3. Different engine hashes may mean one key (a salt we can't see, a lookahead): such twins share
   a node, which is held while any of them is.
4. A hash whose last copy went is remembered only while its node is kept for descendants, so that
   a block stored under it is still placed.
5. With a journal, the newest row of every hash that a batch touched is told once.
6. Tokens that don't fill the hashes exactly can't be aligned: then only known hashes count.

Cost: a dict entry per hash and tier; everything else is kept only for the blocks that need it.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

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
from indexer.core.index import GroupSpec
from indexer.core.orphans import Orphans, ParkedBlock
from indexer.core.types import BlockKey, EngineHash


class FullGroup:
    """What one full-attention group holds."""

    __slots__ = (
        "_counts",
        "_ghost_hashes",
        "_ghosts",
        "_held",
        "_model",
        "_named",
        "_plain_roots",
        "_surplus",
        "_touched",
        "_twins",
        "changes",
        "orphans",
        "spec",
        "tree",
    )

    def __init__(
        self, spec: GroupSpec, *, model: str, counts: Counter[str], max_parked_blocks: int
    ) -> None:
        self.spec = spec
        self.tree = BlockTree()
        self.changes = self.tree.changes
        self.orphans = Orphans(max_parked_blocks)
        self._model = model
        self._counts = counts
        self._held: tuple[dict[EngineHash, Node], ...] = tuple({} for _ in TIERS)
        """Per tier: hashes with at least one copy."""
        self._surplus: tuple[dict[EngineHash, int], ...] = tuple({} for _ in TIERS)
        """Per tier: copies beyond the first."""
        self._twins: dict[tuple[Node, int], int] = {}
        """(node, tier) to how many hashes beyond the first hold it."""
        self._ghosts: dict[EngineHash, Node] = {}
        self._ghost_hashes: dict[Node, EngineHash] = {}
        self._named: list[EngineHash] | None = None
        self._touched: set[EngineHash] | None = None
        """Hashes whose rows may have changed; None: nobody keeps rows."""
        self._plain_roots: dict[str | None, BlockKey] = {}
        """Root keys by adapter, without a salt: as many as the engine has adapters."""

    def clear(self) -> None:
        """Everything went."""
        self.tree.clear()
        self.orphans.clear()
        for table in self._tables():
            table.clear()
        self.take_named()
        self.take_touched()

    # Rows.

    def keep_rows(self) -> None:
        """From now on remember which hashes were touched."""
        self._touched = set()

    def take_touched(self) -> Iterable[EngineHash]:
        """Hashes touched since the last call."""
        touched, self._touched = self._touched, None if self._touched is None else set()
        return touched or ()

    def plain_rows(
        self, hashes: Iterable[EngineHash]
    ) -> tuple[list[int], list[EngineHash], Iterable[EngineHash]]:
        """Rows of blocks with one copy, on the fastest tier, under a block: hash, key and parent.

        Then hashes that are gone, and those for which `row` has to be asked.
        """
        keys, parents = self.tree.columns()
        fastest, *slower = self._held
        tables: tuple[dict[EngineHash, Any], ...] = (*slower, *self._surplus, self._ghosts)
        others = [table for table in tables if table]
        plain: list[int] = []
        gone: list[EngineHash] = []
        rest: list[EngineHash] = []
        for engine_hash in hashes:
            if others and any(engine_hash in table for table in others):
                rest.append(engine_hash)
                continue
            node = fastest.get(engine_hash)
            if node is None:
                gone.append(engine_hash)
                continue
            above = parents[node]
            if parents[above]:
                plain += (engine_hash, keys[node], keys[above])
            else:
                rest.append(engine_hash)
        return plain, gone, rest

    def row(self, engine_hash: EngineHash) -> BlockRow | None:
        """What there is to keep of a hash; None: nothing."""
        node = self._node_of(engine_hash)
        if node is None:
            return None
        parent, is_first = self.tree.parent(node)
        gpu, cpu, storage = (
            1 + (surplus.get(engine_hash, 0) if surplus else 0) if engine_hash in held else 0
            for held, surplus in zip(self._held, self._surplus, strict=True)
        )
        return BlockRow(engine_hash, self.tree.key(node), parent, is_first, (gpu, cpu, storage))

    def known_hashes(self) -> Iterator[EngineHash]:
        """Every hash that has a row."""
        return iter({hash_ for table in (*self._held, self._ghosts) for hash_ in table})

    def held_keys(self, tier: int) -> Sequence[BlockKey]:
        """Keys that the index should have on `tier`."""
        return self.tree.reachable_keys(tier)

    def restore(self, rows: Iterable[BlockRow]) -> bool:
        """Take over rows, which the index has already; False if some hang in the air."""
        ready: list[tuple[Node, BlockRow]] = []
        waiting: dict[BlockKey | None, list[BlockRow]] = {}
        for row in rows:
            if row.is_first and row.parent is not None:
                ready.append((self.tree.find_or_add_root(row.parent), row))
            else:
                waiting.setdefault(row.parent, []).append(row)
        while ready:
            above, row = ready.pop()
            if row.key is None:
                return False
            node = self.tree.find_or_add(above, row.key)
            self._count_copies(row.engine_hash, node, row.copies)
            if not any(row.copies):
                self._ghosts[row.engine_hash] = node
                self._ghost_hashes[node] = row.engine_hash
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
        node = self._node_of(engine_hash)
        return None if node is None else self.tree.key(node)

    def tracked_entries(self) -> int:
        """Entries of all internal tables; 0 when nothing is held and nothing parked."""
        tables = self._tables()
        return len(self.tree) + len(self.orphans) + sum(len(table) for table in tables)

    def store(self, event: BlockStored, tier: int) -> None:
        """Blocks with tokens were stored. The event is known to be consistent in itself."""
        try:
            packed = pack_tokens(event.token_ids)
        except (OverflowError, TypeError):
            self._counts["bad_token"] += 1
            return
        hashes, parent = event.hashes, event.parent
        if len(event.token_ids) != len(hashes) * self.spec.block_size:
            self._counts["unaligned_tokens"] += 1
            self._count_known(hashes, tier)
            return
        salt, extras = split_extra_keys(event)
        node = self._root(event.lora, salt) if parent is None else self._node_of(parent)
        if node is None or extras or not self._extend(node, hashes, packed, tier):
            self._place(event, node, packed, extras, tier)
            if parent is None and node is not None:
                self.tree.discard_root(node)
        if self._named is not None:
            self._named += hashes
        if self._touched is not None:
            self._touched.update(hashes)
        if self.orphans:
            self._attach_orphans(hashes)

    def recall(self, hashes: Sequence[EngineHash], tier: int) -> None:
        """Blocks were stored without tokens: only known hashes mean something."""
        unknown = self._count_known(hashes, tier)
        if unknown:
            self._counts["unknown_placeholder"] += unknown

    def remove(self, hashes: Sequence[EngineHash], tier: int) -> None:
        """One copy of each hash went."""
        held, surplus = self._held[tier], self._surplus[tier]
        if self._touched is not None:
            self._touched.update(hashes)
        for engine_hash in hashes:
            if surplus and engine_hash in surplus:
                _decrement(surplus, engine_hash)
                continue
            node = held.pop(engine_hash, None)
            if node is not None:
                self._release(engine_hash, node, tier)
            elif not self.orphans.count_down(engine_hash, tier):
                self._counts["unknown_removal"] += 1

    def _tables(self) -> tuple[dict[Any, Any], ...]:
        return (*self._held, *self._surplus, self._twins, self._ghosts, self._ghost_hashes)

    def _extend(self, node: Node, hashes: Sequence[EngineHash], packed: bytes, tier: int) -> bool:
        """Add the blocks at once if all are new; False if some aren't. The common case."""
        tree, held = self.tree, self._held[tier]
        if len(hashes) == 1:
            only = hashes[0]
            key = block_key(tree.key(node), packed)
            if only in held or tree.has(key) or self._node_of(only) is not None:
                return False
            held[only] = tree.add_leaf(node, key, tier)
            return True
        for known in (*self._held, self._ghosts):
            if known and not known.keys().isdisjoint(hashes):
                return False
        keys = block_keys(tree.key(node), packed, self.spec.block_size)
        if not tree.lacks(keys):
            return False
        held.update(zip(hashes, tree.add_chain(node, keys, tier), strict=True))
        return True

    def _place(
        self,
        event: BlockStored,
        node: Node | None,
        packed: bytes,
        extras: Mapping[int, bytes],
        tier: int,
    ) -> None:
        """Place block by block: some are known, some new, some without a known parent."""
        width = self.spec.block_size * TOKEN_BYTES
        previous = event.parent
        for number, engine_hash in enumerate(event.hashes):
            block = packed[number * width : (number + 1) * width]
            known = self._node_of(engine_hash)
            if known is None and node is not None:
                key = block_key(self.tree.key(node), block, extras.get(number, b""))
                known = self.tree.find_or_add(node, key)
            if known is not None:
                self._count_up(engine_hash, known, tier)
            elif previous is not None and not self.orphans.count_up(engine_hash, tier):
                parked = ParkedBlock(parent=previous, packed=block, extras=extras.get(number, b""))
                self._park(engine_hash, parked, tier)
            node, previous = known, engine_hash

    def _root(self, lora: str | None, salt: str | None) -> Node:
        key = self._plain_roots.get(lora) if salt is None else None
        if key is None:
            key = root_key(Namespace(model=self._model, lora=lora, cache_salt=salt))
            if salt is None:
                self._plain_roots[lora] = key
        return self.tree.find_or_add_root(key)

    def _node_of(self, engine_hash: EngineHash) -> Node | None:
        for held in self._held:
            node = held.get(engine_hash)
            if node is not None:
                return node
        return self._ghosts.get(engine_hash)

    def _count_known(self, hashes: Sequence[EngineHash], tier: int) -> int:
        """Count a copy of each known hash. Returns how many are not known."""
        unknown = 0
        if self._touched is not None:
            self._touched.update(hashes)
        for engine_hash in hashes:
            node = self._node_of(engine_hash)
            if node is not None:
                self._count_up(engine_hash, node, tier)
            elif not self.orphans.count_up(engine_hash, tier):
                unknown += 1
        return unknown

    def _count_up(self, engine_hash: EngineHash, node: Node, tier: int, copies: int = 1) -> None:
        held = self._held[tier]
        if engine_hash in held:
            surplus = self._surplus[tier]
            surplus[engine_hash] = surplus.get(engine_hash, 0) + copies
            return
        held[engine_hash] = node
        if copies > 1:
            self._surplus[tier][engine_hash] = copies - 1
        if not self.tree.hold(node, tier):
            twins = (node, tier)
            self._twins[twins] = self._twins.get(twins, 0) + 1
        elif self._ghost_hashes:
            self._forget_ghost(node)

    def _release(self, engine_hash: EngineHash, node: Node, tier: int) -> None:
        """The last copy of a hash went from a tier."""
        if self._twins and (node, tier) in self._twins:
            _decrement(self._twins, (node, tier))
            return
        left = self.tree.release(node, tier)
        if left is None:
            if not self.tree.is_held(node):
                self._ghosts[engine_hash] = node
                self._ghost_hashes[node] = engine_hash
        elif left and self._ghost_hashes:
            for gone in left:
                self._forget_ghost(gone)

    def _forget_ghost(self, node: Node) -> None:
        engine_hash = self._ghost_hashes.pop(node, None)
        if engine_hash is not None:
            del self._ghosts[engine_hash]
            if self._touched is not None:
                self._touched.add(engine_hash)

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
            node = self._node_of(parent)
            if node is None:
                continue
            own = self.orphans.take(parent)
            if own is not None:
                self._count_copies(parent, node, own.copies)
            for child, block in self.orphans.take_children(parent):
                key = block_key(self.tree.key(node), block.packed, block.extras)
                self._count_copies(child, self.tree.find_or_add(node, key), block.copies)
                waiting.append(child)
                if self._named is not None:
                    self._named.append(child)
                if self._touched is not None:
                    self._touched.add(child)

    def _count_copies(self, engine_hash: EngineHash, node: Node, copies: Sequence[int]) -> None:
        for tier, count in enumerate(copies):
            if count:
                self._count_up(engine_hash, node, tier, count)


def _decrement(counts: dict[Any, int], key: object) -> None:
    if counts[key] > 1:
        counts[key] -= 1
    else:
        del counts[key]
