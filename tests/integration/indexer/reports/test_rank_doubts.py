"""One rank's tables doubt what a few legs make doubtful: real tables, a real index, time as the test says."""

from collections.abc import AsyncIterator, Sequence

import msgspec
import pytest

from indexer.config import IndexerConfig, RankSource
from indexer.core.block_tree import BlockTree
from indexer.core.epochs import Epochs
from indexer.core.hashing import Namespace
from indexer.core.index import Prompt
from indexer.core.rank_status import RankCounts
from indexer.core.stream_effects import ApplyBatch
from indexer.core.types import BlockKey, InstanceId, RankId
from indexer.memory_index import MemoryIndex
from indexer.rank_doubts import RankDoubts
from indexer.rank_writer import RankWriter, WritingMeans

SIZE = 4
BLOCKS = 5
R0 = RankId(InstanceId("http://e0:8000"), 0)


def tokens(number: int) -> list[int]:
    return list(range(1000 * number, 1000 * number + BLOCKS * SIZE))


def prompt(number: int) -> Prompt:
    return Prompt(Namespace(model="tiny"), [*tokens(number), 7])


def root_of(number: int) -> BlockKey:
    return prompt(number).keys(SIZE)[0]


class Rank:
    """What one engine tells of ten prompts of five blocks, and legs show."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.index = MemoryIndex()
        means = WritingMeans(
            index=self.index,
            epochs=Epochs(),
            config=IndexerConfig(),
            clock=lambda: self.now_s,
            wall_clock=lambda: self.now_s,
            on_progress=lambda: None,
            tree=BlockTree(is_read=True),
        )
        source = RankSource(rank=R0, alias="e0", model="tiny", events="", replay=None)
        self.writer = RankWriter(source, means=means, counts=RankCounts())
        self.is_replaying = False
        self.doubts = RankDoubts(
            self.writer, clock=lambda: self.now_s, is_being_told=lambda: self.is_replaying
        )
        self._seq = 0

    async def tell(self, *events: object) -> None:
        self.now_s += 1
        payload = msgspec.msgpack.encode([self.now_s, events, 0])
        await self.writer.apply(ApplyBatch(self._seq, payload))
        self._seq += 1

    async def store(self, *numbers: int) -> None:
        """Each with a batch of its own."""
        for number in numbers:
            hashes = [100 * number + at for at in range(1, BLOCKS + 1)]
            await self.tell(["BlockStored", hashes, None, tokens(number), SIZE, None])

    async def lacks(self, *numbers: int) -> bool:
        """A leg found each of these gone; whether more is doubted now."""
        for number in numbers:
            self.doubts.missing(root_of(number))
        return await self.doubts.apply()

    async def has(self, *numbers: int) -> None:
        """And these there, up to the third block."""
        self.doubts.present([prompt(number).keys(SIZE)[2] for number in numbers])
        await self.doubts.apply()

    async def held(self, numbers: Sequence[int] = range(10)) -> list[int]:
        """Blocks that a reader is promised, by prompt."""
        matches = [await self.index.match(prompt(number)) for number in numbers]
        return [match[R0].tokens // SIZE for match in matches]


@pytest.fixture
async def rank() -> AsyncIterator[Rank]:
    made = Rank()
    await made.writer.open_epoch("started")
    await made.store(*range(10))
    yield made
    made.writer.close()


async def test_three_legs_take_what_lies_between_and_beside(rank: Rank) -> None:
    """Newer ones keep their credit."""
    news = [await rank.lacks(0, 2)]
    few = await rank.held()
    news.append(await rank.lacks(1))
    news.append(await rank.doubts.apply())

    assert news == [False, True, False]
    assert few == [5] * 10
    assert await rank.held() == [0, 0, 0] + [5] * 7
    assert rank.writer.blocks.doubted_blocks == 12


async def test_block_found_there_is_believed_with_all_above_it(rank: Rank) -> None:
    """And what is nearer to it than to one that was missing."""
    await rank.lacks(0, 6, 3)
    doubted = await rank.held()
    await rank.has(5)

    assert doubted == [0] * 7 + [5] * 3
    assert await rank.held() == [0, 0, 0, 0, 5, 4, 0, 5, 5, 5]


async def test_block_that_is_extended_is_believed_as_well(rank: Rank) -> None:
    """The engine says so itself, whoever computed what follows."""
    await rank.lacks(0, 6, 3)
    await rank.tell(["BlockStored", [999], 503, [1, 2, 3, 4], SIZE, None])
    await rank.doubts.apply()

    assert await rank.held() == [0, 0, 0, 0, 5, 4, 0, 5, 5, 5]


async def test_what_was_stored_since_is_not_doubted(rank: Rank) -> None:
    """The very requests that found it gone computed it anew."""
    await rank.lacks(0, 2)
    await rank.store(1)
    await rank.lacks(1)

    assert (await rank.held())[:3] == [0, 5, 0]


async def test_doubts_that_reach_too_far_back_are_dropped(rank: Rank) -> None:
    """Which blocks were stored since isn't known any more."""
    await rank.lacks(0, 2)
    rank.writer.recent.since_s = rank.now_s + 1
    await rank.lacks(1)
    dropped = await rank.held()
    rank.writer.recent.since_s = 0.0
    await rank.lacks(3, 5, 4)

    assert dropped == [5] * 10
    assert (await rank.held())[3:6] == [0] * 3


