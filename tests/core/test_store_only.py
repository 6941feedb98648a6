"""Blocks whose connector never tells when they go: LMCache's chunks, Mooncake's copies."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.core.block_rows import BlockRow, RankFacts
from indexer.core.bound import TableLimits
from indexer.core.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from indexer.core.hashing import Namespace, block_keys, pack_tokens, root_key
from indexer.core.index import AllDropped, BlocksDropped, BlocksHeld, GroupSpec
from indexer.core.rank_blocks import RankBlocks
from indexer.core.store_only import StoreOnlyLimits
from indexer.core.types import BlockKey, EngineHash, InstanceId, RankId, Tier

RANK = RankId(InstanceId("http://engine:8000"), 0)
SIZE = 4
CHUNK = 12
"""Three blocks."""
TTL_S = 10.0


class Rank:
    """A RankBlocks and the keys that an index would hold per tier."""

    def __init__(self, max_blocks: int = 100) -> None:
        self.limits = StoreOnlyLimits(ttl_s=TTL_S, max_blocks=max_blocks)
        self.blocks = self.new_blocks()
        self.held: set[tuple[Tier, BlockKey]] = set()
        self.rows: dict[EngineHash, BlockRow] = {}
        self.specs: list[GroupSpec] = []
        self.facts = RankFacts()
        self._seq = itertools.count()

    def new_blocks(self) -> RankBlocks:
        return RankBlocks(
            rank=RANK,
            model="tiny",
            epoch=1,
            limits=TableLimits(store_only=self.limits),
            keeps_rows=True,
        )

    def apply(self, *events: Any, at_s: float = 0.0) -> None:
        update = self.blocks.apply(next(self._seq), EventBatch(at_s, 0, list(events)))
        for change in update.changes:
            if isinstance(change, BlocksHeld):
                self.held |= {(change.tier, key) for key in change.keys}
            elif isinstance(change, BlocksDropped):
                self.held -= {(change.tier, key) for key in change.keys}
            elif isinstance(change, AllDropped):
                self.held = set()
            elif isinstance(change, GroupSpec):
                self.specs.append(change)
        for each in update.rows:
            self.rows.update({row.engine_hash: row for row in each.rows()})
            for gone in each.gone:
                self.rows.pop(gone, None)
        self.facts = update.facts or self.facts

    def restart(self) -> None:
        """Another process goes on with what was kept."""
        self.blocks = self.new_blocks()
        assert self.blocks.restore(self.specs, {0: list(self.rows.values())}, self.facts)

    def on(self, tier: Tier) -> int:
        """Blocks of the one prompt that lie on `tier`."""
        return sum((tier, key) in self.held for key in KEYS)


KEYS = block_keys(root_key(Namespace(model="tiny")), pack_tokens(range(40 * SIZE)), SIZE)


def stored(*hashes: int, parent: int | None = None, first: int = 0) -> BlockStored:
    """Blocks number `first` and on of the one prompt, on the GPU."""
    tokens = list(range(first * SIZE, (first + len(hashes)) * SIZE))
    return BlockStored([EngineHash(each) for each in hashes], parent, tokens, SIZE)  # type: ignore[arg-type]


def chunks(*hashes: int, parent: int | None = None, first: int = 0, **more: Any) -> BlockStored:
    """LMCache's: chunks number `first` and on of the one prompt."""
    return BlockStored(
        **{
            "hashes": [EngineHash(each) for each in hashes],
            "parent": parent,
            "token_ids": list(range(first * CHUNK, (first + len(hashes)) * CHUNK)),
            "block_size": CHUNK,
            "tier": Tier.CPU,
            "is_store_only": True,
            **more,
        }
    )


def copies(*hashes: int) -> BlockStored:
    """Mooncake's: the engine's own hashes, no tokens."""
    return BlockStored(
        [EngineHash(each) for each in hashes], None, [], 0, tier=Tier.CPU, is_store_only=True
    )


