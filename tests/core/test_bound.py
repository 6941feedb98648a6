"""What a rank's tables may hold is bounded; who leaves, and what is told of it."""

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.core.bound import TableLimits
from indexer.core.events import BlockRemoved, BlockStored, Event, EventBatch
from indexer.core.index import BlocksDropped, BlocksHeld
from indexer.core.rank_blocks import RankBlocks
from indexer.core.types import BlockKey, EngineHash, InstanceId, RankId, Tier

SIZE = 2


class BoundedRank:
    """A rank, what an index was told of it, and the rows that a backend keeps."""

    def __init__(self, most: int, *, keeps_rows: bool = True) -> None:
        self.most = most
        self.blocks = RankBlocks(
            rank=RankId(InstanceId("http://engine:8000"), 0),
            model="tiny",
            epoch=1,
            limits=TableLimits(max_blocks=most),
            keeps_rows=keeps_rows,
        )
        self.shown: set[tuple[int, Tier, BlockKey]] = set()
        self.rows: set[tuple[int, EngineHash]] = set()

    def apply(self, *events: Event) -> None:
        update = self.blocks.apply(0, EventBatch(1.0, 0, list(events)))
        for change in update.changes:
            if isinstance(change, BlocksHeld):
                self.shown |= {(change.group, change.tier, key) for key in change.keys}
            elif isinstance(change, BlocksDropped):
                self.shown -= {(change.group, change.tier, key) for key in change.keys}
        for each in update.rows:
            self.rows |= {(each.group, row.engine_hash) for row in each.rows()}
            self.rows -= {(each.group, gone) for gone in each.gone}

    @property
    def evicted(self) -> int:
        return self.blocks.counts["bound_evicted"]


def stored(name: int, *, blocks: int = 1, after: int | None = None, **more: object) -> BlockStored:
    """Blocks `name` and on, each hashed by its number; `after`: they hang on that one."""
    numbers = range(name, name + blocks)
    fields = {
        "hashes": [EngineHash(number) for number in numbers],
        "parent": after,
        "token_ids": [10 * number + at for number in numbers for at in range(SIZE)],
        "block_size": SIZE,
        "kind": "full_attention",
        **more,
    }
    return BlockStored(**fields)  # type: ignore[arg-type]


def held(rank: BoundedRank) -> set[int]:
    """Names of the blocks in full groups that have rows with copies."""
    parts = rank.blocks.snapshot(0, 0)
    rows = (row for part in parts for group in part.rows for row in group.rows())
    return {row.engine_hash for row in rows if any(row.copies)}


def test_f15_cap_holds_and_the_oldest_leave_first() -> None:
    """F15: a cap of 100 and a thousand blocks; the newest are there, the oldest gone."""
    rank = BoundedRank(100)
    for name in range(1000):
        rank.apply(stored(name))
        assert len(rank.shown) == rank.blocks.held_blocks <= 100

    assert held(rank) == set(range(1000 - len(rank.shown), 1000))
    assert rank.evicted == 1000 - len(rank.shown)
    assert len(rank.rows) == len(rank.shown)


def test_chain_leaves_from_its_end() -> None:
    """What stays of an old conversation is a beginning that a prompt can use."""
    rank = BoundedRank(10)
    rank.apply(stored(1, blocks=10))

    rank.apply(stored(100, blocks=4))
    assert held(rank) == {*range(1, 7), *range(100, 104)}
    rank.apply(stored(200, blocks=10))
    assert held(rank) == set(range(200, 210))


def test_beginning_in_use_is_spared() -> None:
    """A system prompt older than everything stays while anything hangs on it."""
    rank = BoundedRank(10)
    rank.apply(stored(1, blocks=2))
    for name in range(10, 100):
        rank.apply(stored(name, after=2))

    assert {1, 2} <= held(rank)
    assert rank.blocks.held_blocks == 10


