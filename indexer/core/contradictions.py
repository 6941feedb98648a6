"""Why an engine reported other cached tokens than predicted, and what has to leave the tables for it.

Rules:

1. Predicted too much: the engine lacked one block, and so all below it, since vLLM evicts tails
   first. Was that block removed, or everything cleared, since the index was asked, then events
   have told it, and nothing is to be done.
   So it is if the block was evicted and computed again since.
2. Were there no such events, and the tables hold no copy from before either, then readers were given
   what the tables never had: the index isn't what was written to it.
3. Else every copy of it, and of what lies below, that was there before is a ghost and goes. Copies
   stored since stay: the very request computed the block anew, and had it announced. A batch has to be
   noted before it is applied: a copy that isn't noted yet would be taken for an old one.
4. A hash may be held several times, and several hashes may mean one key: copies are weighed per
   hash and tier, as they are counted.
5. Predicted too little: if the block was doubted, it is there after all. If it was told to the index
   since, or has left since, events have told it. If the tables hold it and had told it before, the
   index isn't what was written to it; if they don't hold it, the engine has blocks that were never
   told of. Where the index reads the tables it can't differ, and nothing is told to it; of several
   groups another may have ended the match. There a block that is held was stored since.
6. Nothing is pruned on a guess: not if the batches since then are not all remembered, nor if the
   block was not announced anew (then the stream has not come that far), nor in a rank with several
   KV-cache groups, where a window may have ended the hit.
7. An engine that drafts tokens computes the last block of every hit anew. A rank that is one block
   short whenever it hits, and was never exact, is taken for one.

Cost: a step per block below the contradicted one; where hashes have twins, per hash of the group.
"""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from indexer.core.block_tree import TIERS
from indexer.core.events import BlockRemoved
from indexer.core.held_tables import HeldCopies
from indexer.core.recent_batches import RecentBatches, mark
from indexer.core.reports import CacheReport
from indexer.core.types import BlockKey

MOST_COPIES = 1024
"""Taken out at one time, so that no write of the index is long."""


class Cause(StrEnum):
    """Of one contradiction; a metric label. `kvlb audit` uses the same words where it can tell."""

    EVICTED_SINCE = "evicted_since"
    STORED_SINCE = "stored_since"
    RESET_SEEN_LATE = "reset_seen_late"
    NEW_EPOCH = "new_epoch"
    """The rank restarted, or was told anew, since the index was asked."""
    DRAFTING = "drafting_drops_block"
    TOO_LONG_AGO = "too_long_ago"
    """The batches since then are not all remembered."""
    RECOMPUTE_UNTOLD = "recompute_untold"
    """The block that the engine lacked, and so computed, was not announced since."""
    OTHER_GROUPS = "other_groups"
    """A window or state group may have ended the hit."""
    GHOST = "ghost"
    """The tables had a block that the engine had not."""
    DOUBTED = "doubted"
    """The engine had a block that nobody believed in (`core.doubts`)."""
    INDEX_DIFFERS = "index_differs"
    """The index promised a block that the tables had not, or lacked one that they had told it."""
    UNSEEN = "unseen"
    """The engine had blocks that the tables have not."""

    @property
    def is_over_evidence(self) -> bool:
        """It says that the rank's tables promise too much."""
        return self in {Cause.GHOST, Cause.OTHER_GROUPS}


