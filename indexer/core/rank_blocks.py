"""Turns one rank's decoded events into changes of the index.

Pure: batches in, `RankUpdate` out. One object lives as long as one epoch of one rank.

Rules:

1. Each KV-cache group is followed on its own: full-attention groups by `core.full_group`, window
   and state groups by `core.window_group`; `core.rank_groups` tells which. Other kinds are counted
   and ignored.
2. An event that contradicts itself is counted and costs only itself.
3. A reset can't be told apart by tier or group, so it empties everything, and what groups there are
   is told anew.
4. With `keeps_rows` every update carries what a restarted indexer needs of the blocks that it
   touched; `restore` takes that over, `snapshot` tells all of it anew.
5. With a tree that `is_read` the index reads full groups' tables (`core.index`, rule 7).
6. Groups know nothing of ended lives of adapters (`core.adapters`), nor of copies that leave by
   age only (`core.store_only`).
7. Everything ignored is counted by reason. Reasons about events: `duplicate_hashes`,
   `self_parent`, `mixed_block_size`, `bad_token`, `unsupported_group`, `unaligned_tokens`,
   `odd_chunk`, `unknown_chunk_parent`; about blocks: `orphan_parked`, `orphan_evicted`,
   `unknown_placeholder`, `unknown_removal`, `ended_adapter`, `bound_evicted` (`core.bound`).

Cost: 0.7 µs per block in long events, 1.6 µs to store and 1.2 µs to remove a single one.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final

from indexer.core.adapters import Adapters
from indexer.core.block_rows import BlockRow, GroupRows, RankFacts, rows_of
from indexer.core.block_tree import TIERS, BlockTree
from indexer.core.bound import USUAL_LIMITS, BlockBound, TableLimits
from indexer.core.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from indexer.core.full_group import FullGroup
from indexer.core.full_report import store_of_session
from indexer.core.index import (
    AllDropped,
    BlocksHeld,
    Change,
    GroupSpec,
    RankUpdate,
)
from indexer.core.rank_groups import RankGroups
from indexer.core.slices import parts
from indexer.core.store_only import StoreOnly, in_blocks_of
from indexer.core.types import EngineHash, RankId, Tier

_TIER_NUMBER: Final = {tier: number for number, tier in enumerate(TIERS)}

# Enum members hash and are looked up slowly; these are used for every event.
_GPU: Final = Tier.GPU


class RankBlocks:
    """Blocks of one rank in one epoch."""

    __slots__ = (
        "_adapters",
        "_bound",
        "_facts",
        "_groups",
        "_is_cleared",
        "_keeps_rows",
        "_known",
        "_model",
        "_room",
        "_store_only",
        "_stored",
        "_tree",
        "counts",
        "epoch",
        "rank",
    )

    def __init__(
        self,
        *,
        rank: RankId,
        model: str,
        epoch: int,
        tree: BlockTree | None = None,
        limits: TableLimits = USUAL_LIMITS,
        keeps_rows: bool = False,
    ) -> None:
        """`tree` is shared with the other ranks; without one nothing is."""
        self.rank = rank
        self.epoch = epoch
        self.counts: Counter[str] = Counter()
        """Everything that was ignored or set aside, by reason."""
        self._model = model
        self._tree = BlockTree() if tree is None else tree
        self._bound = BlockBound(limits.max_blocks)
        self._room = self._stored = 0
        """The bound can't be hit by so many hashes; so many came since that was worked out."""
        self._keeps_rows = keeps_rows
        self._groups = RankGroups(
            model,
            tree=self._tree,
            counts=self.counts,
            max_parked_blocks=limits.max_parked_blocks,
            keeps_rows=keeps_rows,
        )
        self._known = self._groups.by_number
        self._is_cleared = False
        self._adapters = Adapters(model)
        self._facts = RankFacts()
        """As told last: the same object while nothing of it has changed."""
        self._store_only = StoreOnly(limits.store_only)

    @property
    def orphans(self) -> int:
        """Blocks parked because their parent is unknown."""
        return sum(len(group.orphans) for group in self._groups.fulls)

    @property
    def doubted_blocks(self) -> int:
        """Blocks of full groups that are here and not believed in (`core.doubts`)."""
        return sum(group.held.doubted_blocks for group in self._groups.fulls)

    @property
    def held_blocks(self) -> int:
        """Reachable blocks of full groups, each counted once whatever its copies and tiers."""
        return sum(group.reachable_blocks for group in self._groups.fulls)

    @property
    def entries(self) -> int:
        """Keys that the index should have, counted once per group and tier. Constant time."""
        return sum(group.entries for group in self._known.values())

    @property
    def groups(self) -> Mapping[int, GroupSpec]:
        """What is known of each group."""
        return {number: group.spec for number, group in self._known.items()}

    @property
    def is_unfollowed(self) -> bool:
        """What the engine stores is refused for its group (`core.rank_groups`, rule 5)."""
        return self._groups.is_unfollowed

    @property
    def has_one_token_blocks(self) -> bool:
        """A block size of 1: ten times the rows of a usual one, or more."""
        return any(group.spec.block_size == 1 for group in self._known.values())

    def first_full(self) -> FullGroup | None:
        """The full group that matches are made of; None: there is none yet."""
        return min(self._groups.fulls, key=lambda group: group.spec.group, default=None)

    def tracked_entries(self) -> int:
        """Entries of all internal tables; 0 when nothing is held or parked: nothing leaks."""
        beside = len(self._adapters) + self._store_only.copies
        return beside + sum(each.tracked_entries() for each in self._known.values())

    def apply(self, seq: int, batch: EventBatch, digest: int = 0) -> RankUpdate:
        """Apply one batch, in the order of its number. Never fails."""
        self.absorb(batch)
        return self.take(seq, digest)

    def absorb(self, batch: EventBatch) -> None:
        """Apply one batch, and leave what it changes for `take`."""
        for event in batch.events:
            if event.what == "removed":
                self._remove(event)
            elif event.what == "cleared":
                self._clear(event)
            elif event.is_store_only:
                self._store_for_a_time(event, batch.ts)
            else:
                self._store(event)
        if self._store_only.copies:
            self._store_only.expire(self._known, batch.ts)
        if self._stored > self._room:
            self._room = self._bound.enforce(self._known, batch, self.counts)
            self._stored = 0
        if self._groups.windows or len(self._known) > 1:
            self._groups.end_batch(batch.events)
        self._tree.sweep()

    def take(self, seq: int, digest: int = 0) -> RankUpdate:
        """What the batches since the last call changed, net; `seq` is the last one's number."""
        if self._keeps_rows:
            return self._update(seq, digest, self._take_changes(), self._take_rows())
        return RankUpdate(
            rank=self.rank,
            model=self._model,
            epoch=self.epoch,
            seq=seq,
            changes=self._take_changes(),
        )

    def close(self) -> None:
        """This epoch is over: what the rank had of the shared tree is given back bit by bit."""
        for group in self._known.values():
            group.clear()

    def snapshot(self, seq: int, digest: int, part_blocks: int = 4096) -> Iterator[RankUpdate]:
        """All of it as updates of a rank that holds nothing. Don't apply anything meanwhile."""
        yield self._update(seq, digest, self._groups.descriptions(), ())
        for number, group in self._known.items():
            for tier_number, tier in enumerate(TIERS if group.shared is None else ()):
                for keys in parts(group.held_keys(tier_number), part_blocks):
                    yield self._update(seq, digest, [BlocksHeld(number, tier, keys)], ())
            for hashes in parts(group.known_hashes(), part_blocks):
                yield self._update(seq, digest, (), [rows_of(number, group, hashes)])

    def restore(
        self,
        specs: Iterable[GroupSpec],
        rows: Mapping[int, Iterable[BlockRow]],
        facts: RankFacts,
    ) -> bool:
        """Take over what an earlier process had of this epoch. False: it doesn't fit together.

        Only for an object that nothing was applied to; after False it is of no use.
        """
        self._groups.masked.update(facts.masked)
        self._groups.sized_by_gpu.update(facts.sized_by_gpu)
        rows = {group: list(each) for group, each in rows.items()}
        for spec in specs:
            if not self._groups.add(spec).restore(rows.get(spec.group, ())):
                return False
        self._adapters.restore(facts.adapters, rows)
        self._store_only.restore(facts.store_only, rows)
        self._groups.forget_new()
        return True

    def _update(
        self, seq: int, digest: int, changes: Sequence[Change], rows: Sequence[GroupRows]
    ) -> RankUpdate:
        """With everything that a backend keeps for the next process."""
        facts = RankFacts(
            tuple(self._groups.masked),
            tuple(self._groups.sized_by_gpu),
            self.orphans,
            self._adapters.ids(),
            self._store_only.places(),
        )
        if facts != self._facts:
            self._facts = facts
        return RankUpdate(
            rank=self.rank,
            model=self._model,
            epoch=self.epoch,
            seq=seq,
            changes=changes,
            digest=digest,
            rows=rows,
            facts=self._facts,
        )

    def _take_rows(self) -> list[GroupRows]:
        taken = [
            rows_of(number, group, group.take_touched()) for number, group in self._known.items()
        ]
        return [rows for rows in taken if rows.written or rows.plain or rows.gone]

    def _remove(self, event: BlockRemoved) -> None:
        number, hashes = event.group, event.hashes
        group = self._known.get(number)
        if group is None:
            if hashes:
                self.counts["unknown_removal"] += len(hashes)
            return
        tier = 0 if event.tier is _GPU else _TIER_NUMBER[event.tier]
        if self._store_only.copies:
            self._store_only.forget(number, tier, hashes)
        if self._adapters.are_known:
            self._adapters.remove(number, group, hashes, tier)
        else:
            group.remove(hashes, tier)

    def _store(self, event: BlockStored) -> None:
        hashes = event.hashes
        if not hashes:
            return
        self._stored += len(hashes)
        adapters, groups = self._adapters, self._known
        if (adapters.are_known or event.lora_id) and not adapters.admits(event, groups):
            self.counts["ended_adapter"] += len(hashes)
            return
        if not event.token_ids or event.block_size <= 0:
            self._recall(hashes, event)
            return
        named = set(hashes) if len(hashes) > 1 else hashes
        if len(named) < len(hashes):
            self.counts["duplicate_hashes"] += 1
            return
        if event.parent in named:
            self.counts["self_parent"] += 1
            return
        group = groups.get(event.group)
        if group is None or event.block_size != group.block_size or event.kind is None:
            group = self._groups.for_event(event)
        if group is not None:
            tier = 0 if event.tier is _GPU else _TIER_NUMBER[event.tier]
            put = group.store if event.session_id is None else partial(store_of_session, group)
            put(event, tier)

    def _store_for_a_time(self, event: BlockStored, now_s: float) -> None:
        """Store what nobody will take back."""
        group = self._known.get(event.group)
        told = in_blocks_of(group, event, self.counts)
        if told is not None and group is not None:
            self._store(told)
            self._store_only.announce(told, group, _TIER_NUMBER[told.tier], now_s)

    def _recall(self, hashes: Sequence[EngineHash], event: BlockStored) -> None:
        group = self._known.get(event.group)
        if group is None:
            self.counts["unknown_placeholder"] += len(hashes)
        else:
            group.recall(hashes, _TIER_NUMBER[event.tier])

    def _clear(self, _event: AllBlocksCleared) -> None:
        self._groups.forget()
        self._adapters.clear()
        self._store_only.clear()
        self._is_cleared = True

    def _take_changes(self) -> list[Change]:
        changes = self._groups.take_new()
        if self._is_cleared:
            changes.insert(0, AllDropped())
            self._is_cleared = False
        for number, group in self._known.items():
            changes += group.changes.take(number)
        return changes
