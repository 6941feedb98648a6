"""Turns one rank's decoded events into changes of the index.

Pure: batches in, `RankUpdate` out. One object lives as long as one epoch of one rank.

Rules:

1. Each KV-cache group is followed on its own: full-attention groups by `core.full_group`, window
   and state groups by `core.window_group`. Other kinds are counted and ignored.
2. A group's kind and block size come from its first event that tells them, and the index hears of
   them once. If that event was of another tier, the first GPU event may correct the block size (a
   connector's chunks are not the engine's blocks); the group then starts anew.
3. Releases before 0.22 don't name kinds. A group is full attention while its tokens align with its
   hashes, the only one always. Once they don't, it is taken for a window of unknown width, which
   limits nothing, and ignored.
4. An event that contradicts itself is counted and costs only itself.
5. A reset can't be told apart by tier or group, so it empties everything.
6. With `keeps_rows` every update carries what a restarted indexer needs of the blocks that it
   touched; `restore` takes that over, `snapshot` tells all of it anew.
7. Groups know nothing of ended lives of adapters (`core.adapters`), nor of copies that leave by
   age only (`core.store_only`).
8. Everything ignored is counted by reason. Reasons about events: `duplicate_hashes`,
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
    GroupKind,
    GroupSpec,
    RankUpdate,
)
from indexer.core.kinds import is_aligned, spec_of
from indexer.core.slices import parts
from indexer.core.store_only import StoreOnly, in_blocks_of
from indexer.core.types import EngineHash, RankId, Tier
from indexer.core.window_group import WindowGroup

_TIER_NUMBER: Final = {tier: number for number, tier in enumerate(TIERS)}

# Enum members hash and are looked up slowly; these are used for every event.
_GPU: Final = Tier.GPU

Group = FullGroup | WindowGroup


class RankBlocks:
    """Blocks of one rank in one epoch."""

    __slots__ = (
        "_adapters",
        "_bound",
        "_fulls",
        "_groups",
        "_is_cleared",
        "_keeps_rows",
        "_masked",
        "_max_parked_blocks",
        "_model",
        "_new_specs",
        "_room",
        "_sized_by_gpu",
        "_store_only",
        "_stored",
        "_tree",
        "_windows",
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
        self._max_parked_blocks = limits.max_parked_blocks
        self._keeps_rows = keeps_rows
        self._groups: dict[int, Group] = {}
        self._fulls: list[FullGroup] = []
        self._windows: list[WindowGroup] = []
        self._masked: set[int] = set()
        """Groups without a kind that left blocks out before they were followed."""
        self._sized_by_gpu: set[int] = set()
        self._new_specs: list[GroupSpec] = []
        self._is_cleared = False
        self._adapters = Adapters(model)
        self._store_only = StoreOnly(limits.store_only)

    @property
    def orphans(self) -> int:
        """Blocks parked because their parent is unknown."""
        return sum(len(group.orphans) for group in self._fulls)

    @property
    def held_blocks(self) -> int:
        """Reachable blocks of full groups, each counted once whatever its copies and tiers."""
        return sum(group.reachable_blocks for group in self._fulls)

    @property
    def groups(self) -> Mapping[int, GroupSpec]:
        """What is known of each group."""
        return {number: group.spec for number, group in self._groups.items()}

    def first_full(self) -> FullGroup | None:
        """The full group that matches are made of; None: there is none yet."""
        return min(self._fulls, key=lambda group: group.spec.group, default=None)

    def tracked_entries(self) -> int:
        """Entries of all internal tables; 0 when nothing is held or parked: nothing leaks."""
        beside = len(self._adapters) + self._store_only.copies
        return beside + sum(each.tracked_entries() for each in self._groups.values())

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
            self._store_only.expire(self._groups, batch.ts)
        if self._stored > self._room:
            self._room = self._bound.enforce(self._groups, batch, self.counts)
            self._stored = 0
        if self._windows:
            self._resolve_windows()
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
        for group in self._groups.values():
            group.clear()

    def snapshot(self, seq: int, digest: int, part_blocks: int = 4096) -> Iterator[RankUpdate]:
        """All of it as updates of a rank that holds nothing. Don't apply anything meanwhile."""
        specs = [group.spec for group in self._groups.values()]
        yield self._update(seq, digest, specs, ())
        for number, group in self._groups.items():
            for tier_number, tier in enumerate(TIERS):
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
        self._masked.update(facts.masked)
        self._sized_by_gpu.update(facts.sized_by_gpu)
        rows = {group: list(each) for group, each in rows.items()}
        for spec in specs:
            if not self._add_group(spec).restore(rows.get(spec.group, ())):
                return False
        self._adapters.restore(facts.adapters, rows)
        self._store_only.restore(facts.store_only, rows)
        self._new_specs.clear()
        return True

    def _update(
        self, seq: int, digest: int, changes: Sequence[Change], rows: Sequence[GroupRows]
    ) -> RankUpdate:
        """With everything that a backend keeps for the next process."""
        return RankUpdate(
            rank=self.rank,
            model=self._model,
            epoch=self.epoch,
            seq=seq,
            changes=changes,
            digest=digest,
            rows=rows,
            facts=RankFacts(
                tuple(self._masked),
                tuple(self._sized_by_gpu),
                self.orphans,
                self._adapters.ids(),
                self._store_only.places(),
            ),
        )

    def _take_rows(self) -> list[GroupRows]:
        taken = [
            rows_of(number, group, group.take_touched()) for number, group in self._groups.items()
        ]
        return [rows for rows in taken if rows.written or rows.plain or rows.gone]

    def _remove(self, event: BlockRemoved) -> None:
        number, hashes = event.group, event.hashes
        group = self._groups.get(number)
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
        adapters, groups = self._adapters, self._groups
        if (adapters.are_known or event.lora_id) and not adapters.admits(event, groups):
            self.counts["ended_adapter"] += len(hashes)
            return
        if not event.token_ids or event.block_size <= 0:
            self._recall(hashes, event)
            return
        if len(hashes) > 1 and len(set(hashes)) < len(hashes):
            self.counts["duplicate_hashes"] += 1
            return
        if event.parent in hashes:
            self.counts["self_parent"] += 1
            return
        group = self._groups.get(event.group)
        if group is None or event.block_size != group.block_size or event.kind is None:
            group = self._group_for(event)
        if group is not None:
            tier = 0 if event.tier is _GPU else _TIER_NUMBER[event.tier]
            put = group.store if event.session_id is None else partial(store_of_session, group)
            put(event, tier)

    def _store_for_a_time(self, event: BlockStored, now_s: float) -> None:
        """Store what nobody will take back."""
        group = self._groups.get(event.group)
        told = in_blocks_of(group, event, self.counts)
        if told is not None and group is not None:
            self._store(told)
            self._store_only.announce(told, group, _TIER_NUMBER[told.tier], now_s)

    def _recall(self, hashes: Sequence[EngineHash], event: BlockStored) -> None:
        group = self._groups.get(event.group)
        if group is None:
            self.counts["unknown_placeholder"] += len(hashes)
        else:
            group.recall(hashes, _TIER_NUMBER[event.tier])

    def _clear(self, _event: AllBlocksCleared) -> None:
        for group in self._groups.values():
            group.clear()
        self._adapters.clear()
        self._store_only.clear()
        self._is_cleared = True

    def _group_for(self, event: BlockStored) -> Group | None:
        """Group an event with tokens belongs to; None if it can't be used, which is counted."""
        group = self._groups.get(event.group)
        if group is None:
            return self._open_group(event)
        if event.block_size != group.spec.block_size:
            if event.tier is Tier.GPU and event.group not in self._sized_by_gpu:
                return self._open_group(event)
            self.counts["mixed_block_size"] += 1
            return None
        is_sure = event.kind is not None or (not event.group and len(self._fulls) == 1)
        if not is_sure and not self._looks_full(event, group):
            self.counts["unsupported_group"] += 1
            return None
        return group

    def _open_group(self, event: BlockStored) -> Group | None:
        spec = spec_of(event)
        if spec is None or (event.kind is None and not self._may_be_full(event)):
            self.counts["unsupported_group"] += 1
            return None
        if event.tier is Tier.GPU:
            self._sized_by_gpu.add(event.group)
        return self._add_group(spec)

    def _may_be_full(self, event: BlockStored) -> bool:
        """Whether a group without a kind may be followed as full attention from this event on."""
        if not is_aligned(event):
            self._masked.add(event.group)
            return False
        # Up to 0.19 all groups of a hybrid model publish as one: that one has to do.
        return event.group not in self._masked or not (event.group or self._fulls)

    def _looks_full(self, event: BlockStored, group: Group) -> bool:
        """Tell a full-attention group from a window where no kind is given, for good."""
        if isinstance(group, FullGroup) and not is_aligned(event):
            number, size = event.group, event.block_size
            self._add_group(GroupSpec(group=number, kind=GroupKind.WINDOW, block_size=size))
            return False
        return isinstance(group, FullGroup)

    def _add_group(self, spec: GroupSpec) -> Group:
        """Follow a group, or follow it anew under another description."""
        group: Group
        if spec.kind is GroupKind.FULL:
            group = FullGroup(
                spec,
                model=self._model,
                tree=self._tree,
                counts=self.counts,
                max_parked_blocks=self._max_parked_blocks,
            )
        else:
            group = WindowGroup(spec, model=self._model, counts=self.counts)
        if self._keeps_rows:
            group.keep_rows()
        replaced = self._groups.get(spec.group)
        if replaced is not None:
            replaced.clear()
        self._groups[spec.group] = group
        self._fulls = [each for each in self._groups.values() if isinstance(each, FullGroup)]
        self._windows = [each for each in self._groups.values() if isinstance(each, WindowGroup)]
        if self._windows:
            for full in self._fulls:
                full.track_names()
        self._new_specs.append(spec)
        return group

    def _resolve_windows(self) -> None:
        """Give keys to window blocks whose hash a full group has named."""
        named = [(full, full.take_named()) for full in self._fulls]
        for window in self._windows:
            for full, hashes in named:
                if window.spec.block_size == full.spec.block_size:
                    window.resolve(hashes, full.key_of)
            window.forget_fresh()

    def _take_changes(self) -> list[Change]:
        changes: list[Change] = []
        if self._new_specs:
            changes += self._new_specs
            self._new_specs = []
        if self._is_cleared:
            changes.append(AllDropped())
            self._is_cleared = False
        for number, group in self._groups.items():
            changes += group.changes.take(number)
        return changes
