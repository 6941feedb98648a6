"""Rows that outlive the indexer: what a restored rank knows, and what it does not."""

from collections.abc import Sequence
from typing import Any

from indexer.core.block_rows import BlockRow, GroupRows, RankFacts
from indexer.core.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch
from indexer.core.hashing import Namespace, block_keys, pack_tokens, root_key
from indexer.core.index import BlocksDropped, BlocksHeld, GroupKind, GroupSpec, RankUpdate
from indexer.core.rank_blocks import RankBlocks
from indexer.core.types import BlockKey, EngineHash, InstanceId, RankId, Tier

RANK = RankId(InstanceId("http://engine:8000"), 0)
SIZE = 4
FULL = GroupSpec(group=0, kind=GroupKind.FULL, block_size=SIZE)


def tokens_of(*names: int) -> list[int]:
    """Tokens of blocks, each block named by a number."""
    return [name * 100 + at for name in names for at in range(SIZE)]


def keys_of(*names: int) -> list[BlockKey]:
    root = root_key(Namespace(model="tiny"))
    return list(block_keys(root, pack_tokens(tokens_of(*names)), SIZE))


def stored(*names: int, parent: int | None = None, hash_from: int = 0, **more: Any) -> BlockStored:
    """Blocks of these names under hashes of the same numbers."""
    hashes = [EngineHash(name + hash_from) for name in names]
    above = None if parent is None else EngineHash(parent)
    return BlockStored(hashes, above, tokens_of(*names), SIZE, **more)


def removed(*names: int, **more: Any) -> BlockRemoved:
    return BlockRemoved([EngineHash(name) for name in names], **more)


class Rank:
    """A rank whose rows are kept, as a backend would."""

    def __init__(self) -> None:
        self.blocks = RankBlocks(rank=RANK, model="tiny", epoch=1, keeps_rows=True)
        self.specs: dict[int, GroupSpec] = {}
        self.rows: dict[int, dict[EngineHash, BlockRow]] = {}
        self.facts = RankFacts()

    def apply(self, *events: Event) -> RankUpdate:
        update = self.blocks.apply(0, EventBatch(1.0, 0, list(events)), digest=7)
        for change in update.changes:
            if isinstance(change, GroupSpec):
                self.specs[change.group] = change
                self.rows[change.group] = {}
            elif not isinstance(change, BlocksHeld | BlocksDropped):
                self.specs.clear()
                self.rows.clear()
        for each in update.rows:
            self.rows[each.group].update({row.engine_hash: row for row in each.rows()})
            for gone in each.gone:
                self.rows[each.group].pop(gone, None)
        assert update.facts is not None
        self.facts = update.facts
        return update

    def restart(self) -> None:
        """Another process takes over."""
        self.blocks = RankBlocks(rank=RANK, model="tiny", epoch=1, keeps_rows=True)
        rows = {group: list(each.values()) for group, each in self.rows.items()}
        assert self.blocks.restore(list(self.specs.values()), rows, self.facts)


def changes_of(update: RankUpdate) -> Sequence[object]:
    return list(update.changes)


def test_row_names_key_parent_and_copies() -> None:
    """Everything that is needed to place a block again."""
    rank = Rank()

    update = rank.apply(stored(1, 2), stored(1))

    root = root_key(Namespace(model="tiny"))
    first, second = keys_of(1, 2)
    (rows,) = update.rows
    assert (rows.group, list(rows.gone), update.digest) == (0, [], 7)
    assert set(rows.rows()) == {
        BlockRow(EngineHash(1), first, root, True, (2, 0, 0)),
        BlockRow(EngineHash(2), second, first, False, (1, 0, 0)),
    }


def test_untouched_blocks_have_no_new_rows() -> None:
    """A batch tells its own blocks only, the last copy's removal as a hash that went."""
    rank = Rank()
    rank.apply(stored(1, 2, 3))

    assert rank.apply().rows == []
    assert rank.apply(removed(3)).rows == [GroupRows(0, [], [EngineHash(3)], [])]


def test_no_rows_without_a_journal() -> None:
    """The index in memory doesn't pay for them."""
    blocks = RankBlocks(rank=RANK, model="tiny", epoch=1)

    update = blocks.apply(0, EventBatch(1.0, 0, [stored(1, 2)]))
    assert (update.rows, update.facts, update.digest) == ((), None, 0)


