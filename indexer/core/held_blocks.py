"""Which blocks one group of one rank holds, where, how often, and which of them can be reached.

Rules:

1. Copies are counted per (tier, engine hash), since engines announce per physical block.
2. Different engine hashes may mean one block (a salt we can't see, a lookahead): such twins share
   a node, which is held while any of them is.
3. A block is reachable while it and all above it up to the root are held, on any tier. Only
   reachable blocks are told to the index: held means reachable. When a middle block goes, its
   descendants are lost with it, stay here, and are gained again when it returns.
4. A hash whose last copy went is remembered (a ghost) only while the rank has descendants of its
   block, so that a block stored under it is still placed. So a block that is here has its parent
   here, and an empty rank is an empty table.
5. What is gained and lost in one batch is reported net, once (`core.net_changes`).
6. A block that is doubted is kept and counted, and isn't reachable. Storing it again ends the doubt: the
   copy that was there was none.

Cost: one dict entry per hash and tier; what a block is and what follows it is in the shared tree
(`core.block_tree`). Everything else is kept only for blocks that need it. Losing or gaining
costs a step per descendant; so does removing a block, per child that it has on any rank.
"""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from xxhash import xxh3_64_intdigest

from indexer.core.block_tree import TIERS, Node
from indexer.core.held_tables import Ghost, HeldTables
from indexer.core.types import BlockKey, EngineHash

_EVICTION_ROUNDS = 8


