"""From a rank's events to what the index is told."""

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.core.bound import TableLimits
from indexer.core.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from indexer.core.hashing import Namespace, block_keys, pack_tokens, root_key
from indexer.core.index import (
    AllDropped,
    BlocksDropped,
    BlocksHeld,
    BlocksShared,
    GroupKind,
    GroupSpec,
    RankUpdate,
)
from indexer.core.rank_blocks import RankBlocks
from indexer.core.reports import FULL_REPORT_SESSION
from indexer.core.types import BlockKey, EngineHash, InstanceId, RankId, Tier

RANK = RankId(InstanceId("http://engine:8000"), 0)
SIZE = 4
Shown = set[tuple[int, Tier, BlockKey]]


class Rank:
    """A RankBlocks, and what an index that follows its updates would hold."""

    def __init__(self, **options: Any) -> None:
        self.blocks = RankBlocks(rank=RANK, model="tiny", epoch=1, **options)
        self.shown: Shown = set()
        self.specs: list[GroupSpec] = []
        self._seq = itertools.count()

    def apply(self, *events: Any) -> RankUpdate:
        update = self.blocks.apply(next(self._seq), EventBatch(1.0, 0, list(events)))
        for change in update.changes:
            if isinstance(change, GroupSpec):
                self.specs.append(change)
                self.shown = {entry for entry in self.shown if entry[0] != change.group}
            elif isinstance(change, AllDropped):
                self.shown = set()
            elif not isinstance(change, BlocksShared):
                entries = {(change.group, change.tier, key) for key in change.keys}
                assert change.keys
                if isinstance(change, BlocksHeld):
                    assert not entries & self.shown, "told twice"
                    self.shown |= entries
                else:
                    assert entries <= self.shown, "dropped what was never held"
                    self.shown -= entries
        return update

    def held(self, group: int = 0, tier: Tier = Tier.GPU) -> set[BlockKey]:
        return {key for at, where, key in self.shown if (at, where) == (group, tier)}


@pytest.fixture
def rank() -> Rank:
    return Rank()


def tokens_of(*names: int) -> list[int]:
    """Tokens of blocks, each block named by a number."""
    return [name * 100 + at for name in names for at in range(SIZE)]


def keys_of(*names: int, lora: str | None = None, salt: str | None = None) -> list[BlockKey]:
    """Keys of the chain of these blocks."""
    root = root_key(Namespace(model="tiny", lora=lora, cache_salt=salt))
    return list(block_keys(root, pack_tokens(tokens_of(*names)), SIZE))


def hashes_of(names: Iterable[int]) -> list[EngineHash]:
    return [EngineHash(name) for name in names]


def stored(*names: int, parent: int | None = None, **fields: Any) -> BlockStored:
    """A chain of blocks; a block's engine hash is its name."""
    return BlockStored(
        **{
            "hashes": hashes_of(names),
            "parent": parent,
            "token_ids": tokens_of(*names),
            "block_size": SIZE,
            **fields,
        }
    )


def removed(*names: int, **fields: Any) -> BlockRemoved:
    return BlockRemoved(hashes_of(names), **fields)


def placeholder(*names: int, **fields: Any) -> BlockStored:
    return BlockStored(hashes_of(names), None, [], 0, **fields)


CLEARED = AllBlocksCleared()


# Chains, and what the index is told


def test_first_store_describes_the_group_and_holds_its_chain(rank: Rank) -> None:
    """The index hears of the group once, then of the blocks."""
    spec = GroupSpec(group=0, kind=GroupKind.FULL, block_size=SIZE)

    update = rank.apply(stored(1, 2, 3))
    assert (update.rank, update.model, update.epoch, update.seq) == (RANK, "tiny", 1, 0)
    assert rank.specs == [spec]
    assert rank.held() == set(keys_of(1, 2, 3))
    assert rank.blocks.groups == {0: spec}
    assert rank.blocks.held_blocks == 3


def test_continuation_hangs_on_its_parent(rank: Rank) -> None:
    """A block stored under a known one belongs to that prefix."""
    rank.apply(stored(1, 2))

    rank.apply(stored(3, parent=2), stored(4, parent=3))
    assert rank.held() == set(keys_of(1, 2, 3, 4))


def test_nothing_new_is_an_empty_update(rank: Rank) -> None:
    """The update still carries its number, for whoever resumes from it."""
    rank.apply(stored(1))

    update = rank.apply(stored(1))
    assert (list(update.changes), update.seq) == ([], 1)


def test_batch_is_told_net(rank: Rank) -> None:
    """A block that leaves and returns within one batch is no news, nor is one that only passes."""
    rank.apply(stored(1, 2))

    assert list(rank.apply(removed(2), stored(2, parent=1)).changes) == []
    assert list(rank.apply(stored(3, parent=2), removed(3)).changes) == []
    assert list(rank.apply(removed(2), stored(2, 3, parent=1)).changes) == [
        BlocksHeld(0, Tier.GPU, [keys_of(1, 2, 3)[2]])
    ]


def test_known_blocks_in_front_of_new_ones_are_counted(rank: Rank) -> None:
    """One announcement may repeat a prefix and go on."""
    rank.apply(stored(1, 2))

    rank.apply(stored(1, 2, 3, 4))
    assert rank.held() == set(keys_of(1, 2, 3, 4))
    rank.apply(removed(4, 3, 2, 1))
    assert rank.held() == set(keys_of(1, 2))