async def test_cleared_rank_has_nothing_to_doubt(rank: Rank) -> None:
    """What is stored after it is another matter, though it has the same names."""
    await rank.lacks(0, 2)
    await rank.tell(["AllBlocksCleared"])
    await rank.lacks(1)
    await rank.store(*range(10))
    await rank.lacks(1, 3)
    await rank.has(5)

    assert await rank.held() == [5] * 10


async def test_life_told_anew_is_doubted_by_what_was_found_before(rank: Rank) -> None:
    """The ring told of the ghosts again, and of what was computed in their place: as soon as it is through."""
    await rank.lacks(0, 3, 1)
    await rank.writer.open_epoch("rebuilt")
    rank.is_replaying = True
    await rank.lacks(8)
    await rank.store(*range(10), 0, 3, 1)
    assert not await rank.doubts.apply()
    assert await rank.held() == [5] * 10
    rank.is_replaying = False

    assert await rank.doubts.apply()

    assert await rank.held() == [5, 5, 0, 5, 5, 5, 5, 5, 5, 5]


async def test_one_that_is_missing_brings_older_ones_to_mind_while_a_life_is_told(
    rank: Rank,
) -> None:
    """A leg may be judged before the ring is through."""
    await rank.lacks(0, 2, 1)
    await rank.writer.open_epoch("rebuilt")
    await rank.store(*range(10), 0, 2, 1)
    await rank.lacks(4)

    assert (await rank.held())[:5] == [5, 5, 5, 0, 0]


async def test_tables_that_alone_were_wrong_are_right_when_told_anew(rank: Rank) -> None:
    """The ring tells of each block once: as it was computed when the ghost was found out."""
    await rank.lacks(0, 2, 1)
    await rank.writer.open_epoch("rebuilt")
    await rank.store(*range(3, 10), 0, 2, 1)
    await rank.doubts.apply()

    assert await rank.held() == [5] * 10


async def test_block_that_was_computed_anew_says_nothing_of_its_neighbours(rank: Rank) -> None:
    """The next turn of who found it missing finds it there."""
    await rank.lacks(0, 4, 2)
    await rank.store(2)
    await rank.has(2)

    assert (await rank.held())[:5] == [0, 0, 5, 0, 0]


async def test_new_life_is_doubted_by_nothing(rank: Rank) -> None:
    """Another process has another cache."""
    await rank.lacks(0, 2, 1)
    await rank.writer.open_epoch("restarted")
    await rank.store(*range(10))
    await rank.lacks(4)
    await rank.has(4)

    assert await rank.held() == [5] * 10


async def test_legs_that_agree_end_what_was_found_before(rank: Rank) -> None:
    """Two single ghosts, and later another: nothing has happened to the rest."""
    await rank.lacks(0, 2)
    rank.doubts.end()
    await rank.lacks(1)
    apart = await rank.held()
    await rank.lacks(3, 5)
    rank.doubts.end()

    assert apart == [5] * 10
    assert rank.writer.blocks.doubted_blocks > 0
    await rank.lacks(6)
    assert (await rank.held())[6] == 0


async def test_block_that_nobody_knows_marks_nothing(rank: Rank) -> None:
    """It left since; where nothing was heard of yet there is nothing to find it in."""
    Rank().doubts.missing(BlockKey(7))
    await rank.has(3)
    rank.doubts.missing(BlockKey(7))
    await rank.lacks(0, 2)

    assert not rank.doubts.is_due
    assert await rank.held() == [5] * 10