def test_restored_rank_counts_copies() -> None:
    """Two copies before the restart need two removals after it."""
    rank = Rank()
    rank.apply(stored(1), stored(1), stored(1, tier=Tier.CPU))
    rank.restart()

    assert changes_of(rank.apply(removed(1))) == []
    assert changes_of(rank.apply(removed(1))) == [BlocksDropped(0, Tier.GPU, keys_of(1))]
    assert rank.blocks.held_blocks == 1


def test_restored_rank_tells_nothing_of_what_the_index_has() -> None:
    """Its first update is about its own batch."""
    rank = Rank()
    rank.apply(stored(1, 2))
    rank.restart()

    update = rank.apply(stored(3, parent=2))
    assert changes_of(update) == [BlocksHeld(0, Tier.GPU, keys_of(1, 2, 3)[2:])]


def test_restored_rank_remembers_a_block_that_went_from_the_middle() -> None:
    """Its descendants come back with it, though nothing but its hash is told."""
    rank = Rank()
    rank.apply(stored(1, 2, 3))
    rank.apply(removed(2))
    rank.restart()
    assert rank.blocks.held_blocks == 1

    update = rank.apply(BlockStored([EngineHash(2)], EngineHash(1), tokens_of(2), SIZE))
    (held,) = update.changes
    assert isinstance(held, BlocksHeld)
    assert set(held.keys) == set(keys_of(1, 2, 3)[1:])


def test_chain_under_what_cannot_be_reached_is_kept_and_told_later() -> None:
    """It has rows at once, and credit when the hole is filled."""
    rank = Rank()
    rank.apply(stored(1, 2))
    rank.apply(removed(1))

    assert changes_of(rank.apply(stored(3, 4, parent=2))) == []
    assert set(rank.rows[0]) == {1, 2, 3, 4}
    rank.restart()
    rank.apply(stored(1))
    assert rank.blocks.held_blocks == 4


def test_row_of_a_forgotten_hash_goes_with_its_last_descendant() -> None:
    """Nothing stays behind."""
    rank = Rank()
    rank.apply(stored(1, 2))
    rank.apply(removed(1))
    assert set(rank.rows[0]) == {1, 2}

    rank.apply(removed(2))
    assert rank.rows[0] == {}


def test_row_of_a_forgotten_hash_goes_when_another_hash_holds_the_block() -> None:
    """Its key is held again, under a name of its own."""
    rank = Rank()
    rank.apply(stored(1, 2))
    rank.apply(removed(1))

    rank.apply(stored(1, hash_from=100))
    assert set(rank.rows[0]) == {101, 2}


def test_restored_rank_knows_twins() -> None:
    """Two hashes of one block: it is held while either is."""
    rank = Rank()
    rank.apply(stored(1), stored(1, hash_from=100))
    rank.restart()

    assert changes_of(rank.apply(removed(1))) == []
    assert changes_of(rank.apply(removed(101))) == [BlocksDropped(0, Tier.GPU, keys_of(1))]
    assert rank.blocks.tracked_entries() == 0


def test_known_block_named_without_tokens_has_a_new_row() -> None:
    """An offload tells a hash only."""
    rank = Rank()
    rank.apply(stored(1))

    rank.apply(BlockStored([EngineHash(1)], None, [], 0, tier=Tier.CPU))
    assert rank.rows[0][EngineHash(1)].copies == (1, 1, 0)


def test_parked_block_has_a_row_once_it_is_placed() -> None:
    """Orphans are told as a number; placed, they are blocks like others."""
    rank = Rank()
    rank.apply(stored(2, parent=1), stored(3, parent=2))
    assert (rank.rows, rank.facts.orphans) == ({0: {}}, 2)

    rank.apply(stored(1))
    assert set(rank.rows[0]) == {1, 2, 3}
    assert rank.facts.orphans == 0


def test_clear_and_a_new_description_leave_no_rows() -> None:
    """Neither of the batch before, nor of the events before it."""
    rank = Rank()
    rank.apply(stored(1, 2, tier=Tier.CPU))

    update = rank.apply(stored(3), AllBlocksCleared(), stored(4))
    assert {row.engine_hash for each in update.rows for row in each.rows()} == {4}
    rank.apply(AllBlocksCleared())
    tokens = list(range(2 * SIZE))
    rank.apply(BlockStored([EngineHash(9)], None, tokens, 2 * SIZE))
    assert set(rank.rows[0]) == {9}


