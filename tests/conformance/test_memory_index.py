"""What only the index in memory has: departed ranks' sets are freed bit by bit."""

from indexer.core.hashing import Namespace
from indexer.core.index import BlocksHeld, GroupKind, GroupSpec, Prompt, RankUpdate
from indexer.core.types import BlockKey, InstanceId, RankId, Tier
from indexer.memory_index import MemoryIndex

RANK, OTHER = (RankId(InstanceId("http://engine:8000"), each) for each in range(2))
FULL = GroupSpec(group=0, kind=GroupKind.FULL, block_size=4)


def update(rank: RankId, *changes: GroupSpec | BlocksHeld) -> RankUpdate:
    return RankUpdate(rank=rank, model="tiny", epoch=1, seq=0, changes=changes)


async def test_departed_rank_counts_nowhere_and_is_freed_in_steps() -> None:
    """A big rank leaves at once for readers; its memory follows with the next calls."""
    index = MemoryIndex()
    keys = [BlockKey(key) for key in range(10_000)]
    await index.apply(update(RANK, FULL, BlocksHeld(0, Tier.GPU, keys)))
    await index.apply(update(OTHER, FULL))

    await index.retire(RANK)
    assert set(await index.match(Prompt(Namespace(model="tiny"), range(9)))) == {OTHER}
    assert index.leaving_entries == 10_000
    await index.apply(update(OTHER))
    assert 0 < index.leaving_entries < 10_000
    while index.leaving_entries:
        assert (await index.size()).entries == 0