class Holdings(Protocol):
    """What weighing asks of a rank's tables: `core.rank_holdings`."""

    @property
    def full_group(self) -> int:
        """Number of the first full-attention group: the one that matches are made of."""
        ...

    @property
    def has_one_group(self) -> bool: ...
    def holds(self, key: BlockKey) -> bool:
        """Whether that group has the block, reachable or not."""
        ...

    def is_doubted(self, key: BlockKey) -> bool:
        """Whether that group has the block, and it or one above it isn't believed in."""
        ...

    def copies_below(self, key: BlockKey) -> Iterable[HeldCopies]:
        """Every copy of the block and of all its descendants in that group."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighed:
    """The cause, and removals that the engine has not told and that have to be made up for."""

    cause: Cause
    events: Sequence[BlockRemoved] = ()
    is_all: bool = True
    """False: there are more ghosts. Weigh again once these are gone: the last to go is the block
    itself."""

    @property
    def copies(self) -> int:
        return sum(len(event.hashes) for event in self.events)


def weigh(report: CacheReport, matched_s: float, held: Holdings, recent: RecentBatches) -> Weighed:
    """Judge a report of the present epoch. The index was asked at `matched_s`, or a little later."""
    if not report.is_over:
        return Weighed(cause=_why_more(report.key, matched_s, held, recent))
    told = _told_by_events(report.key, matched_s, held, recent)
    return (
        _weigh_copies(report.key, matched_s, held, recent) if told is None else Weighed(cause=told)
    )


def _why_more(key: BlockKey, matched_s: float, held: Holdings, recent: RecentBatches) -> Cause:
    """The engine had a block that the index didn't promise."""
    if held.is_doubted(key):
        return Cause.DOUBTED
    if recent.has_lost_since(matched_s, key) or recent.has_gained_since(matched_s, key):
        return Cause.STORED_SINCE
    if not held.holds(key):
        return Cause.UNSEEN
    if not recent.hears_gains or not held.has_one_group:
        return Cause.STORED_SINCE
    return Cause.INDEX_DIFFERS if recent.remembers_gains(matched_s) else Cause.TOO_LONG_AGO


def _told_by_events(
    key: BlockKey, matched_s: float, held: Holdings, recent: RecentBatches
) -> Cause | None:
    if recent.cleared_s is not None and recent.cleared_s >= matched_s:
        return Cause.RESET_SEEN_LATE
    if not held.holds(key):
        return _why_gone(key, set(), matched_s, recent)
    if not recent.reaches(matched_s):
        return Cause.TOO_LONG_AGO
    return None if held.has_one_group else Cause.OTHER_GROUPS


def _why_gone(key: BlockKey, marks: Set[int], matched_s: float, recent: RecentBatches) -> Cause:
    """No copy from before is there now: by which word."""
    if recent.has_lost_since(matched_s, key) or recent.has_removed_since(matched_s, marks):
        return Cause.EVICTED_SINCE
    if not recent.remembers_losses(matched_s):
        return Cause.TOO_LONG_AGO
    return Cause.INDEX_DIFFERS


def _weigh_copies(
    key: BlockKey, matched_s: float, held: Holdings, recent: RecentBatches
) -> Weighed:
    group = held.full_group
    found = list(held.copies_below(key))
    marks = {mark(each.engine_hash, group, each.tier) for each in found}
    stored = recent.stored_since(matched_s, marks)
    ghosts: list[tuple[HeldCopies, int]] = []
    is_told, top_ghosts = False, 0
    for each in found:
        copies_since = stored[mark(each.engine_hash, group, each.tier)]
        is_top = each.key == key
        is_told = is_told or (is_top and copies_since > 0)
        if each.copies > copies_since:
            top_ghosts += is_top
            ghosts.append((each, each.copies - copies_since))
    if not is_told:
        return Weighed(cause=Cause.RECOMPUTE_UNTOLD)
    if not top_ghosts:
        tops = {mark(each.engine_hash, group, each.tier) for each in found if each.key == key}
        return Weighed(cause=_why_gone(key, tops, matched_s, recent))
    ghosts.sort(key=lambda ghost: ghost[0].key == key)
    some, is_all = _some(ghosts)
    return Weighed(cause=Cause.GHOST, events=_removals(some, group), is_all=is_all)


def _some(ghosts: Sequence[tuple[HeldCopies, int]]) -> tuple[list[HeldCopies], bool]:
    """The first of them, once per copy, and whether that is all."""
    some: list[HeldCopies] = []
    for each, copies in ghosts:
        if len(some) >= MOST_COPIES:
            return some, False
        some += [each] * copies
    return some, True


def _removals(ghosts: Sequence[HeldCopies], group: int) -> list[BlockRemoved]:
    by_tier = [
        [each.engine_hash for each in ghosts if each.tier == number] for number in range(len(TIERS))
    ]
    return [
        BlockRemoved(hashes, tier=tier, group=group)
        for tier, hashes in zip(TIERS, by_tier, strict=True)
        if hashes
    ]