def test_row_that_hangs_in_the_air_is_refused() -> None:
    """A missing parent is never taken for the beginning of a prompt."""
    first, second = keys_of(1, 2)
    row = BlockRow(EngineHash(2), second, first, False, (1, 0, 0))

    blocks = RankBlocks(rank=RANK, model="tiny", epoch=1, keeps_rows=True)
    assert not blocks.restore([FULL], {0: [row]}, RankFacts())


def test_row_without_a_key_is_refused_in_a_full_group() -> None:
    """Only window blocks may wait for one."""
    root = root_key(Namespace(model="tiny"))
    row = BlockRow(EngineHash(1), None, root, True, (1, 0, 0))

    blocks = RankBlocks(rank=RANK, model="tiny", epoch=1, keeps_rows=True)
    assert not blocks.restore([FULL], {0: [row]}, RankFacts())


def test_restored_window_group_waits_for_names() -> None:
    """A block without a key gets it when a full group names its hash, as before the restart."""
    window = {"group": 1, "kind": "sliding_window", "window_tokens": 5}
    masked = BlockStored([EngineHash(2)], EngineHash(1), tokens_of(1, 2), SIZE, **window)  # type: ignore[arg-type]
    rank = Rank()
    rank.apply(masked, BlockStored([], None, [], 0, **window))  # type: ignore[arg-type]
    rank.apply(BlockStored([EngineHash(2)], None, [], 0, tier=Tier.CPU, group=1))
    assert rank.rows[1] == {EngineHash(2): BlockRow(EngineHash(2), None, None, False, (1, 1, 0))}
    rank.restart()

    update = rank.apply(stored(1, 2, kind="full_attention"))
    second = keys_of(1, 2)[1:]
    assert BlocksHeld(1, Tier.GPU, second) in update.changes
    assert rank.rows[1][EngineHash(2)].key == second[0]
    rank.restart()
    assert BlocksDropped(1, Tier.GPU, second) in rank.apply(removed(2, group=1)).changes
    rank.apply(removed(2, group=1, tier=Tier.CPU))
    assert rank.rows[1] == {}


def test_restored_rank_knows_what_it_had_learned_of_groups() -> None:
    """A group that left blocks out, and whose block size is sure, stay what they were."""
    rank = Rank()
    rank.apply(stored(1), BlockStored([EngineHash(5)], None, tokens_of(1, 2), SIZE, group=3))
    assert rank.facts == RankFacts(masked=(3,), sized_by_gpu=(0,))
    rank.restart()

    rank.apply(BlockStored([EngineHash(5)], None, tokens_of(1), SIZE, group=3))
    rank.apply(BlockStored([EngineHash(9)], None, list(range(8)), 8))
    assert rank.blocks.counts == {"unsupported_group": 1, "mixed_block_size": 1}


def test_snapshot_tells_window_groups_too() -> None:
    """Their keys and rows, beside the full group's."""
    rank = Rank()
    rank.apply(
        stored(1, kind="full_attention"),
        stored(1, group=1, kind="sliding_window", window_tokens=5),
    )

    parts = list(rank.blocks.snapshot(0, 0))
    assert BlocksHeld(1, Tier.GPU, keys_of(1)) in [each for part in parts for each in part.changes]
    assert [(each.group, len(list(each.rows()))) for part in parts for each in part.rows] == [
        (0, 1),
        (1, 1),
    ]


def test_snapshot_is_the_whole_rank_in_parts() -> None:
    """Every group, every reachable key once per tier, every row, no part bigger than asked."""
    rank = Rank()
    rank.apply(stored(1, 2, 3), stored(1, tier=Tier.CPU), removed(2))

    parts = list(rank.blocks.snapshot(5, 7, part_blocks=2))
    changes = [change for part in parts for change in part.changes]
    assert changes == [
        FULL,
        BlocksHeld(0, Tier.GPU, keys_of(1)),
        BlocksHeld(0, Tier.CPU, keys_of(1)),
    ]
    rows = [list(each.rows()) for part in parts for each in part.rows]
    assert [len(each) for each in rows] == [2, 1]
    assert {row for each in rows for row in each} == set(rank.rows[0].values())
    assert {(part.seq, part.digest, part.epoch) for part in parts} == {(5, 7, 1)}
