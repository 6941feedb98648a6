"""One sliding-window or state group of one rank, beside the full-attention ones.

Rules:

1. Events of such a group often skip masked blocks, so tokens don't align with hashes, and they
   come before the full group's in a batch. Copies are counted by engine hash at once; a hash is
   reported to the index as soon as something has given it a key.
2. A key comes from the group's own tokens where they align and the parent has a key, else from a
   full group of the same block size that names the same hash.
3. A key once known stays for as long as the hash is held, whatever the full group evicts.
4. An event without hashes is normal.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from indexer.core.block_rows import BlockRow
from indexer.core.block_tree import TIERS
from indexer.core.events import BlockStored
from indexer.core.extra_keys import split_extra_keys
from indexer.core.hashing import Namespace, block_keys, pack_tokens, root_key
from indexer.core.index import GroupSpec
from indexer.core.net_changes import NetChanges
from indexer.core.types import BlockKey, EngineHash, Tier


class WindowGroup:
    """What one window or state group holds."""

    __slots__ = (
        "_copies",
        "_counts",
        "_fresh",
        "_holders",
        "_keys",
        "_model",
        "_touched",
        "block_size",
        "changes",
        "shared",
        "spec",
    )

    def __init__(self, spec: GroupSpec, *, model: str, counts: Counter[str]) -> None:
        self.spec = spec
        self.block_size = spec.block_size
        self.changes = NetChanges()
        self.shared: None = None
        """The index has these blocks in sets of its own."""
        self._model = model
        self._counts = counts
        self._copies: tuple[dict[EngineHash, int], ...] = tuple({} for _ in TIERS)
        """Per tier: copies of each hash."""
        self._keys: dict[EngineHash, BlockKey] = {}
        """Keys of held hashes that have one."""
        self._holders: tuple[dict[BlockKey, int], ...] = tuple({} for _ in TIERS)
        """Per tier: how many hashes hold each key."""
        self._fresh: dict[EngineHash, None] = {}
        """Held since the last `resolve` and without a key."""
        self._touched: set[EngineHash] | None = None
        """Hashes whose rows may have changed; None: nobody keeps rows."""

    @property
    def held_hashes(self) -> int:
        """For `core.bound`: hashes, each counted on every tier."""
        return sum(map(len, self._copies))

    @property
    def parked(self) -> int:
        """No block waits for another here."""
        return 0

    def evict(self, most: int, *, by_force: bool) -> int:  # noqa: ARG002 - none is spared here
        """Drop up to `most` of the oldest hashes; returns how many."""
        tier = max(range(len(TIERS)), key=lambda each: len(self._copies[each]))
        oldest = list(islice(self._copies[tier], most))
        for engine_hash in oldest:
            self._drop(engine_hash, tier)
        if self._touched is not None:
            self._touched.update(oldest)
        return len(oldest)

    def drop(self, engine_hash: EngineHash, tier: Tier) -> None:
        """Drop all copies of a hash, just announced, on a tier."""
        if engine_hash in self._copies[TIERS.index(tier)]:
            self._drop(engine_hash, TIERS.index(tier))

    def clear(self) -> None:
        for table in self._tables():
            table.clear()
        self.changes.clear()
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
        """See `FullGroup`: no row here is that plain."""
        return [], [], hashes

    def row(self, engine_hash: EngineHash) -> BlockRow | None:
        """What there is to keep of a hash; None: nothing."""
        gpu, cpu, storage = (copies.get(engine_hash, 0) for copies in self._copies)
        if not (gpu or cpu or storage):
            return None
        key = self._keys.get(engine_hash)
        return BlockRow(engine_hash, key, None, is_first=False, copies=(gpu, cpu, storage))

    def known_hashes(self) -> Iterator[EngineHash]:
        """Every hash that has a row."""
        return iter({hash_ for copies in self._copies for hash_ in copies})

    def held_keys(self, tier: int) -> Sequence[BlockKey]:
        """Keys that the index should have on `tier`."""
        return list(self._holders[tier])

    @property
    def entries(self) -> int:
        """How many keys those are, over all tiers."""
        return sum(map(len, self._holders))

    def restore(self, rows: Iterable[BlockRow]) -> bool:
        """Take over rows, which the index has already."""
        for row in rows:
            for tier, copies in enumerate(row.copies):
                if copies:
                    self._copies[tier][row.engine_hash] = copies
            if row.key is not None:
                self._set_key(row.engine_hash, row.key)
        self.changes.clear()
        return True

    # Events.

    def tracked_entries(self) -> int:
        """Entries of all internal tables; 0 when nothing is held."""
        return sum(len(table) for table in self._tables())

    def store(self, event: BlockStored, tier: int) -> None:
        """Blocks were stored, masked ones left out."""
        named = self._name(event)
        copies = self._copies[tier]
        if self._touched is not None:
            self._touched.update(event.hashes)
        for number, engine_hash in enumerate(event.hashes):
            if named and engine_hash not in self._keys:
                self._set_key(engine_hash, named[number])
            self._count_up(copies, engine_hash, tier)

    def has_copy(self, engine_hash: EngineHash, tier: int) -> bool:
        """Whether a removal would find one."""
        return engine_hash in self._copies[tier]

    def recall(self, hashes: Sequence[EngineHash], tier: int) -> None:
        """Blocks were stored without tokens: only held hashes mean something."""
        if self._touched is not None:
            self._touched.update(hashes)
        for engine_hash in hashes:
            if any(engine_hash in copies for copies in self._copies):
                self._count_up(self._copies[tier], engine_hash, tier)
            else:
                self._counts["unknown_placeholder"] += 1

    def remove(self, hashes: Sequence[EngineHash], tier: int) -> None:
        """One copy of each hash went."""
        copies = self._copies[tier]
        if self._touched is not None:
            self._touched.update(hashes)
        for engine_hash in hashes:
            count = copies.get(engine_hash, 0)
            if count > 1:
                copies[engine_hash] = count - 1
            elif count:
                self._drop(engine_hash, tier)
            else:
                self._counts["unknown_removal"] += 1

    def resolve(
        self, named: Sequence[EngineHash], key_of: Callable[[EngineHash], BlockKey | None]
    ) -> None:
        """At a batch's end: ask for keys of hashes that are new here or `named` there."""
        for engine_hash in (*self._fresh, *named):
            if engine_hash in self._keys or not self._holds(engine_hash):
                continue
            key = key_of(engine_hash)
            if key is not None:
                self._set_key(engine_hash, key)
                if self._touched is not None:
                    self._touched.add(engine_hash)

    def forget_fresh(self) -> None:
        """Every full group was asked: what has no key yet waits to be named."""
        self._fresh.clear()

    def _tables(self) -> tuple[dict[Any, Any], ...]:
        return (*self._copies, *self._holders, self._keys, self._fresh)

    def _name(self, event: BlockStored) -> Sequence[BlockKey]:
        """Keys from the event's own tokens; none if they don't align or hang in the air."""
        size = self.spec.block_size
        if not event.hashes or len(event.token_ids) != len(event.hashes) * size:
            return ()
        salt, extras = split_extra_keys(event)
        if event.parent is None:
            root = root_key(Namespace(model=self._model, lora=event.lora, cache_salt=salt))
        else:
            parent_key = self._keys.get(event.parent)
            if parent_key is None:
                return ()
            root = parent_key
        try:
            return block_keys(root, pack_tokens(event.token_ids), size, extras)
        except (OverflowError, TypeError):
            self._counts["bad_token"] += 1
            return ()

    def _holds(self, engine_hash: EngineHash) -> bool:
        return any(engine_hash in copies for copies in self._copies)

    def _count_up(self, copies: dict[EngineHash, int], engine_hash: EngineHash, tier: int) -> None:
        count = copies.get(engine_hash, 0)
        copies[engine_hash] = count + 1
        if count:
            return
        key = self._keys.get(engine_hash)
        if key is None:
            self._fresh[engine_hash] = None
        else:
            self._hold_key(key, tier)

    def _set_key(self, engine_hash: EngineHash, key: BlockKey) -> None:
        self._keys[engine_hash] = key
        for tier, copies in enumerate(self._copies):
            if engine_hash in copies:
                self._hold_key(key, tier)

    def _hold_key(self, key: BlockKey, tier: int) -> None:
        holders = self._holders[tier]
        count = holders.get(key, 0)
        holders[key] = count + 1
        if not count:
            self.changes.gain(key, tier)

    def _drop(self, engine_hash: EngineHash, tier: int) -> None:
        """The last copy of a hash went from a tier."""
        del self._copies[tier][engine_hash]
        key = self._keys.get(engine_hash)
        if not self._holds(engine_hash):
            self._keys.pop(engine_hash, None)
            self._fresh.pop(engine_hash, None)
        if key is None:
            return
        holders = self._holders[tier]
        if holders[key] > 1:
            holders[key] -= 1
        else:
            del holders[key]
            self.changes.lose(key, tier)
