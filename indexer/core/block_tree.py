"""Which blocks of one group lie where on one rank, and which of them can be reached.

A tree of own block keys. Roots are namespaces; a node is a block; its tiers are a set of bits.

Rules:

1. A node is reachable while it and every node up to its root is held on some tier. Only
   reachable blocks are told to the index: held means reachable.
2. When a middle block goes, its descendants are lost with it, stay in the tree, and are gained
   again when it returns.
3. A node that is not held stays only while it has descendants; then it leaves, and so does
   everything above it that is needed no more. An empty rank is an empty tree.
4. What is gained and lost in one batch is reported net, once (`core.net_changes`).

Cost: 25 bytes per node in arrays (nothing for the garbage collector to walk) and one dict entry
to find a key; 0.4 µs to add a block to a chain. Losing or gaining costs a step per descendant.

Not handled: two blocks of a rank whose 64-bit keys collide are taken for one (one chance in
3e7 with a million blocks); it costs a wrong guess, never a wrong answer.
"""

from array import array
from collections.abc import Iterable, MutableSequence, Sequence
from typing import NewType, cast

from indexer.core.net_changes import NetChanges
from indexer.core.types import BlockKey, Tier

Node = NewType("Node", int)
"""Row of a block or a root in the tree's arrays. Reused after the node has left."""

TIERS = (Tier.GPU, Tier.CPU, Tier.STORAGE)
"""Tiers by number, fastest first."""

_NIL = Node(0)
"""No node. Row 0 exists, so that links can be written without asking; roots hang under it."""
_HELD = (1 << len(TIERS)) - 1
"""Bits of a node's state that say on which tiers it is held: `1 << number of the tier`."""
_REACHABLE = 1 << len(TIERS)
"""Bit of a node's state: held, and so is all above it. Roots are always reachable."""
_TIERS_IN = tuple(
    tuple(tier for tier in range(len(TIERS)) if held >> tier & 1) for held in range(_HELD + 1)
)
"""Numbers of the tiers in each set of bits."""


