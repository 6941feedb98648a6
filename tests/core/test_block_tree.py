"""Ranks that share one tree of blocks: what one does never shows in another, nothing leaks."""

import random
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.core.block_tree import BlockTree
from indexer.core.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch
from indexer.core.index import BlocksHeld
from indexer.core.rank_blocks import RankBlocks
from indexer.core.types import BlockKey, EngineHash, InstanceId, RankId, Tier

SIZE = 2
ROOT = 1
"""A tree that holds anything has one root here: all is text of one model."""


@pytest.fixture
def tree() -> BlockTree:
    return BlockTree()


def new_rank(tree: BlockTree | None, number: int = 0) -> RankBlocks:
    rank = RankId(InstanceId("http://engine:8000"), number)
    return RankBlocks(rank=rank, model="tiny", epoch=1, tree=tree)


def stored(*path: int, start: int = 0, seed: int = 0, tier: Tier = Tier.GPU) -> BlockStored:
    """Blocks `start` and on of a path of names; hashes name the whole prefix, and the seed."""
    hashes = [hash_of(path[: at + 1], seed) for at in range(start, len(path))]
    return BlockStored(
        hashes,
        hash_of(path[:start], seed) if start else None,
        [10 * name + at for name in path[start:] for at in range(SIZE)],
        SIZE,
        tier=tier,
        kind="full_attention",
    )


def removed(*path: int, seed: int = 0, tier: Tier = Tier.GPU) -> BlockRemoved:
    return BlockRemoved([hash_of(path, seed)], tier=tier)


def hash_of(path: Sequence[int], seed: int) -> EngineHash:
    return EngineHash(hash((seed, *path)) % 2**64)


def apply(blocks: RankBlocks, *events: Event) -> None:
    blocks.apply(0, EventBatch(1.0, 0, list(events)))


def shown(blocks: RankBlocks) -> set[tuple[Tier, BlockKey]]:
    """What the index should have."""
    changes = (change for part in blocks.snapshot(0, 0) for change in part.changes)
    return {
        (change.tier, key)
        for change in changes
        if isinstance(change, BlocksHeld)
        for key in change.keys
    }


def sweep(tree: BlockTree) -> None:
    while tree.abandoned_entries:
        tree.sweep(3)


@pytest.mark.parametrize("seed", [0, 1], ids=["equal-hashes", "other-hashes"])
def test_blocks_that_ranks_have_in_common_are_there_once(tree: BlockTree, seed: int) -> None:
    """Whether or not their engines hash alike; the last holder takes them along."""
    one, other = new_rank(tree), new_rank(tree, 1)
    apply(one, stored(1, 2, 3))
    apply(other, stored(1, 2, 3, 4, seed=seed))

    assert len(tree) == ROOT + 4
    assert shown(one) < shown(other)
    apply(one, *(removed(*path) for path in ((1, 2, 3), (1, 2), (1,))))
    assert shown(one) == set()
    assert len(shown(other)) == 4
    assert len(tree) == ROOT + 4
    apply(other, *(removed(*path, seed=seed) for path in ((1, 2, 3, 4), (1, 2, 3), (1, 2), (1,))))
    assert len(tree) == 0


def test_descendants_of_another_rank_keep_nothing_alive(tree: BlockTree) -> None:
    """A block is a leaf on a rank that holds nothing below it."""
    one, other = new_rank(tree), new_rank(tree, 1)
    apply(one, stored(1, 2))
    apply(other, stored(1, 2, 3))

    apply(one, removed(1, 2))
    apply(one, removed(1))
    assert one.tracked_entries() == 0
    apply(one, stored(1, 2, 3, start=2))
    assert one.orphans == 1


def test_hole_of_one_rank_is_none_of_another(tree: BlockTree) -> None:
    """Reachable is asked rank by rank."""
    one, other = new_rank(tree), new_rank(tree, 1)
    for each in (one, other):
        apply(each, stored(1, 2, 3))

    apply(one, removed(1))
    assert (one.held_blocks, other.held_blocks) == (0, 3)
    apply(other, stored(1, 2, 3, 4, start=3))
    assert (one.held_blocks, other.held_blocks) == (0, 4)
    apply(one, stored(1))
    assert (one.held_blocks, other.held_blocks) == (3, 4)


def test_twin_of_another_ranks_block_is_a_block_of_its_own_rank(tree: BlockTree) -> None:
    """One rank knows the key by one hash, another by two of its own."""
    one, other = new_rank(tree), new_rank(tree, 1)
    apply(one, stored(1))
    apply(other, stored(1, seed=1), stored(1, seed=2), stored(1, seed=2, tier=Tier.CPU))

    apply(other, removed(1, seed=1))
    assert len(shown(other)) == 2
    apply(other, removed(1, seed=2))
    assert {tier for tier, _ in shown(other)} == {Tier.CPU}
    apply(other, removed(1, seed=2, tier=Tier.CPU))
    assert other.tracked_entries() == 0
    assert len(shown(one)) == len(tree) - ROOT == 1


