"""What one group of one rank holds: the tables, and what can be read from them.

`core.held_blocks` says what is kept here and why, and does all the writing.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from indexer.core.block_tree import NAMED_EVERY, TIERS, BlockTree, Node, children_of
from indexer.core.index import Holds, KnownPart
from indexer.core.net_changes import NetChanges
from indexer.core.types import BlockKey, EngineHash, Tier

Table = dict[EngineHash, Node]
MOST_EXTENDED = 64


class HeldCopies(NamedTuple):
    """Copies of one hash on one tier."""

    engine_hash: EngineHash
    tier: int
    copies: int
    key: BlockKey


class Ghost:
    """A block that is kept for its descendants."""

    __slots__ = ("children", "engine_hash")

    def __init__(self, engine_hash: EngineHash, children: int) -> None:
        self.engine_hash = engine_hash
        self.children = children
        """Blocks right under it that are here."""


class HeldTables:
    """Blocks of one full-attention group of one rank, to be looked at."""

    __slots__ = (
        "_cut",
        "_doubted",
        "_further_entries",
        "_gained",
        "_ghost_of",
        "_ghosts",
        "_held",
        "_lost",
        "_nodes",
        "_surplus",
        "_twins",
        "changes",
        "extended",
        "reachable_blocks",
        "touched",
        "tree",
    )

    def __init__(self, tree: BlockTree) -> None:
        self.changes = NetChanges(keeps_gains=not tree.is_read)
        """Keys gained and lost since the caller last cleared it."""
        self._gained = None if tree.is_read else self.changes.gained[0]
        """Of the fastest tier; None: nobody wants to be told."""
        self._lost = self.changes.lost[0]
        self.touched: set[EngineHash] | None = None
        """Hashes whose rows may have changed; None: nobody keeps rows."""
        self.tree = tree
        self._nodes = tree.nodes
        self._empty()

    def _empty(self) -> None:
        self.reachable_blocks = 0
        self._further_entries = 0
        """Tiers beyond the first on which reachable blocks lie."""
        self._held: tuple[Table, ...] = tuple({} for _ in TIERS)
        """Per tier: hashes with at least one copy, oldest first."""
        self._surplus: tuple[dict[EngineHash, int], ...] = tuple({} for _ in TIERS)
        """Per tier: copies beyond the first."""
        self._twins: tuple[dict[BlockKey, int], ...] = tuple({} for _ in TIERS)
        """Per tier: how many hashes other than the node's own hold it."""
        self._ghosts: Table = {}
        self._ghost_of: dict[BlockKey, Ghost] = {}
        self._cut: set[BlockKey] = set()
        """Held, and not reachable."""
        self._doubted: set[BlockKey] = set()
        """Of these those that nobody believes in (`core.doubts`); with them goes all below."""
        self.extended: deque[BlockKey] = deque(maxlen=MOST_EXTENDED)
        """Blocks that were doubted when another one was stored under them; the newest."""

    def clear(self) -> None:
        """Drop everything, unreported changes too."""
        for table in (*self._held, self._ghosts):
            self.tree.abandon(table)
        self._empty()
        self.changes.clear()

    @property
    def held_hashes(self) -> int:
        """Hashes, each counted on every tier."""
        gpu, cpu, storage = self._held
        return len(gpu) + len(cpu) + len(storage)

    @property
    def doubted_blocks(self) -> int:
        """Blocks that nobody believes in, each for itself."""
        return len(self._doubted)

    def tracked_entries(self) -> int:
        """Entries of all internal tables; 0 when nothing is held."""
        tables: tuple[Any, ...] = (*self._held, *self._surplus, *self._twins)
        return sum(map(len, (*tables, self._ghosts, self._ghost_of, self._cut, self._doubted)))

    # Looking: `core.index.SharedBlocks`.

    @property
    def reachable_entries(self) -> int:
        return self.reachable_blocks + self._further_entries

    def depth(self, known: KnownPart) -> int | None:
        gpu, cpu, storage = self._held
        if cpu or storage or self._cut or self._twins[0]:
            return None
        if not gpu:
            return 0
        blocks, named, names = known
        if not blocks:
            return 0
        # The last named block that isn't here; then upwards to one that is. Or the very last one: a
        # rank that holds all of it is the one most asked for, and is soon through.
        start = 0
        if names[0] not in gpu:
            start = bisect_left(names, True, 1, key=gpu.__contains__) - 1
        node, depth = named[start], blocks - start * NAMED_EVERY
        while node.engine_hash not in gpu:
            above = node.parent
            if above is None:
                return 0
            node, depth = above, depth - 1
        # Else the name means another block on this rank.
        return depth if gpu.get(node.engine_hash) is node else None

    def lookups(self) -> Sequence[tuple[Tier, Holds]]:
        return [(TIERS[tier], self._lookup(tier)) for tier, held in enumerate(self._held) if held]

    def _lookup(self, tier: int) -> Holds:
        nodes, held, twins, cut = self._nodes, self._held[tier], self._twins[tier], self._cut

        def is_reachable(key: BlockKey) -> bool:
            node = nodes.get(key)
            if node is None or not (held.get(node.engine_hash) is node or key in twins):
                return False
            return key not in cut

        return is_reachable

    # Looking.

    def find(self, engine_hash: EngineHash) -> Node | None:
        """Block of a hash that is held or remembered."""
        for held in self._held:
            if held:
                node = held.get(engine_hash)
                if node is not None:
                    return node
        return self._ghosts.get(engine_hash) if self._ghosts else None

    def knows_any(self, hashes: Iterable[EngineHash]) -> bool:
        return any(
            table and not table.keys().isdisjoint(hashes) for table in (*self._held, self._ghosts)
        )

    def hashes(self) -> Iterator[EngineHash]:
        """Every hash that is held or remembered."""
        return iter({hash_ for table in (*self._held, self._ghosts) for hash_ in table})

    def copies(self, engine_hash: EngineHash) -> tuple[int, int, int]:
        """Copies per tier."""
        gpu, cpu, storage = (
            1 + surplus.get(engine_hash, 0) if engine_hash in held else 0
            for held, surplus in zip(self._held, self._surplus, strict=True)
        )
        return gpu, cpu, storage

    def reachable_keys(self, tier: int) -> list[BlockKey]:
        """Keys of reachable blocks on `tier`."""
        keys = dict.fromkeys(node.key for node in self._held[tier].values())
        return [key for key in keys if key not in self._cut]

    def plain_rows(
        self, hashes: Iterable[EngineHash]
    ) -> tuple[list[int], list[EngineHash], Iterable[EngineHash]]:
        """See `FullGroup.plain_rows`."""
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
            above = node.parent
            if above is not None and above.parent is not None:
                plain += (engine_hash, node.key, above.key)
            else:
                rest.append(engine_hash)
        return plain, gone, rest

    def stored_order(self) -> list[EngineHash]:
        """Hashes on the fastest tier, those that have been there longest first."""
        return list(self._held[0])

    def has_copies(self, engine_hash: EngineHash) -> bool:
        """Whether the fastest tier has more than one of a hash."""
        return engine_hash in self._surplus[0]

    def name_of(self, key: BlockKey) -> EngineHash | None:
        """The hash by which most ranks call a block; None: nobody knows it."""
        node = self._nodes.get(key)
        return None if node is None else node.engine_hash

    def is_doubted(self, key: BlockKey) -> bool:
        """Whether a block, or one above it, is here and not believed in."""
        node = self._nodes.get(key) if self._doubted else None
        while node is not None and node.key not in self._doubted:
            node = node.parent
        return node is not None

    def holds(self, key: BlockKey) -> bool:
        """Whether a block is held, reachable or not."""
        node = self._nodes.get(key)
        return node is not None and self.is_held(node)

    def copies_below(self, key: BlockKey) -> Iterator[HeldCopies]:
        """Every copy of a block and of its descendants.

        A step per descendant; where hashes aren't those that name the nodes, all hashes are read.
        """
        top = self._nodes.get(key)
        waiting = [] if top is None else [top]
        found: dict[BlockKey, Node] = {}
        while waiting:
            node = waiting.pop()
            found[node.key] = node
            waiting += self._here(node)
        for tier, (held, surplus) in enumerate(zip(self._held, self._surplus, strict=True)):
            own = ((node.engine_hash, node) for node in found.values())
            for engine_hash, node in held.items() if self._twins[tier] else own:
                if node.key in found and held.get(engine_hash) is node:
                    copies = 1 + surplus.get(engine_hash, 0)
                    yield HeldCopies(engine_hash, tier, copies, node.key)

    def is_held(self, node: Node) -> bool:
        """A copy lies on some tier, reachable or not."""
        for held, twins in zip(self._held, self._twins, strict=True):
            if held and (held.get(node.engine_hash) is node or node.key in twins):
                return True
        return False

    def _lies_on(self, node: Node, tier: int) -> bool:
        return self._held[tier].get(node.engine_hash) is node or node.key in self._twins[tier]

    def _has_twin(self, key: BlockKey) -> bool:
        """The block is here under another hash than its node's."""
        return any(key in twins for twins in self._twins) or key in self._ghost_of

    def _is_reachable(self, node: Node) -> bool:
        """For a root, or a block that is here."""
        return node.parent is None or not (node.key in self._cut or node.key in self._ghost_of)

    def _here(self, node: Node) -> list[Node]:
        """Children of a node that are held or remembered here."""
        return [
            below
            for below in children_of(node)
            if self.is_held(below) or below.key in self._ghost_of
        ]