def test_branches_share_their_prefix(rank: Rank) -> None:
    """Two conversations after one system prompt."""
    rank.apply(stored(1), stored(2, parent=1), stored(3, 4, parent=1), stored(5, parent=1))

    assert rank.held() == {*keys_of(1, 2), *keys_of(1, 3, 4), *keys_of(1, 5)}
    rank.apply(removed(3), removed(4), removed(2), removed(5))
    assert rank.held() == set(keys_of(1))


def test_place_of_a_middle_sibling_is_used_again_cleanly(rank: Rank) -> None:
    """The next block in its row has neither its neighbours nor its parent."""
    rank.apply(stored(1), stored(2, parent=1), stored(3, parent=1), stored(4, parent=1))
    rank.apply(removed(3), stored(9))
    rank.apply(stored(5, parent=9))

    rank.apply(removed(9))
    assert rank.held() == {*keys_of(1, 2), *keys_of(1, 4)}
    rank.apply(removed(5))
    assert rank.held() == {*keys_of(1, 2), *keys_of(1, 4)}
    rank.apply(removed(1, 2, 4))
    assert rank.blocks.tracked_entries() == 0


def test_place_of_a_middle_sibling_is_used_by_a_child_at_once(rank: Rank) -> None:
    """The same where the row goes to a block that hangs elsewhere."""
    rank.apply(stored(9), stored(1), *[stored(each, parent=1) for each in (2, 3, 4)])
    rank.apply(removed(3))
    rank.apply(stored(5, parent=9))

    rank.apply(removed(9), removed(5))
    assert rank.held() == {*keys_of(1, 2), *keys_of(1, 4)}
    rank.apply(removed(2, 4, 1))
    assert rank.blocks.tracked_entries() == 0


# Counting copies


def test_f04_copies_are_counted_down_and_never_below_nothing(rank: Rank) -> None:
    """F04: held, then gone, then a no-op; a clear resets the count."""
    rank.apply(stored(1))
    rank.apply(stored(1))
    rank.apply(removed(1))
    assert rank.held() == set(keys_of(1))

    rank.apply(removed(1))
    assert rank.held() == set()
    rank.apply(removed(1))
    assert rank.blocks.counts == {"unknown_removal": 1}

    rank.apply(stored(1), CLEARED, stored(1), removed(1))
    assert rank.held() == set()
    assert rank.blocks.tracked_entries() == 0


def test_many_copies_are_counted(rank: Rank) -> None:
    """Every copy is announced and removed by itself."""
    rank.apply(*[stored(1)] * 4)

    rank.apply(*[removed(1)] * 3)
    assert rank.held() == set(keys_of(1))
    rank.apply(removed(1))
    assert rank.held() == set()


def test_twin_hashes_of_one_key_hold_it_together(rank: Rank) -> None:
    """Before 0.17 a salt shows only in the hash: the tokens are held while either is."""
    twins = [stored(1, hashes=hashes_of([each])) for each in (11, 12, 13)]
    rank.apply(*twins)
    assert rank.held() == set(keys_of(1))

    rank.apply(removed(11), removed(12))
    assert rank.held() == set(keys_of(1))
    rank.apply(removed(13))
    assert rank.held() == set()
    assert rank.blocks.tracked_entries() == 0


def test_chain_of_twins_shares_every_node(rank: Rank) -> None:
    """A second tenant's chain of the same tokens adds hashes, not blocks."""
    rank.apply(stored(1, 2))

    rank.apply(stored(1, 2, hashes=hashes_of([11, 12])), removed(1, 2))
    assert rank.held() == set(keys_of(1, 2))
    rank.apply(removed(11, 12))
    assert rank.blocks.tracked_entries() == 0


def test_single_twin_shares_its_node(rank: Rank) -> None:
    """A block under a known parent, announced alone under a second hash."""
    rank.apply(stored(1, 2))

    rank.apply(stored(2, parent=1, hashes=hashes_of([22])), removed(2))
    assert rank.held() == set(keys_of(1, 2))
    rank.apply(removed(22, 1))
    assert rank.blocks.tracked_entries() == 0


# Tiers


def test_each_tier_is_held_and_dropped_by_itself(rank: Rank) -> None:
    """The last copy of a tier drops that tier only."""
    rank.apply(stored(1))
    rank.apply(stored(1, tier=Tier.CPU), stored(1, tier=Tier.STORAGE))
    key = keys_of(1)[0]

    assert list(rank.apply(removed(1)).changes) == [BlocksDropped(0, Tier.GPU, [key])]
    assert list(rank.apply(removed(1, tier=Tier.CPU)).changes) == [
        BlocksDropped(0, Tier.CPU, [key])
    ]
    assert rank.shown == {(0, Tier.STORAGE, key)}


def test_chain_may_run_over_several_tiers(rank: Rank) -> None:
    """Reachable means held on any tier, block by block."""
    rank.apply(stored(1, 2, 3), stored(1, 2, tier=Tier.CPU))

    rank.apply(removed(1))
    assert rank.held() == set(keys_of(1, 2, 3)[1:])
    rank.apply(removed(1, tier=Tier.CPU))
    assert rank.shown == set()


