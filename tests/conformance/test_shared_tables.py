"""An index that reads the writer's tables answers as one that was told of every block."""

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.core.block_tree import BlockTree
from indexer.core.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch
from indexer.core.hashing import Namespace
from indexer.core.index import BlocksDropped, BlocksShared, GroupKind, GroupSpec, Prompt
from indexer.core.rank_blocks import RankBlocks
from indexer.core.types import EngineHash, InstanceId, RankId, Tier
from indexer.memory_index import MemoryIndex

SIZE = 2
BLOCKS = 200
TOKENS = list(range(SIZE * BLOCKS + 1))
RANK, OTHER = (RankId(InstanceId("http://engine:8000"), each) for each in range(2))
FULL = GroupSpec(group=0, kind=GroupKind.FULL, block_size=SIZE)


class Pair:
    """One rank, written to an index that reads its tables and to one that is told."""

    def __init__(self, rank: RankId = RANK, trees: Sequence[BlockTree] = ()) -> None:
        self.rank = rank
        self.indexes = MemoryIndex(), MemoryIndex()
        self.trees = trees or (BlockTree(is_read=True), BlockTree())
        self.blocks = self._new_blocks(1)
        self.seq = 0

    def _new_blocks(self, epoch: int) -> list[RankBlocks]:
        return [
            RankBlocks(rank=self.rank, model="tiny", epoch=epoch, tree=tree) for tree in self.trees
        ]

    async def apply(self, *events: Event) -> None:
        self.seq += 1
        for index, blocks in zip(self.indexes, self.blocks, strict=True):
            await index.apply(blocks.apply(self.seq, EventBatch(1.0, 0, list(events))))

    async def restart(self, epoch: int) -> None:
        ended, self.blocks = self.blocks, self._new_blocks(epoch)
        await self.apply()
        for each in ended:
            each.close()

    async def tokens(self) -> dict[Tier, int]:
        """By tier, of the longest prompt; both say the same, of this and of every shorter one."""
        for end in range(1, len(TOKENS) + 1, 7):
            prompt = Prompt(Namespace(model="tiny"), TOKENS[:end])
            read, told = [(await index.match(prompt))[self.rank] for index in self.indexes]
            assert read == told
        prompt = Prompt(Namespace(model="tiny"), TOKENS)
        read, told = [(await index.match(prompt))[self.rank] for index in self.indexes]
        assert read == told
        sizes = [await index.size() for index in self.indexes]
        assert sizes[0] == sizes[1]
        return dict(read.tokens_by_tier)


def hashes(blocks: range, names: int) -> list[EngineHash]:
    return [EngineHash(names + block) for block in blocks]


def stored(start: int, stop: int, *, names: int = 1000, tier: Tier = Tier.GPU) -> BlockStored:
    """Some blocks of the one prompt; `names` is what the engine adds to make a hash."""
    blocks = range(start, stop)
    parent = EngineHash(names + start - 1) if start else None
    tokens = TOKENS[start * SIZE : stop * SIZE]
    return BlockStored(
        hashes(blocks, names), parent, tokens, SIZE, tier=tier, kind="full_attention"
    )


def removed(*blocks: int, names: int = 1000, tier: Tier = Tier.GPU) -> BlockRemoved:
    return BlockRemoved([EngineHash(names + block) for block in blocks], tier=tier)


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Nothing of a rank that is gone stays in the tree."""
    pair = Pair()
    yield pair
    for blocks in pair.blocks:
        blocks.close()
    for tree in pair.trees:
        while tree.abandoned_entries:
            tree.sweep()
        assert not len(tree)


async def test_blocks_are_read_where_they_are_kept(pair: Pair) -> None:
    """Blocks that come and go one by one or in chains, and a rank that holds nothing."""
    await pair.apply()
    await pair.apply(stored(0, 60))
    await pair.apply(*(stored(at, at + 1) for at in range(60, 64)))
    assert await pair.tokens() == {Tier.GPU: 64 * SIZE}

    await pair.apply(removed(63, 62))
    assert await pair.tokens() == {Tier.GPU: 62 * SIZE}
    await pair.apply(removed(*range(62)))
    assert await pair.tokens() == {}


async def test_what_hangs_on_a_missing_block_gives_no_credit(pair: Pair) -> None:
    """Until it is stored again."""
    await pair.apply(stored(0, 50))
    await pair.apply(removed(20))
    assert await pair.tokens() == {Tier.GPU: 20 * SIZE}

    await pair.apply(stored(20, 21))
    assert await pair.tokens() == {Tier.GPU: 50 * SIZE}


async def test_two_hashes_of_one_block_are_one_block(pair: Pair) -> None:
    """It is held while either is, on its tier; what the tree calls it doesn't matter."""
    await pair.apply(stored(0, 30))
    await pair.apply(stored(0, 40, names=5000))
    assert await pair.tokens() == {Tier.GPU: 40 * SIZE}

    await pair.apply(removed(*range(30)))
    assert await pair.tokens() == {Tier.GPU: 40 * SIZE}
    await pair.apply(removed(10, names=5000))
    assert await pair.tokens() == {Tier.GPU: 10 * SIZE}
    await pair.apply(stored(10, 11, names=5000))
    assert await pair.tokens() == {Tier.GPU: 40 * SIZE}