def removed(*hashes: int, tier: Tier = Tier.GPU) -> BlockRemoved:
    return BlockRemoved([EngineHash(each) for each in hashes], tier=tier)


@pytest.fixture
def rank() -> Rank:
    return Rank()


def test_chunks_are_blocks_of_the_slower_tier(rank: Rank) -> None:
    """The GPU's block size stays; where the GPU has evicted, the chunks go on giving credit."""
    rank.apply(stored(1, 2), chunks(901, 902))

    assert rank.blocks.groups[0].block_size == SIZE
    assert (rank.on(Tier.GPU), rank.on(Tier.CPU)) == (2, 6)

    rank.apply(removed(2), removed(1))
    assert (rank.on(Tier.GPU), rank.on(Tier.CPU)) == (0, 6)


def test_chunk_goes_on_from_the_one_before(rank: Rank) -> None:
    """Parents are named by LMCache's own hashes."""
    rank.apply(stored(1))
    rank.apply(chunks(901))
    rank.apply(chunks(902, parent=901, first=1))

    assert rank.on(Tier.CPU) == 6


@pytest.mark.parametrize(
    ("chunk", "reason"),
    [
        pytest.param(chunks(902, parent=777, first=1), "unknown_chunk_parent", id="parent-lost"),
        pytest.param(chunks(901, block_size=6), "odd_chunk", id="no-whole-number-of-blocks"),
        pytest.param(
            chunks(901, block_size=2, token_ids=[0, 1]), "odd_chunk", id="shorter-than-a-block"
        ),
        pytest.param(chunks(901, token_ids=[1]), "odd_chunk", id="partial"),
        pytest.param(chunks(901, group=3), "odd_chunk", id="of-a-group-nobody-knows"),
        pytest.param(
            BlockStored([EngineHash(8)], None, [], 0, tier=Tier.CPU, group=3, is_store_only=True),
            "unknown_placeholder",
            id="copy-of-a-group-nobody-knows",
        ),
    ],
)
def test_chunk_that_cannot_be_placed_is_counted_and_ignored(
    rank: Rank, chunk: BlockStored, reason: str
) -> None:
    """No orphan: nothing was lost."""
    rank.apply(stored(1), chunk)

    assert rank.blocks.counts == {reason: 1}
    assert (rank.on(Tier.CPU), rank.blocks.orphans) == (0, 0)


def test_chunk_as_long_as_a_block_is_one(rank: Rank) -> None:
    """Nothing to split."""
    rank.apply(stored(1), chunks(901, block_size=SIZE, token_ids=list(range(SIZE))))

    assert rank.on(Tier.CPU) == 1


def test_copy_keeps_credit_after_the_gpu_evicted_it(rank: Rank) -> None:
    """Mooncake names the engine's hashes; an unknown one means nothing."""
    rank.apply(stored(1, 2), copies(1, 2, 77))
    rank.apply(removed(2), removed(1))

    assert rank.on(Tier.CPU) == 2
    assert rank.blocks.counts == {"unknown_placeholder": 1}


def test_copy_leaves_by_age(rank: Rank) -> None:
    """At the limit it counts, past it no more; by the engine's clock."""
    rank.apply(stored(1, 2), copies(1), at_s=100.0)
    rank.apply(removed(2), removed(1), at_s=100.0 + TTL_S)
    assert rank.on(Tier.CPU) == 1

    rank.apply(at_s=100.5 + TTL_S)
    assert rank.on(Tier.CPU) == 0
    assert rank.blocks.tracked_entries() == 0


def test_announced_again_it_is_younger_and_one_copy_still(rank: Rank) -> None:
    """Whole chunks and single copies alike."""
    rank.apply(stored(1), copies(1), chunks(901), at_s=0.0)
    rank.apply(copies(1), chunks(901), at_s=8.0)

    rank.apply(at_s=8.0 + TTL_S)
    assert rank.on(Tier.CPU) == 3

    rank.apply(removed(1), at_s=8.5 + TTL_S)
    assert rank.blocks.tracked_entries() == 0


