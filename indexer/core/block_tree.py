"""Which blocks of one group lie where on one rank, and which of them can be reached.

A tree of own block keys. Roots are namespaces; a node is a block; its tiers are a set of bits.

Rules:

1. A node is *shown* on its tiers while it and every node up to its root is held on some tier.
   Only shown blocks are told to the index: held means reachable.
2. When a middle block goes, its descendants are hidden with it, stay in the tree, and are shown
   again when it returns.
3. A node that is not held stays only while it has descendants; then it leaves, and so does
   everything above it that is needed no more. An empty rank is an empty tree.
4. What is shown and hidden in one batch is reported net, once.

Cost: 26 bytes per node in arrays (nothing for the garbage collector to walk) and one dict entry
to find a key; 0.3 µs to add a block to a chain. Hiding or showing costs a step per descendant.

Not handled: two blocks of a rank whose 64-bit keys collide are taken for one (one chance in
3e7 with a million blocks); it costs a wrong guess, never a wrong answer.
"""

from array import array
from collections.abc import Sequence
from typing import NewType, cast

from indexer.core.net_changes import NetChanges
from indexer.core.types import BlockKey, Tier

Node = NewType("Node", int)
"""Row of a block or a root in the tree's arrays. Reused after the node has left."""

TIERS = (Tier.GPU, Tier.CPU, Tier.STORAGE)
"""Tiers by number, fastest first. Bit `1 << number` stands for a tier in a set of them."""

