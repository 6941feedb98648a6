"""The KV-cache groups of one rank, as its events tell of them.

Rules:

1. A group's kind and block size come from its first event that tells them, and the index hears of
   them once. If that event was of another tier, the first GPU event may correct the block size (a
   connector's chunks are not the engine's blocks); the group then starts anew.
2. Releases before 0.22 don't name kinds. A group is full attention while its tokens align with its
   hashes, the only one always. Once they don't, it is taken for a window of unknown width, which
   limits nothing, and ignored.
3. Window groups ask full ones for the keys of their hashes at the end of each batch.
4. After a clear all of this begins anew: a group that isn't told of again limits no hit, and one
   that was taken for a window may turn out to be full.
5. A rank is unfollowed while its stores are refused for their group: any, without a full group; with
   one, many in a row without a kind. Its full group is one that the engine doesn't use, then. So it
   is, too, once one of several full groups has heard nothing in many batches of the others: a model's
   full groups are told of together, and a hit needs all of them.

Cost: nothing for an event whose group is known, of its block size and kind.
"""

from collections import Counter
from collections.abc import Sequence

from indexer.core.block_tree import BlockTree
from indexer.core.events import BlockStored, Event
from indexer.core.full_group import FullGroup
from indexer.core.index import BlocksShared, Change, GroupKind, GroupSpec
from indexer.core.kinds import is_aligned, spec_of
from indexer.core.types import Tier
from indexer.core.window_group import WindowGroup

Group = FullGroup | WindowGroup

_MOST_REFUSED = 64
"""Stores of other groups in a row, or batches: a group with small blocks publishes more often."""


