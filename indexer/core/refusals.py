"""Which of the things that `core.rank_blocks` set aside mean that the index is no longer exact.

Rules:

1. An event that contradicts itself, or its group, was refused: what it said is unknown.
2. What engines do in normal operation is no refusal: placeholders and removals of blocks that
   were never told (offloading), groups of a kind that isn't followed, masked blocks of windows,
   stores without hashes, parked orphans and what left for the bound (they are weighed by
   themselves).
3. Of another block size than its group's an event is refused only if it is the engine's own: on
   the GPU tier, and of more than a lone shorter block (a partial entry of a hybrid model).
   Connectors announce chunks of their own size on other tiers, and nothing is credited for them.
4. A kind of event that we don't know says nothing about blocks that we do know.

Cost: constant; a look at each event of a batch that holds another block size.
"""

from collections.abc import Iterable, Mapping, Sequence

from indexer.core.events import AllBlocksCleared, BlockStored, Event
from indexer.core.index import GroupSpec
from indexer.core.types import Tier

_ALWAYS = frozenset(
    (
        "bad_token",
        "duplicate_hashes",
        "self_parent",
        "unaligned_tokens",
        "orphan_evicted",
    )
)
_HARMLESS_REJECTIONS = frozenset(("unknown_event",))


def refused_reasons(
    set_aside: Iterable[str], events: Sequence[Event], groups: Mapping[int, GroupSpec]
) -> list[str]:
    """Those of one batch's reasons that cost exactness.

    `groups` is what the rank's groups are after the batch.
    """
    return [
        reason
        for reason in set_aside
        if reason in _ALWAYS
        or (reason == "mixed_block_size" and any(_is_mixed(each, groups) for each in events))
    ]


def has_clear(events: Iterable[Event]) -> bool:
    """Whether a batch says that the cache is empty."""
    return any(type(event) is AllBlocksCleared for event in events)


def has_lost_events(rejected: Iterable[str]) -> bool:
    """Whether an undecodable event may have told something about blocks."""
    return not _HARMLESS_REJECTIONS.issuperset(rejected)


def _is_mixed(event: Event, groups: Mapping[int, GroupSpec]) -> bool:
    if not isinstance(event, BlockStored) or event.tier is not Tier.GPU or not event.token_ids:
        return False
    spec = groups.get(event.group)
    if spec is None or event.block_size == spec.block_size:
        return False
    return not (len(event.hashes) == 1 and event.block_size < spec.block_size)