@pytest.mark.parametrize("tier", [Tier.CPU, Tier.STORAGE])
def test_block_may_come_back_from_a_slower_tier(rank: Rank, tier: Tier) -> None:
    """It is announced for the GPU again while its copy below stays."""
    rank.apply(stored(1, 2), placeholder(2, tier=tier), removed(2))

    rank.apply(stored(2, parent=1))
    assert rank.held() == set(keys_of(1, 2))
    rank.apply(removed(2, tier=tier))
    assert rank.held() == set(keys_of(1, 2))
    assert rank.blocks.held_blocks == 2


def test_f17_placeholder_takes_its_key_from_the_known_block(rank: Rank) -> None:
    """F17: h1 is on GPU and CPU now; an unknown hash is counted and ignored."""
    rank.apply(stored(1))

    rank.apply(placeholder(1, tier=Tier.CPU), placeholder(9, tier=Tier.CPU))
    assert rank.held(tier=Tier.CPU) == rank.held() == set(keys_of(1))
    assert rank.blocks.counts == {"unknown_placeholder": 1}


def test_placeholder_of_a_kept_block_brings_it_back(rank: Rank) -> None:
    """A block that left the GPU but is kept for its descendants is still known by its hash."""
    rank.apply(stored(1, 2, 3), removed(2))

    rank.apply(placeholder(2, tier=Tier.CPU))
    assert rank.held() == {keys_of(1)[0], keys_of(1, 2, 3)[2]}
    assert rank.held(tier=Tier.CPU) == {keys_of(1, 2)[1]}


def test_placeholder_of_an_unknown_group_is_counted(rank: Rank) -> None:
    """Nothing is learnt about a group from an event without a block size."""
    rank.apply(placeholder(1, 2, tier=Tier.CPU), removed(3, group=4))

    assert rank.blocks.counts == {"unknown_placeholder": 2, "unknown_removal": 1}
    assert rank.blocks.groups == {}


# Held means reachable


def test_f18_only_the_unbroken_run_from_the_start_is_held(rank: Rank) -> None:
    """F18: of blocks 0, 2, 3 of four only block 0 gives credit; without block 0 none does."""
    rank.apply(stored(1, 2, 3, 4))

    rank.apply(removed(2))
    assert rank.held() == set(keys_of(1))
    assert rank.blocks.held_blocks == 1
    rank.apply(stored(2, parent=1), removed(1))
    assert rank.held() == set()


def test_descendants_return_with_the_middle_block(rank: Rank) -> None:
    """What was never removed counts again as soon as its chain is whole."""
    rank.apply(stored(1, 2, 3), stored(4, 5, parent=2))
    rank.apply(removed(2))
    assert rank.held() == set(keys_of(1))

    update = rank.apply(stored(2, parent=1))
    assert rank.held() == {*keys_of(1, 2, 3), *keys_of(1, 2, 4, 5)}
    assert rank.blocks.held_blocks == 5
    assert len(list(update.changes)) == 1


def test_block_under_a_removed_one_is_still_placed(rank: Rank) -> None:
    """A block kept for its descendants is a known parent, without credit."""
    rank.apply(stored(1, 2, 3), removed(2))

    rank.apply(stored(5, parent=2, tier=Tier.CPU))
    assert rank.held() == set(keys_of(1))
    assert rank.blocks.orphans == 0
    rank.apply(stored(2, parent=1))
    assert rank.held() == set(keys_of(1, 2, 3))
    assert rank.held(tier=Tier.CPU) == {keys_of(1, 2, 5)[2]}


def test_kept_block_leaves_with_its_last_descendant(rank: Rank) -> None:
    """Nothing stays behind of a chain removed head first."""
    rank.apply(stored(1, 2, 3))

    rank.apply(removed(1), removed(2), removed(3))
    assert rank.blocks.tracked_entries() == 0
    rank.apply(stored(9, parent=2))
    assert rank.blocks.orphans == 1


def test_kept_block_that_returns_as_a_twin_is_one_block(rank: Rank) -> None:
    """The key decides, whatever hash the engine gives it this time."""
    rank.apply(stored(1, 2, 3), removed(2))

    rank.apply(stored(2, parent=1, hashes=hashes_of([22])))
    assert rank.held() == set(keys_of(1, 2, 3))
    rank.apply(removed(3, 22, 1))
    assert rank.blocks.tracked_entries() == 0


# Orphans


def test_f05_unknown_parent_is_parked_and_never_a_root(rank: Rank) -> None:
    """F05: no credit, not even for a prompt of just its tokens, until the parent shows."""
    rank.apply(stored(2, parent=1))
    rank.apply(stored(3, 4, parent=2))
    assert rank.shown == set()
    assert (rank.blocks.orphans, rank.blocks.counts["orphan_parked"]) == (3, 3)

    rank.apply(stored(1))
    assert rank.held() == set(keys_of(1, 2, 3, 4))
    assert rank.blocks.orphans == 0