def test_removal_of_what_left_is_no_news() -> None:
    """The engine still has it and removes it one day."""
    rank = BoundedRank(10)
    for name in range(20):
        rank.apply(stored(name))

    rank.apply(BlockRemoved([EngineHash(0)]))
    assert rank.blocks.held_blocks == 10


def test_copies_beyond_the_first_leave_along() -> None:
    """A block that was announced twice counts once, and is gone as a whole."""
    rank = BoundedRank(4)
    rank.apply(stored(1), stored(1))
    for name in range(2, 8):
        rank.apply(stored(name))

    assert 1 not in held(rank)
    for name in range(4, 8):
        rank.apply(BlockRemoved([EngineHash(name)]))
    assert rank.blocks.tracked_entries() == 0


def test_fullest_tier_gives_way() -> None:
    """Tiers count together."""
    rank = BoundedRank(6)
    for name in range(5):
        rank.apply(stored(name, tier=Tier.CPU))
    rank.apply(stored(1), stored(2))

    tiers = [tier for _, tier, _ in rank.shown]
    assert (tiers.count(Tier.GPU), tiers.count(Tier.CPU)) == (2, 4)


def test_endless_chain_stops_growing() -> None:
    """Where nothing old can go, the newest isn't taken in; the beginning keeps its credit."""
    rank = BoundedRank(8)
    rank.apply(stored(0, blocks=8))
    rank.apply(stored(100, after=7), stored(101, after=100, blocks=30))
    assert len(rank.shown) == rank.blocks.held_blocks <= 8
    assert {0, 1, 2} <= held(rank)


def test_group_of_windows_is_bounded_too() -> None:
    """Its oldest hashes go."""
    rank = BoundedRank(8)
    for name in range(40):
        rank.apply(stored(name, group=1, kind="sliding_window", window_tokens=4))
        assert len(rank.shown) <= 8

    assert {group for group, _ in rank.rows} == {1}
    assert len(rank.rows) == len(rank.shown)


def test_bound_holds_where_no_rows_are_kept() -> None:
    """In memory alone."""
    rank = BoundedRank(8, keeps_rows=False)
    for name in range(20):
        rank.apply(stored(name), stored(name, group=1, kind="sliding_window", window_tokens=4))

    assert len(rank.shown) <= 8
    assert rank.rows == set()


def test_windows_of_one_long_event_are_bounded() -> None:
    """One event that is longer than the bound leaves from its beginning."""
    rank = BoundedRank(8)
    rank.apply(stored(0, blocks=30, group=1, kind="sliding_window", window_tokens=4))

    assert len(rank.shown) == 8


names = st.integers(0, 30)
steps = st.lists(
    st.one_of(
        st.builds(
            stored,
            names,
            blocks=st.integers(1, 6),
            after=st.none() | names,
            tier=st.sampled_from(Tier),
        ),
        st.builds(stored, names, group=st.just(1), kind=st.just("sliding_window")),
        st.builds(BlockRemoved, st.lists(names.map(EngineHash), max_size=3)),
    ),
    max_size=5,
)


@pytest.mark.parametrize("most", [1, 3, 40])
@given(batches=st.lists(steps, max_size=12))
def test_whatever_comes_the_bound_holds(most: int, batches: Sequence[Sequence[Event]]) -> None:
    """After each batch; and what was told is what is there."""
    rank = BoundedRank(most)
    for events in batches:
        rank.apply(*events)
        assert hashes_of(rank) <= most
        assert rank.shown == set(shown_by(rank))


def hashes_of(rank: BoundedRank) -> int:
    parts = rank.blocks.snapshot(0, 0)
    rows = (row for part in parts for group in part.rows for row in group.rows())
    return sum(copies > 0 for row in rows for copies in row.copies)


def shown_by(rank: BoundedRank) -> Iterator[tuple[int, Tier, BlockKey]]:
    for part in rank.blocks.snapshot(0, 0):
        for change in part.changes:
            if isinstance(change, BlocksHeld):
                yield from ((change.group, change.tier, key) for key in change.keys)