class BlockTree:
    """Blocks of one group of one rank."""

    __slots__ = (
        "_first_child",
        "_free",
        "_keys",
        "_next",
        "_node_of",
        "_parents",
        "_previous",
        "_states",
        "changes",
        "reachable_blocks",
    )

    def __init__(self) -> None:
        self.changes = NetChanges(len(TIERS))
        """Keys gained and lost since the caller last cleared it."""
        self.clear()

    def clear(self) -> None:
        """Drop everything, unreported changes too."""
        self._node_of: dict[BlockKey, Node] = {}
        self._keys = _keys(1)
        self._parents = _links(1)
        self._first_child = _links(1)
        self._next = _links(1)
        self._previous = _links(1)
        self._states = bytearray(1)
        self._free = _links(0)
        self.reachable_blocks = 0
        self.changes.clear()

    def __len__(self) -> int:
        """Nodes in the tree: blocks, those only kept for descendants, and roots."""
        return len(self._node_of)

    def key(self, node: Node) -> BlockKey:
        return self._keys[node]

    def columns(self) -> tuple[Sequence[BlockKey], Sequence[Node]]:
        """Key and parent of every node, for who reads many."""
        return self._keys, self._parents

    def parent(self, node: Node) -> tuple[BlockKey, bool]:
        """Key of the block or root above a block, and whether that is a root."""
        above = self._parents[node]
        return self._keys[above], not self._parents[above]

    def reachable_keys(self, tier: int) -> list[BlockKey]:
        """Keys of reachable blocks on `tier`."""
        wanted, states = _REACHABLE | 1 << tier, self._states
        return [key for key, node in self._node_of.items() if states[node] & wanted == wanted]

    def is_held(self, node: Node) -> bool:
        """A copy lies on some tier, reachable or not."""
        return self._states[node] & _HELD != 0

    def has(self, key: BlockKey) -> bool:
        return key in self._node_of

    def lacks(self, keys: Sequence[BlockKey]) -> bool:
        return self._node_of.keys().isdisjoint(keys)

    def find_or_add_root(self, key: BlockKey) -> Node:
        root = self.find_or_add(_NIL, key)
        self._states[root] = _REACHABLE
        return root

    def find_or_add(self, parent: Node, key: BlockKey) -> Node:
        """Node of `key`. A key names its whole prefix, so `parent` only counts for a new one."""
        node = self._node_of.get(key)
        return self._add(parent, key) if node is None else node

    def add_leaf(self, parent: Node, key: BlockKey, tier: int) -> Node:
        """Add one new block under `parent`, held on `tier`."""
        node = self._add(parent, key)
        states = self._states
        if states[parent] & _REACHABLE:
            states[node] = _REACHABLE | 1 << tier
            self.reachable_blocks += 1
            self.changes.gain(key, tier)
        else:
            states[node] = 1 << tier
        return node

    def add_chain(self, parent: Node, keys: Sequence[BlockKey], tier: int) -> Sequence[Node]:
        """Add a chain of new blocks under `parent`, held on `tier`."""
        nodes = self._take_rows(len(keys))
        reachable = self._states[parent] & _REACHABLE
        state = reachable | 1 << tier
        all_keys, parents, first_child = self._keys, self._parents, self._first_child
        states, above = self._states, parent
        sibling = first_child[parent]
        for node, key in zip(nodes, keys, strict=True):
            all_keys[node] = key
            states[node] = state
            parents[node] = above
            first_child[above] = node
            above = node
        if sibling:
            self._next[nodes[0]] = sibling
            self._previous[sibling] = nodes[0]
        self._node_of.update(zip(keys, nodes, strict=True))
        if reachable:
            self.reachable_blocks += len(nodes)
            self.changes.gain_all(keys, tier)
        return nodes

    def hold(self, node: Node, tier: int) -> bool:
        """A copy lies on `tier` now; False if one did already."""
        was = self._states[node]
        now = was | 1 << tier
        if now == was:
            return False
        if was & _REACHABLE:
            self.changes.gain(self._keys[node], tier)
        elif self._states[self._parents[node]] & _REACHABLE:
            now |= _REACHABLE
            self.reachable_blocks += 1
            self.changes.gain(self._keys[node], tier)
        self._states[node] = now
        if (was ^ now) & _REACHABLE and self._first_child[node]:
            self._spread(node)
        return True

    def release(self, node: Node, tier: int) -> Sequence[Node] | None:
        """No copy lies on `tier` any more. None if the node stays, else who left above it."""
        was = self._states[node]
        now = was & ~(1 << tier)
        if was & _REACHABLE:
            self.changes.lose(self._keys[node], tier)
            if now == _REACHABLE:
                now = 0
                self.reachable_blocks -= 1
        self._states[node] = now
        if not self._first_child[node]:
            return None if now else self._remove(node)
        if (was ^ now) & _REACHABLE:
            self._spread(node)
        return None

    def discard_root(self, root: Node) -> None:
        """Drop a root that got no blocks."""
        if not self._first_child[root]:
            self._remove(root)

    def _spread(self, node: Node) -> None:
        """Tell the held descendants whether `node` can be reached."""
        is_reachable = self._states[node] & _REACHABLE != 0
        report = self.changes.gain if is_reachable else self.changes.lose
        states, following = self._states, self._next
        changed = [node]
        while changed:
            child = self._first_child[changed.pop()]
            while child:
                state = states[child]
                # One that is not held passes nothing on, nor did it before.
                if state & _HELD:
                    states[child] = state ^ _REACHABLE
                    self.reachable_blocks += 1 if is_reachable else -1
                    for tier in _TIERS_IN[state & _HELD]:
                        report(self._keys[child], tier)
                    changed.append(child)
                child = following[child]

    def _add(self, parent: Node, key: BlockKey) -> Node:
        node = self._free.pop() if self._free else self._take_rows(1)[0]
        self._node_of[key] = node
        self._keys[node] = key
        self._parents[node] = parent
        first_child = self._first_child
        sibling = first_child[parent]
        if sibling:
            self._next[node] = sibling
            self._previous[sibling] = node
        first_child[parent] = node
        return node

    def _take_rows(self, count: int) -> Sequence[Node]:
        """Return rows of zeros that no node uses."""
        free = self._free
        if len(free) < count:
            start = len(self._keys)
            added = max(count, 64, start // 8)
            self._keys.extend(_keys(added))
            for rows in (self._parents, self._first_child, self._next, self._previous):
                rows.extend(_links(added))
            self._states.extend(bytes(added))
            free.extend(cast("Iterable[Node]", range(start, start + added)))
        taken = free[-count:]
        del free[-count:]
        return taken

    def _remove(self, node: Node) -> Sequence[Node]:
        """Remove a childless node, and what only it needed. Returns who left above it."""
        left: list[Node] = []
        while True:
            parent = self._parents[node]
            self._unlink(parent, node)
            del self._node_of[self._keys[node]]
            self._states[node] = 0
            self._free.append(node)
            if not parent or self._states[parent] & _HELD or self._first_child[parent]:
                return left
            node = parent
            left.append(node)

    def _unlink(self, parent: Node, node: Node) -> None:
        before, after = self._previous[node], self._next[node]
        if before:
            self._next[before] = after
            self._previous[node] = _NIL
        else:
            self._first_child[parent] = after
        if after:
            self._previous[after] = before
            self._next[node] = _NIL


def _keys(rows: int) -> MutableSequence[BlockKey]:
    return cast("MutableSequence[BlockKey]", array("Q", bytes(8 * rows)))


def _links(rows: int) -> MutableSequence[Node]:
    return cast("MutableSequence[Node]", array("I", bytes(4 * rows)))