def test_removal_of_an_orphan_counts(rank: Rank) -> None:
    """Copies of a parked block are counted like any others."""
    rank.apply(stored(2, parent=1), stored(2, parent=1), stored(3, parent=2))
    rank.apply(removed(2))
    rank.apply(placeholder(3, tier=Tier.CPU), removed(3))
    rank.apply(stored(1))
    assert rank.shown == {
        (0, Tier.GPU, keys_of(1, 2)[0]),
        (0, Tier.GPU, keys_of(1, 2)[1]),
        (0, Tier.CPU, keys_of(1, 2, 3)[2]),
    }
    assert rank.blocks.counts == {"orphan_parked": 2}


def test_orphan_whose_last_copy_went_is_forgotten(rank: Rank) -> None:
    """Its descendants wait on for it to be stored again."""
    rank.apply(stored(2, 3, parent=1), removed(2))
    assert rank.blocks.orphans == 1

    rank.apply(stored(1))
    assert rank.held() == set(keys_of(1))
    rank.apply(stored(2, parent=1))
    assert rank.held() == set(keys_of(1, 2, 3))


def test_copies_of_an_orphan_are_kept_when_it_is_placed(rank: Rank) -> None:
    """Three copies parked, one more announced with its parent: four removals."""
    rank.apply(*[stored(2, parent=1)] * 3)
    rank.apply(stored(1, 2))

    rank.apply(*[removed(2)] * 3)
    assert rank.held() == set(keys_of(1, 2))
    rank.apply(removed(2))
    assert rank.held() == set(keys_of(1))


def test_siblings_wait_for_one_parent(rank: Rank) -> None:
    """Each of them is attached; one that left meanwhile is not."""
    rank.apply(stored(2, parent=1), stored(3, parent=1), removed(2))

    rank.apply(stored(1))
    assert rank.held() == set(keys_of(1, 3))


def test_removal_of_another_tier_leaves_an_orphan_alone(rank: Rank) -> None:
    """Tiers are counted apart."""
    rank.apply(stored(2, parent=1), removed(2, tier=Tier.CPU))

    assert rank.blocks.counts == {"orphan_parked": 1, "unknown_removal": 1}


def test_orphan_that_is_stored_elsewhere_means_one_block(rank: Rank) -> None:
    """It waits for 5, and is stored under 1 before 5 shows: a hash never means two blocks."""
    rank.apply(stored(2, parent=5, tier=Tier.CPU))

    rank.apply(stored(1, 2, 3, 4, 5))
    assert rank.held() == set(keys_of(1, 2, 3, 4, 5))
    assert rank.held(tier=Tier.CPU) == {keys_of(1, 2)[-1]}
    rank.apply(removed(1, 2, 3, 4, 5), removed(2, tier=Tier.CPU))
    assert rank.blocks.tracked_entries() == 0


def test_parked_blocks_are_bounded_and_the_oldest_leaves() -> None:
    """A stream that never explains itself can't fill the memory."""
    rank = Rank(limits=TableLimits(max_parked_blocks=2))

    rank.apply(stored(2, parent=1), stored(4, parent=3), stored(6, parent=5))
    assert rank.blocks.orphans == 2
    assert rank.blocks.counts == {"orphan_parked": 3, "orphan_evicted": 1}
    rank.apply(stored(1), stored(3), stored(5))
    assert rank.held() == {*keys_of(1), *keys_of(3, 4), *keys_of(5, 6)}


# Namespaces and extras


def test_f08_salt_separates_tenants(rank: Rank) -> None:
    """F08: only the salt's owner matches, from the first block on."""
    rank.apply(stored(1, 2, extra_keys=[["a"], None]))

    assert rank.held() == set(keys_of(1, 2, salt="a"))
    assert rank.held().isdisjoint((*keys_of(1, 2), *keys_of(1, 2, salt="b")))


def test_f09_adapter_belongs_to_the_root_not_to_each_block(rank: Rank) -> None:
    """F09: the bare string equal to the adapter is the adapter; a salt after it still counts."""
    rank.apply(stored(1, 2, lora="ad1", extra_keys=[["ad1"], ["ad1"]]))
    rank.apply(stored(3, lora="ad1", extra_keys=[["ad1", "salt"]]))
    rank.apply(stored(4, parent=2, lora="ad1", extra_keys=[["ad1"]]))

    assert rank.held() == {
        *keys_of(1, 2, 4, lora="ad1"),
        *keys_of(3, lora="ad1", salt="salt"),
    }


def test_salt_that_spells_the_adapter_is_still_a_salt(rank: Rank) -> None:
    """Only the first of two equal strings is the adapter."""
    rank.apply(stored(1, lora="x", extra_keys=[["x", "x"]]))

    assert rank.held() == set(keys_of(1, lora="x", salt="x"))


@pytest.mark.parametrize(
    "extra",
    [
        pytest.param(["image", 2], id="pair"),
        pytest.param("image", id="identifier-of-0.18"),
        pytest.param(b"digest", id="prompt-embeds"),
        pytest.param({"new": 1}, id="unknown"),
    ],
)
def test_extras_of_a_block_leave_the_text_before_it_shared(rank: Rank, extra: object) -> None:
    """Text before an image keeps its keys; the image's block and all after it differ."""
    rank.apply(stored(1, 2, 3, extra_keys=[None, [extra], None]))

    assert len(rank.held()) == 3
    assert rank.held() & set(keys_of(1, 2, 3)) == set(keys_of(1))