async def test_each_tier_is_read(pair: Pair) -> None:
    """Copies on several tiers, of which one leaves; a middle block that is nowhere for a time."""
    await pair.apply(stored(0, 150))
    await pair.apply(stored(0, 80, tier=Tier.CPU), stored(80, 90, tier=Tier.STORAGE))
    assert await pair.tokens() == {Tier.GPU: 150 * SIZE}

    await pair.apply(removed(*range(149, 69, -1)))
    assert await pair.tokens() == {
        Tier.GPU: 70 * SIZE,
        Tier.CPU: 10 * SIZE,
        Tier.STORAGE: 10 * SIZE,
    }
    await pair.apply(removed(5), removed(5, tier=Tier.CPU))
    assert await pair.tokens() == {Tier.GPU: 5 * SIZE}
    await pair.apply(stored(5, 6))
    assert await pair.tokens() == {
        Tier.GPU: 70 * SIZE,
        Tier.CPU: 10 * SIZE,
        Tier.STORAGE: 10 * SIZE,
    }


@given(st.lists(st.integers(0, BLOCKS), min_size=2, max_size=4))
async def test_each_rank_is_credited_with_its_own_depth(depths: list[int]) -> None:
    """However much more of the prompt another one holds; also nothing of it, but something else."""
    trees = BlockTree(is_read=True), BlockTree()
    pairs = [Pair(RankId(RANK.instance, each), trees) for each in range(len(depths))]
    for pair, depth in zip(pairs, depths, strict=True):
        await pair.apply(BlockStored(hashes(range(1), 9000), None, [7] * SIZE, SIZE))
        if depth:
            await pair.apply(stored(0, depth))

    for pair, depth in zip(pairs, depths, strict=True):
        assert await pair.tokens() == ({Tier.GPU: depth * SIZE} if depth else {})


async def test_hash_that_means_another_block_elsewhere_gives_no_credit() -> None:
    """Two ranks name different blocks alike; each is credited with its own."""
    trees = BlockTree(is_read=True), BlockTree()
    one, other = Pair(RANK, trees), Pair(OTHER, trees)
    await one.apply(stored(0, 20))
    swapped = BlockStored(hashes(range(20), 1000), None, [7] * (20 * SIZE), SIZE)

    await other.apply(swapped)

    assert await one.tokens() == {Tier.GPU: 20 * SIZE}
    assert await other.tokens() == {}


async def test_nothing_is_read_of_a_life_that_ended(pair: Pair) -> None:
    """From the first update of the new one on, and before the old tables are empty."""
    await pair.apply(stored(0, 30))
    await pair.restart(epoch=2)
    assert await pair.tokens() == {}

    await pair.apply(stored(0, 10))
    assert await pair.tokens() == {Tier.GPU: 10 * SIZE}


async def test_cleared_cache_is_filled_again(pair: Pair) -> None:
    """The tables stay shared."""
    await pair.apply(stored(0, 30))
    await pair.apply(AllBlocksCleared(), stored(0, 5))
    assert await pair.tokens() == {Tier.GPU: 5 * SIZE}

    await pair.apply(stored(5, 12))
    assert await pair.tokens() == {Tier.GPU: 12 * SIZE}


def changes(blocks: RankBlocks, *events: Event) -> Sequence[object]:
    return list(blocks.apply(0, EventBatch(1.0, 0, list(events))).changes)


def test_only_what_is_lost_is_told() -> None:
    """Where the tables are, once; then what went, for whoever weighs reports."""
    blocks = RankBlocks(rank=RANK, model="tiny", epoch=1, tree=BlockTree(is_read=True))

    spec, shared = changes(blocks, stored(0, 3))
    assert spec == FULL
    assert isinstance(shared, BlocksShared)
    assert changes(blocks, stored(3, 5)) == []
    (lost,) = changes(blocks, removed(4))
    assert isinstance(lost, BlocksDropped)
    assert len(lost.keys) == 1
    assert changes(blocks, removed(3), stored(3, 4), stored(3, 4, tier=Tier.CPU)) == []
    assert shared.blocks.reachable_entries == 5
