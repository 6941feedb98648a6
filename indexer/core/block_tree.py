"""Blocks of all ranks, each once: a tree of own block keys that they share.

Rules:

1. A root is a namespace, a node is a block. A key names its whole prefix, so what lies above and
   below a block is the same on every rank: ranks keep only which nodes they hold
   (`core.held_blocks`).
2. A node counts the table entries that point at it. One without entries and without children
   leaves, and so does everything above it that is needed no more.
3. A node keeps the engine hash that named it first, so that ranks whose engines publish equal
   hashes share that object too.
4. Tables that a rank gives up whole are swept a few entries at a time: nobody waits for that.

Cost: 64 bytes per node, 96 for its key and hash, 45 for its entry in `nodes`, once for all ranks.
No garbage collection ever walks it.

Not handled: two blocks whose 64-bit keys collide are taken for one (one chance in 3e7 with a
million blocks); it costs a wrong guess, never a wrong answer.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import cast

import msgspec

from indexer.core.index import KnownPart
from indexer.core.types import BlockKey, EngineHash, Tier

TIERS = (Tier.GPU, Tier.CPU, Tier.STORAGE)
"""Tiers by number, fastest first."""

NAMED_EVERY = 8
"""Of a prompt's blocks this one is named, to be looked for in each rank's table in C. Naming one
costs 40 ns for all ranks, halving the rest of the search for one rank saves it 150."""

_NO_HASH = EngineHash(0)


class Node(msgspec.Struct, eq=False, gc=False):
    """One block, or a root. `BlockTree` alone writes to it, but for `entries`."""

    key: BlockKey
    engine_hash: EngineHash
    """The one that named it first, on any rank; 0 for a root."""
    parent: "Node | None"
    """None: a root."""
    children: "Node | dict[BlockKey, Node] | None" = None
    """Most blocks have at most one."""
    entries: int = 1
    """Table entries of all ranks that point here."""


class BlockTree:
    """Shared by all ranks that one process follows."""

    __slots__ = ("_abandoned", "is_read", "nodes")

    def __init__(self, *, is_read: bool = False) -> None:
        """`is_read`: the index reads nodes and ranks' tables itself (`core.index.BlocksShared`)."""
        self.is_read = is_read
        self.nodes: dict[BlockKey, Node] = {}
        """Blocks and roots. Always this dict."""
        self._abandoned: list[dict[EngineHash, Node]] = []

    def __len__(self) -> int:
        return len(self.nodes)

    def known(self, backwards: Sequence[BlockKey]) -> KnownPart:
        """See `core.index.KnownBlocks`. What lies above a node is here too, so it can be bisected."""
        nodes = self.nodes
        first = bisect_left(backwards, True, key=nodes.__contains__)
        named = [nodes[key] for key in backwards[first::NAMED_EVERY]]
        return KnownPart(len(backwards) - first, named, [node.engine_hash for node in named])

    def root(self, key: BlockKey) -> Node:
        """Find or add a root. Unless something is added under it, `free` it."""
        root = self.nodes.get(key)
        if root is None:
            root = self.nodes[key] = Node(key, _NO_HASH, None, None, 0)
        return root

    def find_or_add(self, parent: Node, key: BlockKey, engine_hash: EngineHash) -> Node:
        """Block `key` under `parent`; a new one, or one nobody holds, is named `engine_hash`."""
        node = self.nodes.get(key)
        if node is None:
            node = self.nodes[key] = Node(key, engine_hash, parent, None, 0)
            _link(parent, node)
        elif not node.entries:
            node.engine_hash = engine_hash
        return node

    def grow(
        self,
        above: Node,
        hashes: Sequence[EngineHash],
        keys: Sequence[BlockKey],
        held: dict[EngineHash, Node],
    ) -> None:
        """Add a chain of new nodes, each with the one entry that it gets in `held`."""
        node = self.find_or_add(above, keys[0], hashes[0])
        node.entries = 1
        held[hashes[0]] = node
        nodes = self.nodes
        for engine_hash, key in zip(hashes[1:], keys[1:], strict=True):
            # From left to right: the block before gets its child, then this one is `node`.
            held[engine_hash] = nodes[key] = node.children = node = Node(key, engine_hash, node)

    def free(self, node: Node) -> None:
        """Drop a node that is not needed any more, and what only it needed."""
        while not node.entries and node.children is None:
            self.nodes.pop(node.key, None)  # two nodes have one entry if their keys collide
            parent = node.parent
            if parent is None:
                return
            if parent.children is node:
                parent.children = None
                if parent.entries:
                    return
            else:
                _unlink(parent, node)
            node = parent

    def abandon(self, table: dict[EngineHash, Node]) -> None:
        """Take over a table whose entries don't count any more."""
        if table:
            self._abandoned.append(table)

    def sweep(self, most: int = 128) -> None:
        """Let go of up to `most` entries of abandoned tables; 128 take 0.05 ms.

        A batch stores a dozen blocks or so, so this is soon through.
        """
        if not self._abandoned:
            return
        table = self._abandoned[-1]
        for _ in range(min(most, len(table))):
            _, node = table.popitem()
            node.entries -= 1
            if not node.entries:
                self.free(node)
        if not table:
            self._abandoned.pop()

    @property
    def abandoned_entries(self) -> int:
        return sum(map(len, self._abandoned))


def children_of(node: Node) -> Sequence[Node]:
    """Blocks that follow this one, on any rank."""
    below = node.children
    if below is None:
        return ()
    return tuple(below.values()) if isinstance(below, dict) else (below,)


def _link(parent: Node, node: Node) -> None:
    below = parent.children
    if below is None:
        parent.children = node
    elif isinstance(below, dict):
        below[node.key] = node
    else:
        parent.children = {below.key: below, node.key: node}


def _unlink(parent: Node, node: Node) -> None:
    """Take one of several children away."""
    below = cast("dict[BlockKey, Node]", parent.children)
    del below[node.key]
    if len(below) == 1:
        parent.children = next(iter(below.values()))