def test_image_in_block_0_is_no_salt(rank: Rank) -> None:
    """A pair belongs to its block; the bare string after it is the salt."""
    rank.apply(stored(1, extra_keys=[[["image", 2], "a"]]), stored(2, extra_keys=[[b"digest"]]))

    assert len(rank.held()) == 2
    assert rank.held().isdisjoint((*keys_of(1), *keys_of(1, salt="a"), *keys_of(2)))


def test_entry_that_is_no_list_is_one_extra(rank: Rank) -> None:
    """A shape nobody publishes is read as what it must mean."""
    rank.apply(stored(1, extra_keys=["a"]))

    assert rank.held() == set(keys_of(1, salt="a"))


def test_orphan_keeps_its_extras(rank: Rank) -> None:
    """A parked image block is placed as an image block."""
    rank.apply(stored(2, parent=1, extra_keys=[["image"]]), stored(1))
    other = Rank()
    other.apply(stored(1, 2, extra_keys=[None, ["image"]]))

    assert rank.held() == other.held()


def test_root_of_many_salts_leaves_with_its_blocks(rank: Rank) -> None:
    """A tenant costs nothing once its blocks are gone, nor when its event adds none."""
    rank.apply(*[stored(each, extra_keys=[[f"salt-{each}"]]) for each in range(1, 9)])
    rank.apply(stored(1, extra_keys=[["another"]]), removed(1))

    rank.apply(removed(*range(1, 9)))
    assert rank.blocks.tracked_entries() == 0


# Events that contradict themselves


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        pytest.param(stored(7, 7), "duplicate_hashes", id="duplicate"),
        pytest.param(stored(7, parent=7), "self_parent", id="own-parent"),
        pytest.param(stored(7, 8, parent=8), "self_parent", id="parent-in-chain"),
        pytest.param(stored(7, token_ids=[1, 2, 3, -4]), "bad_token", id="negative-token"),
        pytest.param(stored(7, token_ids=[1, 2, 3, 2**32]), "bad_token", id="large-token"),
        pytest.param(stored(7, token_ids=[1] * 5), "unaligned_tokens", id="too-long"),
        pytest.param(stored(7, token_ids=[1] * 8, block_size=8), "mixed_block_size", id="size"),
        pytest.param(stored(7, kind="cross_attention", group=5), "unsupported_group", id="kind"),
        pytest.param(
            stored(7, token_ids=[1] * 5, group=5), "unsupported_group", id="group-without-a-kind"
        ),
    ],
)
def test_f20_inconsistent_event_costs_only_itself(
    rank: Rank, bad: BlockStored, reason: str
) -> None:
    """F20: the good rows stay, and the event around it counts."""
    rank.apply(stored(*range(100, 200)))

    rank.apply(stored(1), bad, stored(2, parent=1))
    assert rank.held() == {*keys_of(*range(100, 200)), *keys_of(1, 2)}
    assert rank.blocks.counts == {reason: 1}


def test_f20_event_without_hashes_is_no_fault(rank: Rank) -> None:
    """F20: window groups send it all the time."""
    rank.apply(stored(token_ids=[1, 2]), placeholder(), removed())

    assert rank.blocks.counts == {}


def test_known_hash_counts_even_where_tokens_do_not_align(rank: Rank) -> None:
    """A masked announcement is still a copy of what is known."""
    rank.apply(stored(1, 2))

    rank.apply(stored(1, 2, token_ids=[1] * 30), removed(1, 2))
    assert rank.held() == set(keys_of(1, 2))
    assert rank.blocks.counts == {"unaligned_tokens": 1}


def test_negative_block_size_is_a_placeholder(rank: Rank) -> None:
    """A size that can't be one means nothing about tokens."""
    rank.apply(stored(1, block_size=-4))

    assert rank.blocks.counts == {"unknown_placeholder": 1}


# Reset


def test_clear_drops_everything_at_once(rank: Rank) -> None:
    """It can't be told which cache was reset: every tier, group and orphan goes."""
    rank.apply(stored(1, 2), stored(1, tier=Tier.CPU), stored(9, parent=8), stored(1), removed(1))

    update = rank.apply(stored(3), CLEARED)
    assert list(update.changes) == [AllDropped()]
    assert rank.blocks.tracked_entries() == 0
    assert (rank.blocks.orphans, rank.blocks.held_blocks) == (0, 0)


def test_stores_after_a_clear_in_the_same_batch_count(rank: Rank) -> None:
    """The clear comes with the step that stores the next blocks."""
    rank.apply(stored(1, 2))

    update = rank.apply(removed(2), CLEARED, stored(1))
    assert list(update.changes) == [AllDropped(), BlocksHeld(0, Tier.GPU, keys_of(1))]


# Groups


def window(*names: int, group: int = 1, **fields: Any) -> BlockStored:
    """A window group's event: the last blocks of a chain, tokens of all of it."""
    return stored(
        *names,
        **{
            "group": group,
            "kind": "sliding_window",
            "window_tokens": 6,
            "token_ids": tokens_of(*range(10)),
            **fields,
        },
    )


def full(*names: int, group: int = 3, **fields: Any) -> BlockStored:
    return stored(*names, group=group, kind="full_attention", **fields)