class HeldBlocks(HeldTables):
    """Blocks of one full-attention group of one rank."""

    __slots__ = ()

    # Storing.

    def add_one(self, parent: EngineHash, engine_hash: EngineHash, packed: bytes) -> bool:
        """Add one plain block to the fastest tier. False: nothing done, it isn't that simple.

        It does what `add_chain` does, for the commonest event of all.
        """
        held, cpu, storage = self._held
        above = held.get(parent)
        if above is None or engine_hash in held or self._cut or self._ghosts:
            return False
        if (cpu and engine_hash in cpu) or (storage and engine_hash in storage):
            return False
        key = BlockKey(xxh3_64_intdigest(packed, above.key))
        if above.children is None:
            held[engine_hash] = self._nodes[key] = above.children = Node(key, engine_hash, above)
        else:
            node = self.tree.find_or_add(above, key, engine_hash)
            if node.engine_hash != engine_hash or self._has_twin(key):
                return False
            node.entries += 1
            key = node.key
            held[node.engine_hash] = node
        self.reachable_blocks += 1
        gained, lost = self._gained, self._lost
        if lost and key in lost:
            lost.discard(key)
        elif gained is not None:
            gained.add(key)
        return True

    def add_chain(
        self, above: Node, hashes: Sequence[EngineHash], keys: Sequence[BlockKey], tier: int
    ) -> bool:
        """Add a chain of blocks under `above`, of hashes that are not known. False: some are twins."""
        nodes = self._nodes
        shared: list[Node] = []
        last = above
        for engine_hash, key in zip(hashes, keys, strict=True):
            node = nodes.get(key)
            if node is None:
                break
            if not node.entries:
                node.engine_hash = engine_hash
            elif node.engine_hash != engine_hash or self._has_twin(key):
                return False
            shared.append(node)
            last = node
        held = self._held[tier]
        if shared:
            for node in shared:
                node.entries += 1
                held[node.engine_hash] = node
            hashes, keys = hashes[len(shared) :], keys[len(shared) :]
        if hashes:
            self.tree.grow(last, hashes, keys, held)
        added = [*(node.key for node in shared), *keys] if shared else keys
        self._add_below(above, added, tier)
        return True

    def hold(self, engine_hash: EngineHash, node: Node, tier: int, copies: int = 1) -> None:
        """`copies` more of a hash lie on `tier`."""
        held = self._held[tier]
        if engine_hash in held:
            surplus = self._surplus[tier]
            if node.key in self._doubted:
                self.believe([node.key])
                if copies == 1:
                    return
                copies -= 1
            surplus[engine_hash] = surplus.get(engine_hash, 0) + copies
            return
        was_on_tier, was_held = self._lies_on(node, tier), self.is_held(node)
        node.entries += 1
        if engine_hash == node.engine_hash:
            engine_hash = node.engine_hash
        else:
            twins = self._twins[tier]
            twins[node.key] = twins.get(node.key, 0) + 1
        held[engine_hash] = node
        if copies > 1:
            self._surplus[tier][engine_hash] = copies - 1
        if not was_held:
            self._gain_block(node, tier)
        elif not was_on_tier and node.key not in self._cut:
            self._further_entries += 1
            self.changes.gain(node.key, tier)

    def remember(self, engine_hash: EngineHash, node: Node) -> None:
        """Keep a hash without copies, for descendants that will be added."""
        self._ghosts[engine_hash] = node
        self._ghost_of[node.key] = Ghost(engine_hash, 0)
        node.entries += 1
        self._count_child(node)

    # Removing.

    def take(self, hashes: Sequence[EngineHash], tier: int) -> Sequence[EngineHash]:
        """One copy of each hash less. Returns those of which there was none."""
        surplus, pop = self._surplus[tier], self._held[tier].pop
        missing: list[EngineHash] = []
        for engine_hash in hashes:
            if surplus and engine_hash in surplus:
                _decrement(surplus, engine_hash)
                continue
            node = pop(engine_hash, None)
            if node is None:
                missing.append(engine_hash)
            elif node.children is not None or tier or not self._drop_leaf(node):
                self._drop(engine_hash, node, tier)
        return missing

    def _drop_leaf(self, node: Node) -> bool:
        """Do what `_drop` does, where this one copy is all that was known of the block.

        False: nothing done, there may be more.
        """
        _, cpu, storage = self._held
        if cpu or storage or self._ghosts or self._cut or self._twins[0]:
            return False
        key, gained = node.key, self._gained
        if gained and key in gained:
            gained.discard(key)
        else:
            self._lost.add(key)
        self.reachable_blocks -= 1
        if node.entries > 1:
            node.entries -= 1
            return True
        node.entries = 0
        parent = node.parent
        if parent is not None and parent.children is node and parent.entries:
            parent.children = None
            self._nodes.pop(key, None)
        else:
            self.tree.free(node)
        return True

    def _drop(self, engine_hash: EngineHash, node: Node, tier: int) -> None:
        """The last copy of a hash left a tier."""
        if self._twins[tier] and self._drop_twin(engine_hash, node, tier):
            node.entries -= 1
            return
        is_reachable = node.key not in self._cut
        if is_reachable:
            self.changes.lose(node.key, tier)
        if self.is_held(node):
            node.entries -= 1
            self._further_entries -= is_reachable
        else:
            self._lose_block(engine_hash, node, is_reachable=is_reachable)

    # Doubting.

    def doubt(self, hashes: Iterable[EngineHash]) -> int:
        """Count these no more until they are stored again, or believed; returns how many there were.

        A hash of several copies on the fastest tier is spared: one of them may be newer.
        """
        doubted = 0
        for engine_hash in hashes:
            node = self._held[0].get(engine_hash)
            if node is None or node.key in self._doubted or engine_hash in self._surplus[0]:
                continue
            doubted += 1
            self._doubted.add(node.key)
            if node.key not in self._cut:
                self._turn(node, is_reachable=False)
                self._spread(node, is_reachable=False)
        return doubted

    def believe(self, keys: Iterable[BlockKey]) -> int:
        """Count these again; returns how many were doubted."""
        believed = 0
        for key in keys:
            if key not in self._doubted:
                continue
            believed += 1
            self._doubted.discard(key)
            node = self._nodes[key]
            if node.parent is None or self._is_reachable(node.parent):
                self._turn(node, is_reachable=True)
                self._spread(node, is_reachable=True)
        return believed

    def extend(self, key: BlockKey) -> None:
        """A block is stored under this one: who does so has it."""
        if self._doubted and self.believe_in(key):
            self.extended.append(key)

    def believe_in(self, key: BlockKey) -> int:
        """A block proved to be there, and so did all above it."""
        node, above = (self._nodes.get(key) if self._doubted else None), list[BlockKey]()
        while node is not None:
            above.append(node.key)
            node = node.parent
        return self.believe(reversed(above))

    def evict(self, most: int, *, by_force: bool = False) -> list[EngineHash]:
        """Drop up to `most` hashes from the fullest tier, and return them: the oldest go first.

        One whose block has descendants here is spared and counts as new, unless `by_force`: of a
        conversation the end goes first, of all conversations the oldest. Only some are looked at.
        """
        tier = max(range(len(TIERS)), key=lambda each: len(self._held[each]))
        held, evicted = self._held[tier], list[EngineHash]()
        for _ in range(1 if by_force else _EVICTION_ROUNDS):
            for engine_hash, node in reversed(list(islice(held.items(), most - len(evicted)))):
                if by_force or not self._here(node):
                    self._evict_upwards(engine_hash, node, tier, evicted, most)
                else:
                    held[engine_hash] = held.pop(engine_hash)
        return evicted

    def drop(self, engine_hash: EngineHash, tier: int) -> None:
        """Drop all copies of a hash on a tier."""
        self._surplus[tier].pop(engine_hash, None)
        self.take((engine_hash,), tier)

    def _evict_upwards(
        self, engine_hash: EngineHash, node: Node, tier: int, evicted: list[EngineHash], most: int
    ) -> None:
        """Drop a hash, and of what lies above it, which is older, what nothing else hangs on."""
        held = self._held[tier]
        while len(evicted) < most and held.get(engine_hash) is node:
            parent = node.parent
            self.drop(engine_hash, tier)
            evicted.append(engine_hash)
            if parent is None or self._here(parent):
                return
            engine_hash, node = parent.engine_hash, parent

    # Inside.

    def _add_below(self, above: Node, keys: Sequence[BlockKey], tier: int) -> None:
        """A chain of blocks that were not here is held under `above` now."""
        ghost = self._ghost_of.get(above.key) if self._ghost_of else None
        if ghost is not None:
            ghost.children += 1
        if self._is_reachable(above):
            self.reachable_blocks += len(keys)
            self.changes.gain_all(keys, tier)
        else:
            self._cut.update(keys)

    def _count_child(self, node: Node) -> None:
        """A block that was not here is held or remembered now."""
        if self._ghost_of and node.parent is not None:
            ghost = self._ghost_of.get(node.parent.key)
            if ghost is not None:
                ghost.children += 1

    def _gain_block(self, node: Node, tier: int) -> None:
        """A block that was not held is held now."""
        ghost = self._ghost_of.pop(node.key, None)
        if ghost is None:
            self._count_child(node)
        else:
            self._forget(ghost, node)
        parent = node.parent
        if parent is not None and not self._is_reachable(parent):
            self._cut.add(node.key)
            return
        self.reachable_blocks += 1
        self.changes.gain(node.key, tier)
        if ghost is not None:
            self._spread(node, is_reachable=True)

    def _lose_block(self, engine_hash: EngineHash, node: Node, *, is_reachable: bool) -> None:
        """The last copy of a block went."""
        self._doubted.discard(node.key)
        if is_reachable:
            self.reachable_blocks -= 1
        else:
            self._cut.discard(node.key)
        if node.children is not None:
            below = self._here(node)
            if below:
                self._ghosts[engine_hash] = node
                self._ghost_of[node.key] = Ghost(engine_hash, len(below))
                if is_reachable:
                    self._spread(node, is_reachable=False)
                return
        self._leave(node)

    def _leave(self, node: Node) -> None:
        """Neither held nor needed by a descendant; nor is, maybe, what lies above it."""
        while True:
            node.entries -= 1
            parent = node.parent
            if not node.entries:
                self.tree.free(node)
            ghost = self._ghost_of.get(parent.key) if parent is not None else None
            if parent is None or ghost is None:
                return
            ghost.children -= 1
            if ghost.children:
                return
            del self._ghost_of[parent.key]
            self._forget(ghost, None)
            node = parent

    def _forget(self, ghost: Ghost, node: Node | None) -> None:
        del self._ghosts[ghost.engine_hash]
        if self.touched is not None:
            self.touched.add(ghost.engine_hash)
        if node is not None:
            node.entries -= 1

    def _spread(self, node: Node, *, is_reachable: bool) -> None:
        """Tell the held descendants whether `node` can be reached."""
        changed = self._here(node)
        while changed:
            below = changed.pop()
            if not self.is_held(below) or below.key in self._doubted:
                continue  # It passes nothing on, nor did it before.
            self._turn(below, is_reachable=is_reachable)
            changed += self._here(below)

    def _turn(self, node: Node, *, is_reachable: bool) -> None:
        """A held block can be reached now, or no more."""
        if is_reachable:
            self._cut.discard(node.key)
        else:
            self._cut.add(node.key)
        report = self.changes.gain if is_reachable else self.changes.lose
        step = 1 if is_reachable else -1
        tiers = [tier for tier in range(len(TIERS)) if self._lies_on(node, tier)]
        self.reachable_blocks += step
        self._further_entries += step * (len(tiers) - 1)
        for tier in tiers:
            report(node.key, tier)

    def _drop_twin(self, engine_hash: EngineHash, node: Node, tier: int) -> bool:
        """A hash left a tier where some nodes have twins. Whether others still hold its node."""
        if engine_hash != node.engine_hash:
            _decrement(self._twins[tier], node.key)
        return self._lies_on(node, tier)


def _decrement(counts: dict[Any, int], key: object) -> None:
    if counts[key] > 1:
        counts[key] -= 1
    else:
        del counts[key]