def test_oldest_leaves_when_there_are_too_many() -> None:
    """A store of terabytes is bounded here."""
    rank = Rank(max_blocks=3)
    rank.apply(stored(1, 2, 3, 4))

    rank.apply(copies(1), copies(2), copies(3), copies(4))
    rank.apply(removed(4), removed(3), removed(2), removed(1))
    assert rank.blocks.counts == {}
    assert rank.on(Tier.CPU) == 0  # block 1 is gone, and what hangs under it can't be reached

    rank.apply(stored(1))
    assert rank.on(Tier.CPU) == 3


def test_removal_of_such_a_copy_ends_it(rank: Rank) -> None:
    """No release sends one; should it, nothing is taken twice."""
    rank.apply(stored(1), copies(1), removed(1, tier=Tier.CPU))
    assert rank.on(Tier.CPU) == 0

    rank.apply(copies(1), removed(9, tier=Tier.CPU), at_s=5.0)
    rank.apply(at_s=5.5 + TTL_S)
    assert rank.on(Tier.CPU) == 0
    assert rank.on(Tier.GPU) == 1


def test_clear_takes_them_along(rank: Rank) -> None:
    """Which cache was reset can't be told."""
    rank.apply(stored(1), copies(1), chunks(901), AllBlocksCleared())

    assert rank.blocks.tracked_entries() == 0


def test_restored_copies_age_from_the_first_batch_on(rank: Rank) -> None:
    """The next process knows where they lie, not how old they are."""
    rank.apply(stored(1, 2), copies(1, 2), at_s=0.0)
    rank.restart()

    rank.apply(at_s=50.0)
    assert rank.on(Tier.CPU) == 2

    rank.apply(copies(1), at_s=55.0)
    rank.apply(at_s=50.5 + TTL_S)
    assert rank.on(Tier.CPU) == 1
    rank.apply(at_s=55.5 + TTL_S)
    assert (rank.on(Tier.CPU), rank.on(Tier.GPU)) == (0, 2)


def test_window_groups_take_copies_and_no_chunks(rank: Rank) -> None:
    """Chunks of a hybrid model's windows can't be placed."""
    window: dict[str, Any] = {"group": 1, "kind": "sliding_window", "window_tokens": 9}
    block = BlockStored([EngineHash(1)], None, list(range(SIZE)), SIZE, **window)
    copy = BlockStored([EngineHash(1)], None, [], 0, tier=Tier.CPU, group=1, is_store_only=True)
    rank.apply(block, stored(1), copy, chunks(901, group=1))
    assert rank.on(Tier.CPU) == 1
    assert rank.blocks.counts == {"odd_chunk": 1}

    rank.apply(at_s=1.0 + TTL_S)
    assert rank.on(Tier.CPU) == 0


@given(
    st.lists(
        st.tuples(st.sampled_from(["store", "copy", "remove", "chunk", "wait"]), st.integers(0, 5)),
        max_size=40,
    )
)
def test_after_the_time_to_live_nothing_of_it_is_left(steps: list[tuple[str, int]]) -> None:
    """Law: whatever came, without announcements only the GPU's blocks remain."""
    rank, now_s, gpu = Rank(max_blocks=8), 0.0, [0] * 6
    for what, number in steps:
        match what:
            case "store":
                rank.apply(stored(*range(1, number + 2)), at_s=now_s)
                gpu = [count + (at <= number) for at, count in enumerate(gpu)]
            case "copy":
                rank.apply(copies(number + 1), at_s=now_s)
            case "remove" if gpu[number]:
                rank.apply(removed(number + 1), at_s=now_s)
                gpu[number] -= 1
            case "chunk":
                rank.apply(chunks(*range(901, 902 + number % 2)), at_s=now_s)
            case _:
                now_s += number

    rank.apply(at_s=now_s + TTL_S + 1)
    run = next((at for at, count in enumerate(gpu) if not count), 6)
    assert (rank.on(Tier.GPU), rank.on(Tier.CPU)) == (run, 0)