def test_window_blocks_are_named_by_the_full_group_of_the_same_batch(rank: Rank) -> None:
    """Window groups come first and skip masked blocks: names are resolved at the batch's end."""
    rank.apply(window(2, 3), full(1, 2, 3))

    assert rank.blocks.groups == {
        1: GroupSpec(group=1, kind=GroupKind.WINDOW, block_size=SIZE, window_tokens=6),
        3: GroupSpec(group=3, kind=GroupKind.FULL, block_size=SIZE),
    }
    assert rank.held(group=1) == set(keys_of(1, 2, 3)[1:])
    assert rank.held(group=3) == set(keys_of(1, 2, 3))


def test_several_window_groups_are_named_by_one_full_group(rank: Rank) -> None:
    """Gemma publishes three of them before the full group, and more may show later."""
    rank.apply(window(2, group=0), window(2, group=1), full(1, 2))

    rank.apply(window(1, group=2))
    assert [rank.held(group=each) for each in range(3)] == [
        {keys_of(1, 2)[1]},
        {keys_of(1, 2)[1]},
        set(keys_of(1)),
    ]


def test_window_blocks_wait_for_their_name(rank: Rank) -> None:
    """The full group may name a hash batches later, even as an orphan's descendant."""
    rank.apply(window(2, 3), full(2, 3, parent=1))
    assert rank.held(group=1) == set()

    rank.apply(full(1))
    assert rank.held(group=1) == set(keys_of(1, 2, 3)[1:])


def test_window_block_named_earlier_is_held_at_once(rank: Rank) -> None:
    """The full group knew the hash already."""
    rank.apply(full(1, 2, 3))

    rank.apply(window(3))
    assert rank.held(group=1) == {keys_of(1, 2, 3)[2]}


def test_window_block_outlives_the_full_one(rank: Rank) -> None:
    """A name once known stays while the hash is held; then it goes."""
    rank.apply(window(2), window(2), full(1, 2))
    rank.apply(removed(2, group=3), removed(1, group=3))
    assert rank.held(group=1) == {keys_of(1, 2)[1]}

    rank.apply(removed(2, group=1))
    assert rank.held(group=1) == {keys_of(1, 2)[1]}
    rank.apply(removed(2, group=1), removed(2, group=1))
    assert rank.held(group=1) == set()
    assert rank.blocks.counts == {"unknown_removal": 1}
    assert rank.blocks.tracked_entries() == 0


def test_copies_of_a_named_window_block_are_counted(rank: Rank) -> None:
    """Two copies, two removals."""
    rank.apply(window(2), full(1, 2))
    rank.apply(window(2))

    rank.apply(removed(2, group=1))
    assert rank.held(group=1) == {keys_of(1, 2)[1]}
    rank.apply(removed(2, group=1))
    assert rank.held(group=1) == set()


def test_unnamed_window_block_may_leave_again(rank: Rank) -> None:
    """A removal before the name finds the hash."""
    rank.apply(window(2), removed(2, group=1), full(1, 2))

    assert rank.held(group=1) == set()
    assert rank.blocks.counts == {}


def test_window_group_names_its_own_blocks_where_tokens_align(rank: Rank) -> None:
    """Its block size may be another than the full group's; then nobody else can."""
    rank.apply(full(1, 2, 3, 4), window(51, 52, block_size=8, token_ids=tokens_of(1, 2, 3, 4)))
    rank.apply(window(53, parent=52, block_size=8, token_ids=tokens_of(5, 6)))
    rank.apply(window(54, parent=99, block_size=8, token_ids=tokens_of(5, 6)))

    root = root_key(Namespace(model="tiny"))
    coarse = block_keys(root, pack_tokens(tokens_of(1, 2, 3, 4, 5, 6)), 8)
    assert rank.held(group=1) == set(coarse)


def test_bad_token_in_a_window_group_is_counted(rank: Rank) -> None:
    """The copies count; the name must come from elsewhere."""
    rank.apply(window(1, token_ids=[-1] * SIZE), full(1))

    assert rank.blocks.counts == {"bad_token": 1}
    assert rank.held(group=1) == set(keys_of(1))


def test_window_placeholder_needs_a_held_hash(rank: Rank) -> None:
    """An offloaded window block is resolved like any other."""
    rank.apply(full(1, 2), window(2))
    rank.apply(placeholder(2, group=1, tier=Tier.CPU), placeholder(7, group=1, tier=Tier.CPU))
    assert rank.held(group=1, tier=Tier.CPU) == {keys_of(1, 2)[1]}
    assert rank.blocks.counts == {"unknown_placeholder": 1}

    rank.apply(removed(2, group=1))
    assert rank.held(group=1) == set()
    rank.apply(removed(2, group=1, tier=Tier.CPU))
    assert rank.held(group=1, tier=Tier.CPU) == set()


def test_twin_hashes_hold_a_window_key_together(rank: Rank) -> None:
    """As in full groups, the key decides."""
    twins = [window(1, hashes=hashes_of([each]), token_ids=tokens_of(1)) for each in (11, 12)]
    rank.apply(*twins)

    rank.apply(removed(11, group=1))
    assert rank.held(group=1) == set(keys_of(1))
    rank.apply(removed(12, group=1))
    assert rank.held(group=1) == set()