class RankGroups:
    """Of one rank in one epoch."""

    __slots__ = (
        "_behind",
        "_counts",
        "_keeps_rows",
        "_max_parked_blocks",
        "_model",
        "_new",
        "_refused_in_row",
        "_tree",
        "by_number",
        "fulls",
        "masked",
        "sized_by_gpu",
        "windows",
    )

    def __init__(
        self,
        model: str,
        *,
        tree: BlockTree,
        counts: Counter[str],
        max_parked_blocks: int,
        keeps_rows: bool,
    ) -> None:
        """What can't be used is counted in `counts`, by reason."""
        self.by_number: dict[int, Group] = {}
        """Always this dict."""
        self.fulls: list[FullGroup] = []
        self.windows: list[WindowGroup] = []
        self.masked: set[int] = set()
        """Groups without a kind that left blocks out before they were followed."""
        self.sized_by_gpu: set[int] = set()
        self._model = model
        self._tree = tree
        self._counts = counts
        self._max_parked_blocks = max_parked_blocks
        self._keeps_rows = keeps_rows
        self._new: list[Change] = []
        self._refused_in_row = 0
        self._behind: Counter[int] = Counter()
        """By full group, where there are several: batches of the others since its last."""

    @property
    def is_unfollowed(self) -> bool:
        """What the engine stores is refused for its group: nothing is known of its cache."""
        if any(batches > _MOST_REFUSED for batches in self._behind.values()):
            return True
        return self._refused_in_row > (_MOST_REFUSED if self.fulls else 0)

    def for_event(self, event: BlockStored) -> Group | None:
        """Group an event with tokens belongs to; None if it can't be used, which is counted."""
        group = self.by_number.get(event.group)
        if group is None:
            return self._open(event)
        if event.block_size != group.spec.block_size:
            if event.tier is Tier.GPU and event.group not in self.sized_by_gpu:
                return self._open(event)
            self._counts["mixed_block_size"] += 1
            return None
        is_sure = event.kind is not None or (not event.group and len(self.fulls) == 1)
        if not is_sure and not self._looks_full(event, group):
            self._refuse(event)
            return None
        self._refused_in_row = 0
        return group

    def add(self, spec: GroupSpec) -> Group:
        """Follow a group, or follow it anew under another description."""
        group = self._group_of(spec)
        if self._keeps_rows:
            group.keep_rows()
        replaced = self.by_number.get(spec.group)
        if replaced is not None:
            replaced.clear()
        self.by_number[spec.group] = group
        self._behind.clear()
        self.fulls = [each for each in self.by_number.values() if isinstance(each, FullGroup)]
        self.windows = [each for each in self.by_number.values() if isinstance(each, WindowGroup)]
        if self.windows:
            for full in self.fulls:
                full.track_names()
        self._new += _description(group)
        return group

    def forget(self) -> None:
        """All of them are empty: what comes next describes them anew."""
        for group in self.by_number.values():
            group.clear()
        self.by_number.clear()
        self.fulls, self.windows, self._new = [], [], []
        self.masked.clear()
        self.sized_by_gpu.clear()
        self._behind.clear()
        self._refused_in_row = 0

    def descriptions(self) -> list[Change]:
        """What the index has to know of every group."""
        return [change for group in self.by_number.values() for change in _description(group)]

    def take_new(self) -> list[Change]:
        """What it has to know of groups that were added since the last call."""
        new = self._new
        if new:
            self._new = []
            return new
        return []

    def forget_new(self) -> None:
        """The index knows all of them; not where their tables are now."""
        self._new = [change for change in self._new if isinstance(change, BlocksShared)]

    def end_batch(self, events: Sequence[Event]) -> None:
        """What needs all events of a batch: windows, and full groups beside each other."""
        if self.windows:
            self._resolve_windows()
        if len(self.fulls) > 1:
            self._compare_fulls(events)

    def _resolve_windows(self) -> None:
        """Give keys to window blocks whose hash a full group has named."""
        named = [(full, full.take_named()) for full in self.fulls]
        for window in self.windows:
            for full, hashes in named:
                if window.spec.block_size == full.spec.block_size:
                    window.resolve(hashes, full.key_of)
            window.forget_fresh()

    def _compare_fulls(self, events: Sequence[Event]) -> None:
        """Which of several full groups it told of."""
        told = {event.group for event in events if event.what == "stored" and event.token_ids}
        fulls = {full.spec.group for full in self.fulls}
        if told & fulls:
            self._behind = Counter({each: self._behind[each] + 1 for each in fulls - told})

    def _group_of(self, spec: GroupSpec) -> Group:
        if spec.kind is not GroupKind.FULL:
            return WindowGroup(spec, model=self._model, counts=self._counts)
        return FullGroup(
            spec,
            model=self._model,
            tree=self._tree,
            counts=self._counts,
            max_parked_blocks=self._max_parked_blocks,
        )

    def _open(self, event: BlockStored) -> Group | None:
        spec = spec_of(event)
        if spec is None or (event.kind is None and not self._may_be_full(event)):
            self._refuse(event)
            return None
        if spec.kind is GroupKind.FULL:
            self._refused_in_row = 0
        if event.tier is Tier.GPU:
            self.sized_by_gpu.add(event.group)
        return self.add(spec)

    def _refuse(self, event: BlockStored) -> None:
        self._counts["unsupported_group"] += 1
        if event.kind is None or not self.fulls:
            self._refused_in_row += 1

    def _may_be_full(self, event: BlockStored) -> bool:
        """Whether a group without a kind may be followed as full attention from this event on."""
        if not is_aligned(event):
            self.masked.add(event.group)
            return False
        # Up to 0.19 all groups of a hybrid model publish as one: that one has to do.
        return event.group not in self.masked or not (event.group or self.fulls)

    def _looks_full(self, event: BlockStored, group: Group) -> bool:
        """Tell a full-attention group from a window where no kind is given, for good."""
        if isinstance(group, FullGroup) and not is_aligned(event):
            number, size = event.group, event.block_size
            self.add(GroupSpec(group=number, kind=GroupKind.WINDOW, block_size=size))
            return False
        return isinstance(group, FullGroup)


def _description(group: Group) -> list[Change]:
    if group.shared is None:
        return [group.spec]
    return [group.spec, BlocksShared(group.spec.group, group.shared)]