def test_ended_epoch_is_given_back_bit_by_bit(tree: BlockTree) -> None:
    """A closed rank counts at once; its nodes leave with the batches of others."""
    ended, other = new_rank(tree), new_rank(tree, 1)
    apply(ended, stored(*range(1, 2000)))
    apply(other, stored(1, 2))

    ended.close()
    assert ended.tracked_entries() == 0
    assert len(tree) == ROOT + 1999
    apply(other)
    assert ROOT + 2 < len(tree) < ROOT + 1999
    sweep(tree)
    assert len(tree) == ROOT + 2
    assert other.held_blocks == 2


def test_node_that_is_being_given_back_may_be_stored_again(tree: BlockTree) -> None:
    """In the meantime, under another hash, by a rank that never had it."""
    ended, other = new_rank(tree), new_rank(tree, 1)
    apply(ended, stored(1, 2, 3, 4))
    ended.close()
    tree.sweep(2)

    apply(other, stored(1, 2, 3, 4, seed=1))
    apply(other, stored(1, 2, 3, 4, 5, start=4, seed=1))
    sweep(tree)
    assert len(shown(other)) == 5
    assert len(tree) == ROOT + 5


def give_back_head_first(tree: BlockTree) -> None:
    """Of blocks 1, 2 and 3 the second, stored last, is swept, and those around it aren't yet."""
    ended = new_rank(tree)
    apply(ended, stored(1, 2, 3))
    apply(ended, stored(1, 2, start=1, tier=Tier.CPU), removed(1, 2), stored(1, 2, start=1))
    ended.close()
    tree.sweep(1)
    tree.sweep(1)


def test_block_given_back_before_its_tail_waits_for_it(tree: BlockTree) -> None:
    """Tables end in any order: a block stored later is swept earlier."""
    give_back_head_first(tree)

    assert len(tree) == ROOT + 3
    sweep(tree)
    assert len(tree) == 0


def test_block_that_only_waits_takes_the_name_it_gets_next(tree: BlockTree) -> None:
    """Nobody holds it, so whoever stores it names it."""
    other = new_rank(tree, 1)
    give_back_head_first(tree)

    apply(other, stored(1, seed=1), stored(1, 2, start=1, seed=1))
    sweep(tree)
    apply(other, stored(1, 2, 3, start=2, seed=1))
    assert len(shown(other)) == len(tree) - ROOT == 3


def test_chain_that_only_waits_takes_the_names_it_gets_next(tree: BlockTree) -> None:
    """The head of a chain was given back before its tail."""
    ended, other = new_rank(tree), new_rank(tree, 1)
    apply(ended, stored(1, 2), stored(1, tier=Tier.CPU), removed(1), stored(1))
    ended.close()
    tree.sweep(1)
    tree.sweep(1)

    apply(other, stored(1, 3, seed=1))
    sweep(tree)
    assert len(shown(other)) == len(tree) - ROOT == 2


def test_group_followed_anew_gives_its_blocks_back(tree: BlockTree) -> None:
    """The block size was a connector's; what it had told is dropped."""
    rank = new_rank(tree)
    apply(
        rank, BlockStored([EngineHash(1)], None, [1] * 8, 8, tier=Tier.CPU, kind="full_attention")
    )
    apply(rank, stored(1, 2))

    sweep(tree)
    assert len(tree) == ROOT + 2


paths = st.lists(st.integers(1, 3), min_size=1, max_size=4).map(tuple)
steps = st.lists(
    st.tuples(
        st.sampled_from(("store", "store", "remove", "clear", "close")),
        st.integers(0, 2),
        paths,
        st.integers(0, 3),
        st.sampled_from((Tier.GPU, Tier.GPU, Tier.CPU)),
    ),
    max_size=60,
)
Step = tuple[str, int, tuple[int, ...], int, Tier]


def events_of(steps: Sequence[Step]) -> Iterator[tuple[int, Event | None]]:
    """Ranks 0 and 1 hash alike, rank 2 doesn't. None: the rank's epoch ends."""
    for what, rank, path, start, tier in steps:
        seed = rank // 2
        match what:
            case "store":
                first = min(start, len(path) - 1)
                yield rank, stored(*path, start=first, seed=seed, tier=tier)
            case "remove":
                yield rank, removed(*path, seed=seed, tier=tier)
            case "clear":
                yield rank, AllBlocksCleared()
            case _:
                yield rank, None


@given(steps, st.randoms(use_true_random=False))
def test_ranks_with_a_tree_in_common_are_as_each_by_itself(
    steps: list[Step], draw: random.Random
) -> None:
    """Whatever happens, and however far ended epochs are swept; in the end the tree is empty."""
    tree = BlockTree()
    together = [new_rank(tree, number) for number in range(3)]
    alone = [new_rank(None, number) for number in range(3)]
    for number, event in events_of(steps):
        if event is None:
            together[number].close()
            together[number], alone[number] = new_rank(tree, number), new_rank(None, number)
        else:
            apply(together[number], event)
            apply(alone[number], event)
        tree.sweep(draw.randrange(3))
        assert shown(together[number]) == shown(alone[number])
        assert together[number].counts == alone[number].counts
        assert together[number].held_blocks == alone[number].held_blocks
    for each in together:
        each.close()
        assert each.tracked_entries() == 0
    sweep(tree)
    assert len(tree) == 0