def test_clear_empties_window_groups(rank: Rank) -> None:
    """Names and copies go with everything else."""
    rank.apply(window(2), full(1, 2))

    rank.apply(CLEARED)
    assert rank.shown == set()
    assert rank.blocks.tracked_entries() == 0


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("full_attention", GroupKind.FULL),
        ("mla_attention", GroupKind.FULL),
        ("sink_full_attention", GroupKind.FULL),
        ("sliding_window", GroupKind.WINDOW),
        ("sliding_window_mla", GroupKind.WINDOW),
        ("mamba", GroupKind.STATE),
        (None, GroupKind.FULL),
    ],
)
def test_kind_says_what_a_hit_needs(rank: Rank, kind: str | None, expected: GroupKind) -> None:
    """Group 0 without a kind is full attention: releases before 0.22."""
    rank.apply(stored(1, kind=kind, window_tokens=8))

    assert rank.blocks.groups[0].kind is expected
    assert rank.blocks.groups[0].window_tokens == (8 if expected is GroupKind.WINDOW else None)


def test_full_groups_are_followed_each_by_itself(rank: Rank) -> None:
    """The index takes what all of them hold; block sizes may differ."""
    rank.apply(full(1, 2, group=0), full(31, group=2, block_size=8, token_ids=tokens_of(1, 2)))

    coarse = block_keys(root_key(Namespace(model="tiny")), pack_tokens(tokens_of(1, 2)), 8)
    assert rank.held(group=0) == set(keys_of(1, 2))
    assert rank.held(group=2) == set(coarse)
    assert rank.blocks.held_blocks == 3


def test_group_without_a_kind_is_full_until_its_tokens_say_otherwise(rank: Rank) -> None:
    """0.20 and 0.21 number groups but don't name kinds; a window must not limit hits for ever."""
    rank.apply(stored(1, 2, group=1))
    assert rank.held(group=1) == set(keys_of(1, 2))

    rank.apply(stored(3, parent=2, group=1, token_ids=tokens_of(3, 4)))
    assert rank.specs[-1] == GroupSpec(group=1, kind=GroupKind.WINDOW, block_size=SIZE)
    assert rank.specs[-1].boundary_blocks == 0
    rank.apply(stored(5, group=1))
    assert rank.held(group=1) == set()
    assert rank.blocks.counts == {"unsupported_group": 2}


def test_gpu_corrects_a_block_size_learnt_from_another_tier(rank: Rank) -> None:
    """A connector's chunks come first after a late start: the engine's own blocks decide."""
    rank.apply(stored(9, tier=Tier.CPU, block_size=8, token_ids=[1] * 8))
    rank.apply(stored(1, 2))
    rank.apply(stored(8, tier=Tier.CPU, block_size=8, token_ids=[1] * 8))

    assert [spec.block_size for spec in rank.specs] == [8, SIZE]
    assert rank.shown == {(0, Tier.GPU, key) for key in keys_of(1, 2)}
    assert rank.blocks.counts == {"mixed_block_size": 1}


# Laws

names = st.integers(1, 6)
chains = st.lists(st.lists(names, min_size=1, max_size=5, unique=True), max_size=6)


def salt_of(chain: Sequence[int]) -> str | None:
    """Chains that begin with one of three blocks are another tenant's."""
    return "tenant" if chain[0] % 2 else None


def announcements(chains: Sequence[Sequence[int]], draw: random.Random) -> Iterator[BlockStored]:
    """The chains as an engine announces them, hash = whole prefix, cut at random places."""
    for chain in chains:
        prefixes = [EngineHash(hash(tuple(chain[: at + 1])) % 2**64) for at in range(len(chain))]
        start = 0
        while start < len(chain):
            end = draw.randint(start + 1, len(chain))
            yield stored(
                *chain[start:end],
                hashes=prefixes[start:end],
                parent=prefixes[start - 1] if start else None,
                extra_keys=None if start else [[salt_of(chain)] if salt_of(chain) else None],
            )
            start = end


@given(chains, st.randoms(use_true_random=False))
def test_any_order_of_stores_ends_in_the_same_blocks(
    chains: list[list[int]], draw: random.Random
) -> None:
    """Orphans are attached whatever the order in which their ancestors show."""
    events = list(announcements(chains, draw))
    draw.shuffle(events)
    rank = Rank()

    for event in events:
        rank.apply(event)
    assert rank.held() == {key for chain in chains for key in keys_of(*chain, salt=salt_of(chain))}
    assert rank.blocks.orphans == 0


@given(chains, st.randoms(use_true_random=False))
def test_removing_all_that_was_stored_leaves_nothing(
    chains: list[list[int]], draw: random.Random
) -> None:
    """Whatever the order of stores and of removals, no table keeps an entry."""
    events = list(announcements(chains, draw))
    draw.shuffle(events)
    removals = [removed(each) for event in events for each in event.hashes]
    draw.shuffle(removals)
    rank = Rank()

    for event in (*events, *removals):
        rank.apply(event)
    assert rank.shown == set()
    assert rank.blocks.tracked_entries() == 0


@given(chains, st.randoms(use_true_random=False))
def test_batching_changes_nothing(chains: list[list[int]], draw: random.Random) -> None:
    """One event per batch or all in one: the index ends up the same."""
    stores = list(announcements(chains, draw))
    events = [*stores, *(removed(draw.choice(event.hashes)) for event in stores)]
    one_by_one, at_once = Rank(), Rank()

    for event in events:
        one_by_one.apply(event)
    at_once.apply(*events)
    assert one_by_one.shown == at_once.shown