_NIL = Node(0)
"""No node. Row 0 exists, so that links can be written without asking; roots hang under it."""
_ROOT_SHOWN = 1 << len(TIERS)
"""Roots are always reachable, on no tier."""
_TIERS_IN = tuple(
    tuple(tier for tier in range(len(TIERS)) if bits >> tier & 1) for bits in range(1 << len(TIERS))
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
        "_shown",
        "_tiers",
        "changes",
        "shown_blocks",
    )

    def __init__(self) -> None:
        self.changes = NetChanges(len(TIERS))
        """Keys shown and hidden since the caller last cleared it."""
        self.clear()

    def clear(self) -> None:
        """Drop everything, unreported changes too."""
        self._node_of: dict[BlockKey, Node] = {}
        self._keys = array("Q", (0,))
        self._parents = array("I", (0,))
        self._first_child = array("I", (0,))
        self._next = array("I", (0,))
        self._previous = array("I", (0,))
        self._tiers = bytearray(1)
        self._shown = bytearray(1)
        self._free = array("I")
        self.shown_blocks = 0
        self.changes.clear()

    def __len__(self) -> int:
        """Nodes in the tree: blocks, those only kept for descendants, and roots."""
        return len(self._node_of)

    def key(self, node: Node) -> BlockKey:
        return BlockKey(self._keys[node])

    def is_held(self, node: Node) -> bool:
        """A copy lies on some tier, reachable or not."""
        return self._tiers[node] != 0

    def find_or_add_root(self, key: BlockKey) -> Node:
        root = self.find_or_add(_NIL, key)
        self._shown[root] = _ROOT_SHOWN
        return root

    def find_or_add(self, parent: Node, key: BlockKey) -> Node:
        """Node of `key`. A key names its whole prefix, so `parent` only counts for a new one."""
        node = self._node_of.get(key)
        if node is None:
            node = self._allocate(1)[0]
            self._node_of[key] = node
            self._keys[node] = key
            self._link(parent, node)
        return node

    def has(self, key: BlockKey) -> bool:
        return key in self._node_of

    def lacks(self, keys: Sequence[BlockKey]) -> bool:
        return self._node_of.keys().isdisjoint(keys)

    def add_leaf(self, parent: Node, key: BlockKey, tier: int) -> Node:
        """Add one new block under `parent`, held on `tier`. Written out: the hottest path."""
        free = self._free
        node = Node(free.pop()) if free else self._allocate(1)[0]
        self._node_of[key] = node
        self._keys[node] = key
        self._tiers[node] = 1 << tier
        self._parents[node] = parent
        first_child = self._first_child
        sibling = first_child[parent]
        self._next[node] = sibling
        self._previous[sibling] = node
        first_child[parent] = node
        if self._shown[parent]:
            self._shown[node] = 1 << tier
            self.shown_blocks += 1
            self.changes.gain(key, tier)
        return node

    def add_chain(self, parent: Node, keys: Sequence[BlockKey], tier: int) -> Sequence[Node]:
        """Add a chain of new blocks under `parent`, held on `tier`."""
        nodes = self._allocate(len(keys))
        bit = 1 << tier
        all_keys, parents, first_child = self._keys, self._parents, self._first_child
        tiers, above = self._tiers, _NIL
        for node, key in zip(nodes, keys, strict=True):
            all_keys[node] = key
            tiers[node] = bit
            if above:
                parents[node] = above
                first_child[above] = node
            above = node
        self._link(parent, nodes[0])
        self._node_of.update(zip(keys, nodes, strict=True))
        if self._shown[parent]:
            for node in nodes:
                self._shown[node] = bit
            self.shown_blocks += len(nodes)
            self.changes.gain_all(keys, tier)
        return nodes

    def hold(self, node: Node, tier: int) -> bool:
        """A copy lies on `tier` now; False if one did already."""
        was = self._tiers[node]
        now = was | 1 << tier
        if now == was:
            return False
        self._tiers[node] = now
        if self._shown[self._parents[node]]:
            self._show(node, now)
        return True

    def release(self, node: Node, tier: int) -> Sequence[Node]:
        """No copy lies on `tier` any more. Returns the nodes that left the tree."""
        tiers = self._tiers[node] & ~(1 << tier)
        self._tiers[node] = tiers
        if self._shown[node]:
            self._show(node, tiers)
        if tiers or self._first_child[node]:
            return ()
        return self.prune(node)

    def _show(self, node: Node, now: int) -> None:
        """Set the tiers on which a node is shown; 0 hides it. Descendants follow."""
        was = self._shown[node]
        self._set_shown(node, was, now)
        if self._first_child[node] and not (was and now):
            self._show_descendants(node)

    def _show_descendants(self, node: Node) -> None:
        changed = [node]
        while changed:
            parent = changed.pop()
            is_reachable = self._shown[parent] != 0
            child = self._first_child[parent]
            while child:
                now = self._tiers[child] if is_reachable else 0
                was = self._shown[child]
                if was != now:
                    # One of the two is 0: only reachability changed.
                    self._set_shown(Node(child), was, now)
                    changed.append(Node(child))
                child = self._next[child]

    def _set_shown(self, node: Node, was: int, now: int) -> None:
        self._shown[node] = now
        if not was:
            self.shown_blocks += 1
        elif not now:
            self.shown_blocks -= 1
        key = BlockKey(self._keys[node])
        for tier in _TIERS_IN[was ^ now]:
            if now >> tier & 1:
                self.changes.gain(key, tier)
            else:
                self.changes.lose(key, tier)

    def _allocate(self, count: int) -> Sequence[Node]:
        free = self._free
        if len(free) >= count:
            nodes = free[-count:].tolist()
            del free[-count:]
            return cast("list[Node]", nodes)
        start = len(self._keys)
        for rows in (self._parents, self._first_child, self._next, self._previous):
            rows.frombytes(bytes(rows.itemsize * count))
        self._keys.frombytes(bytes(self._keys.itemsize * count))
        self._tiers.extend(bytes(count))
        self._shown.extend(bytes(count))
        return cast("list[Node]", list(range(start, start + count)))

    def _link(self, parent: Node, node: Node) -> None:
        sibling = self._first_child[parent]
        self._parents[node] = parent
        self._next[node] = sibling
        self._previous[sibling] = node
        self._first_child[parent] = node

    def prune(self, node: Node) -> Sequence[Node]:
        """Drop `node` if nothing needs it, then what only it needed. Returns what left."""
        left: list[Node] = []
        while node and not self._tiers[node] and not self._first_child[node]:
            parent = Node(self._parents[node])
            before, after = self._previous[node], self._next[node]
            if before:
                self._next[before] = after
            else:
                self._first_child[parent] = after
            self._previous[after] = before
            self._next[node] = self._previous[node] = self._shown[node] = 0
            del self._node_of[BlockKey(self._keys[node])]
            left.append(node)
            node = parent
        self._free.extend(left)
        return left