paths = st.lists(names, min_size=1, max_size=3).map(tuple)


@given(st.lists(st.tuples(paths, st.integers(0, 9)), max_size=60))
def test_after_each_event_what_is_held_is_what_can_be_reached(
    steps: list[tuple[tuple[int, ...], int]],
) -> None:
    """Wide trees, rows used again: each step stores the end of a path or removes some block."""
    rank, held = Rank(), list[tuple[int, ...]]()
    for path, at in steps:
        prefixes = [path[: end + 1] for end in range(len(path))]
        if at > 3 and held:
            gone = held.pop(at * 7 % len(held))
            rank.apply(BlockRemoved([EngineHash(hash(gone) % 2**64)]))
        else:
            added = prefixes[min(at, len(path) - 1) :]
            held += added
            rank.apply(
                stored(
                    *(each[-1] for each in added),
                    hashes=[EngineHash(hash(each) % 2**64) for each in added],
                    parent=hash(added[0][:-1]) % 2**64 if len(added[0]) > 1 else None,
                )
            )
        reachable = {
            each for each in held if all(each[: end + 1] in held for end in range(len(each)))
        }
        assert rank.held() == {keys_of(*each)[-1] for each in reachable}
    for gone in held:
        rank.apply(BlockRemoved([EngineHash(hash(gone) % 2**64)]))
    assert rank.blocks.tracked_entries() == 0


small = st.integers(1, 5)
any_stores = st.builds(
    BlockStored,
    hashes=st.lists(small.map(EngineHash), max_size=3),
    parent=st.none() | small.map(EngineHash),
    token_ids=st.lists(st.integers(-1, 2), max_size=6),
    block_size=st.integers(-1, 3),
    tier=st.sampled_from(Tier),
    lora=st.none() | st.just("ad1"),
    extra_keys=st.none()
    | st.lists(st.none() | st.lists(st.sampled_from(["ad1", "salt", 3, b"x", ["i", 1]]))),
    group=st.integers(0, 2),
    kind=st.sampled_from([None, "full_attention", "sliding_window", "mamba", "sparse"]),
    window_tokens=st.none() | small,
)
any_removals = st.builds(
    BlockRemoved,
    hashes=st.lists(small.map(EngineHash), max_size=3),
    tier=st.sampled_from(Tier),
    group=st.integers(0, 2),
)
any_events = st.lists(any_stores | any_removals | st.just(CLEARED), max_size=12)


@given(st.lists(any_events, max_size=6))
def test_whatever_comes_is_applied_and_a_clear_leaves_nothing(
    batches: list[list[BlockStored | BlockRemoved | AllBlocksCleared]],
) -> None:
    """No event raises, no key is told twice, and nothing survives a reset."""
    rank = Rank(limits=TableLimits(max_parked_blocks=3))

    for events in batches:
        rank.apply(*events)
    rank.apply(CLEARED)
    assert rank.shown == set()
    assert rank.blocks.tracked_entries() == 0


# Full reports: what a request of ours has the engine announce again.


def test_what_is_announced_again_on_request_is_no_copy_more(rank: Rank) -> None:
    """Known blocks keep their copies, on every tier; one eviction each, and all is gone."""
    rank.apply(stored(1, 2), stored(1, 2, tier=Tier.CPU), stored(1))
    ours: dict[str, Any] = {"session_id": FULL_REPORT_SESSION}

    rank.apply(stored(1, 2, 3, **ours))

    assert rank.held() == set(keys_of(1, 2, 3))
    rank.apply(removed(3), removed(2), removed(1), removed(1))
    assert rank.held() == set()
    rank.apply(removed(2, tier=Tier.CPU), removed(1, tier=Tier.CPU))
    assert rank.blocks.tracked_entries() == 0


def test_what_the_request_computes_below_is_a_copy_like_any_other(rank: Rank) -> None:
    """Only what begins at the root may have been reused; another session's may not."""
    ours: dict[str, Any] = {"session_id": FULL_REPORT_SESSION}
    rank.apply(stored(1, 2, **ours), stored(3, parent=2, **ours), stored(3, parent=2, **ours))
    rank.apply(stored(1, session_id="other"))

    rank.apply(removed(3), removed(2), removed(1))

    assert rank.held() == set(keys_of(1))


def test_announced_again_places_and_counts_parked_blocks_once(rank: Rank) -> None:
    """An orphan was announced before its parent was known."""
    rank.apply(stored(2, parent=1))
    rank.apply(stored(1, 2, session_id=FULL_REPORT_SESSION))
    assert rank.held() == set(keys_of(1, 2))

    rank.apply(removed(2), removed(1))

    assert rank.blocks.tracked_entries() == 0


def test_window_blocks_announced_again_are_no_copies_more(rank: Rank) -> None:
    """Each group tells its own."""
    window: dict[str, Any] = {"kind": "sliding_window", "window_tokens": 9, "group": 1}
    rank.apply(stored(1, 2, kind="full_attention"), stored(1, 2, **window))
    rank.apply(stored(1, 2, session_id=FULL_REPORT_SESSION, **window))

    rank.apply(removed(1, 2, group=1))

    assert rank.held(group=1) == set()
