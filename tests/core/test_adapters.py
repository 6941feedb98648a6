"""F10: an adapter's blocks after another one was loaded under its name."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.core.adapters import MOST_IDLE
from indexer.core.block_rows import BlockRow
from indexer.core.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from indexer.core.hashing import Namespace, block_keys, pack_tokens, root_key
from indexer.core.index import AllDropped, BlocksDropped, BlocksHeld, GroupSpec, RankUpdate
from indexer.core.rank_blocks import RankBlocks
from indexer.core.types import BlockKey, EngineHash, InstanceId, RankId, Tier

RANK = RankId(InstanceId("http://engine:8000"), 0)
SIZE = 4


class Rank:
    """A RankBlocks and the keys that an index would hold, whatever their tier."""

    def __init__(self, blocks: RankBlocks | None = None) -> None:
        self.blocks = blocks or new_blocks()
        self.updates: list[RankUpdate] = []
        self.held: set[tuple[int, Tier, BlockKey]] = set()
        self._seq = itertools.count()

    def apply(self, *events: Any) -> None:
        update = self.blocks.apply(next(self._seq), EventBatch(1.0, 0, list(events)))
        self.updates.append(update)
        for change in update.changes:
            if isinstance(change, BlocksHeld):
                self.held |= {(change.group, change.tier, key) for key in change.keys}
            elif isinstance(change, BlocksDropped):
                self.held -= {(change.group, change.tier, key) for key in change.keys}
            elif isinstance(change, AllDropped):
                self.held = set()

    def credit(self, *names: int, lora: str | None = "ad1", salt: str | None = None) -> int:
        """Blocks of a prompt that are held from its start."""
        held = {key for _, _, key in self.held}
        keys = keys_of(*names, lora=lora, salt=salt)
        return next((at for at, key in enumerate(keys) if key not in held), len(keys))


def new_blocks() -> RankBlocks:
    return RankBlocks(rank=RANK, model="tiny", epoch=1, keeps_rows=True)


def tokens_of(*names: int) -> list[int]:
    return [name * 100 + at for name in names for at in range(SIZE)]


def keys_of(*names: int, lora: str | None, salt: str | None = None) -> list[BlockKey]:
    root = root_key(Namespace(model="tiny", lora=lora, cache_salt=salt))
    return list(block_keys(root, pack_tokens(tokens_of(*names)), SIZE))


def stored(*names: int, life: int = 1, parent: int | None = None, **more: Any) -> BlockStored:
    """Blocks of the adapter; engine hashes are the names, `hashes` overrides them."""
    return BlockStored(
        **{
            "hashes": [EngineHash(name) for name in names],
            "parent": parent,
            "token_ids": tokens_of(*names),
            "block_size": SIZE,
            "lora": "ad1",
            "lora_id": life,
            **more,
        }
    )


def removed(*names: int, **more: Any) -> BlockRemoved:
    return BlockRemoved([EngineHash(name) for name in names], **more)


def resumed(rank: Rank) -> Rank:
    """What the next process makes of all that `rank` told."""
    rows: dict[int, dict[EngineHash, BlockRow]] = {}
    for update in rank.updates:
        for each in update.rows:
            rows.setdefault(each.group, {}).update({row.engine_hash: row for row in each.rows()})
    specs = [
        each for update in rank.updates for each in update.changes if isinstance(each, GroupSpec)
    ]
    facts = rank.updates[-1].facts
    assert facts is not None
    later = Rank(new_blocks())
    assert later.blocks.restore(
        specs, {group: list(each.values()) for group, each in rows.items()}, facts
    )
    later.held = set(rank.held)
    return later


@pytest.fixture
def rank() -> Rank:
    return Rank()


def test_f10_new_id_ends_the_credit_of_the_old_one(rank: Rank) -> None:
    """The old weights' rows leave the index; other adapters and the base model keep theirs."""
    rank.apply(stored(1, 2), stored(5, lora="ad2", lora_id=7), stored(6, lora=None, lora_id=None))

    rank.apply(stored(3, life=2))

    assert rank.credit(1, 2) == 0
    assert rank.credit(3) == 1
    assert rank.credit(5, lora="ad2") == 1
    assert rank.credit(6, lora=None) == 1


def test_same_prompt_counts_again_once_the_new_adapter_has_computed_it(rank: Rank) -> None:
    """Engines that hash the id, or the path, give it another hash."""
    rank.apply(stored(1, 2))

    rank.apply(stored(1, life=2, hashes=[EngineHash(101)]))

    assert rank.credit(1, 2) == 1


def test_blocks_built_on_the_old_weights_give_no_credit(rank: Rank) -> None:
    """An engine that hashes the name only goes on from the stale blocks: no orphan, no credit."""
    rank.apply(stored(1, 2))

    rank.apply(stored(3, parent=2, life=2))
    rank.apply(stored(4, parent=3, life=2))

    assert rank.credit(1, 2, 3, 4) == 0
    assert rank.blocks.orphans == 0
    assert rank.blocks.counts["ended_adapter"] == 2


def test_late_store_of_the_old_life_gives_no_credit(rank: Rank) -> None:
    """A request that began before the reload goes on with the old weights."""
    rank.apply(stored(1), stored(3, life=2))

    rank.apply(stored(9, life=1))

    assert rank.credit(9) == 0
    assert rank.credit(3) == 1


def test_removals_of_the_old_life_take_nothing_from_the_new(rank: Rank) -> None:
    """One copy each: the stale one goes first, as it was stored first."""
    rank.apply(stored(1), stored(1))
    rank.apply(stored(3, life=2))

    rank.apply(removed(1), removed(1))
    rank.apply(stored(1, life=2))
    assert rank.credit(1) == 1

    rank.apply(removed(1), removed(3))
    assert rank.credit(1) == 0
    assert rank.blocks.tracked_entries() == 0
    assert rank.blocks.counts["unknown_removal"] == 0


def test_what_is_left_of_several_copies_still_ends(rank: Rank) -> None:
    """One removal of two leaves a block of the old life."""
    rank.apply(stored(1), stored(1), removed(1))
    assert rank.credit(1) == 1

    rank.apply(stored(3, life=2))

    assert rank.credit(1) == 0


def test_block_that_was_refused_is_not_counted_apart(rank: Rank) -> None:
    """Nothing of it was stored, so nothing of it will be removed."""
    rank.apply(stored(1, token_ids=[-1] * SIZE))

    rank.apply(stored(3, life=2), removed(3))

    assert rank.blocks.tracked_entries() == 0


def test_salted_blocks_of_the_adapter_end_too(rank: Rank) -> None:
    """A salt makes another root, not another adapter."""
    rank.apply(stored(1, extra_keys=[["ad1", "s"]]))
    assert rank.credit(1, salt="s") == 1

    rank.apply(stored(3, life=2))

    assert rank.credit(1, salt="s") == 0


def test_offloaded_copies_end_with_the_others(rank: Rank) -> None:
    """Every tier, and what is copied there later."""
    offload = stored(1, token_ids=[], block_size=0, lora=None, lora_id=None, tier=Tier.CPU)
    rank.apply(stored(1), offload)

    rank.apply(stored(3, life=2), offload)
    assert rank.credit(1) == 0

    rank.apply(removed(1), removed(1, tier=Tier.CPU), removed(1, tier=Tier.CPU), removed(3))
    assert rank.blocks.tracked_entries() == 0


def test_window_groups_end_too(rank: Rank) -> None:
    """Every group of a hybrid model."""
    window: dict[str, Any] = {"group": 1, "kind": "sliding_window", "window_tokens": 5}
    rank.apply(stored(1, 2, **window), stored(1, 2, kind="full_attention"))
    assert {group for group, _, _ in rank.held} == {0, 1}

    rank.apply(stored(3, life=2, kind="full_attention"))

    assert rank.held == {(0, Tier.GPU, keys_of(3, lora="ad1")[0])}


def test_orphans_of_the_old_life_are_forgotten(rank: Rank) -> None:
    """Their parent, should it show, is of the old life as well."""
    rank.apply(stored(2, parent=1))
    assert rank.blocks.orphans == 1

    rank.apply(stored(3, life=2))

    assert rank.blocks.orphans == 0


def test_clear_forgets_what_was_counted_apart(rank: Rank) -> None:
    """The same hash may then be stored by the new adapter."""
    rank.apply(stored(1), stored(3, life=2), AllBlocksCleared(), stored(1, life=2))

    assert rank.credit(1) == 1


def test_reload_is_seen_after_a_restart_of_the_indexer(rank: Rank) -> None:
    """The next process knows the id, and which rows are the adapter's."""
    window: dict[str, Any] = {"group": 1, "kind": "sliding_window", "window_tokens": 5}
    rank.apply(stored(1, 2, kind="full_attention"), stored(1, 2, **window))
    rank.apply(stored(6, 7, lora=None, lora_id=None, kind="full_attention"))
    twins = [EngineHash(101), EngineHash(102)]
    rank.apply(stored(1, 2, hashes=twins, kind="full_attention"))
    later = resumed(rank)

    later.apply(stored(3, life=2, kind="full_attention"))

    assert later.credit(1, 2) == 0
    assert later.credit(6, 7, lora=None) == 2
    assert not {group for group, _, _ in later.held} - {0}


SALTED: dict[str, Any] = {"extra_keys": [["ad1", "s"]]}
PLAIN: dict[str, Any] = {"lora": None, "lora_id": None}


def test_salted_blocks_end_after_a_restart_too(rank: Rank) -> None:
    """Nobody knows any more whose they are, so all of them do; unsalted ones keep their credit."""
    rank.apply(stored(1, **SALTED), stored(2, parent=1), stored(3, lora="ad2", life=7))
    rank.apply(stored(4, **PLAIN), stored(5, **PLAIN, extra_keys=[["t"]]))
    later = resumed(rank)
    assert later.credit(1, 2, salt="s") == 2

    later.apply(stored(9, life=8))
    later.apply(stored(10, parent=2, life=8))  # an engine that hashes the name only

    assert later.credit(1, 2, 10, salt="s") == 0
    assert later.credit(5, lora=None, salt="t") == 0
    assert later.credit(3, lora="ad2") == later.credit(4, lora=None) == later.credit(9) == 1


def test_salted_block_of_a_restored_rank_that_is_told_again_is_known(rank: Rank) -> None:
    """Whoever stores it says whose it is: a tenant of the base model loses nothing."""
    salted = stored(5, **PLAIN, extra_keys=[["t"]])
    rank.apply(stored(1), salted)
    later = resumed(rank)

    later.apply(salted, stored(9, life=2))

    assert later.credit(5, lora=None, salt="t") == 1


def test_new_adapter_ends_no_salted_blocks(rank: Rank) -> None:
    """Unless so many are known that it may be one that was forgotten."""
    rank.apply(stored(1, **SALTED))
    later = resumed(rank)

    later.apply(*(stored(8, **adapter(number)) for number in range(MOST_IDLE - 1)))
    assert later.credit(1, salt="s") == 1

    later.apply(stored(9, **adapter(MOST_IDLE)))
    assert later.credit(1, salt="s") == 0


def test_salted_blocks_of_a_restored_rank_leave_like_others(rank: Rank) -> None:
    """With their last copy, or a reset."""
    rank.apply(
        stored(1, **SALTED), stored(1, **SALTED), stored(2, hashes=[EngineHash(2)], **SALTED)
    )
    later = resumed(rank)

    later.apply(removed(1))
    assert later.credit(1, salt="s") == 1
    later.apply(removed(1), removed(2))
    assert later.blocks.tracked_entries() == 0

    later = resumed(rank)
    later.apply(AllBlocksCleared())
    assert later.blocks.tracked_entries() == 0


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["store", "store", "remove"]), st.integers(1, 4), st.integers(1, 3)
        ),
        max_size=30,
    )
)
def test_whatever_comes_nothing_of_an_older_life_is_credited(
    steps: list[tuple[str, int, int]],
) -> None:
    """Law: with hashes that tell lives apart, credit is what the newest life stored and kept."""
    rank, newest, copies = Rank(), 0, dict[tuple[int, int], int]()
    for what, name, life in steps:
        hash_ = EngineHash(100 * life + name)
        if what == "store":
            rank.apply(stored(name, life=life, hashes=[hash_]))
            newest = max(newest, life)
            copies[life, name] = copies.get((life, name), 0) + 1
        elif copies.get((life, name)):
            rank.apply(removed(hash_))
            copies[life, name] -= 1

        for each in range(1, 5):
            assert rank.credit(each) == (copies.get((newest, each), 0) > 0)
    if not any(copies.values()):
        assert rank.blocks.tracked_entries() == 0


def adapter(number: int) -> dict[str, Any]:
    return {"lora": f"user-{number}", "life": 100 + number}


def known_ids(rank: Rank) -> list[int]:
    facts = rank.updates[-1].facts
    assert facts is not None
    return [each for _, each in facts.adapters]


def test_adapters_under_ever_new_names_are_forgotten(rank: Rank) -> None:
    """Those that had a block last are remembered, and all that have one."""
    rank.apply(stored(7, lora="stays"))
    for number in range(MOST_IDLE + 10):
        rank.apply(stored(8, **adapter(number)), removed(8))

    assert known_ids(rank) == [1, *range(110, 110 + MOST_IDLE)]

    rank.apply(removed(7))
    assert known_ids(rank) == [1, *range(111, 110 + MOST_IDLE)]


def test_old_life_of_an_idle_adapter_gives_no_credit(rank: Rank) -> None:
    """All its blocks have left, and a request of the old weights is still under way."""
    rank.apply(stored(1), stored(2, life=2), removed(2), removed(1))

    rank.apply(stored(1))

    assert rank.credit(1) == 0


def test_cleared_adapters_are_idle(rank: Rank) -> None:
    """A reset empties them, and they are forgotten like others."""
    rank.apply(stored(7, lora="first"), AllBlocksCleared())
    for number in range(MOST_IDLE):
        rank.apply(stored(8, **adapter(number)), removed(8))

    assert 1 not in known_ids(rank)


def test_block_that_another_adapter_names_is_that_one_s(rank: Rank) -> None:
    """Only a hash that means two things does this; nothing is counted twice."""
    rank.apply(stored(1), stored(1, lora="ad2", life=2))

    rank.apply(removed(1), removed(1))

    assert rank.blocks.tracked_entries() == 0
    assert known_ids(rank) == [1, 2]


def test_restored_adapters_are_forgotten_in_their_turn(rank: Rank) -> None:
    """One that has blocks stays; the others had none."""
    rank.apply(stored(7, lora="stays"), stored(8, lora="goes", life=2), removed(8))
    facts = rank.updates[-1].facts
    assert facts is not None
    full = rank.blocks.first_full()
    assert full is not None
    blocks = new_blocks()
    found = [row for row in map(full.row, full.known_hashes()) if row is not None]
    assert blocks.restore([full.spec], {0: found}, facts)
    resumed = Rank(blocks)

    for number in range(MOST_IDLE):
        resumed.apply(stored(8, **adapter(number)), removed(8))

    assert known_ids(resumed) == [1, *range(100, 100 + MOST_IDLE)]


def test_facts_that_have_not_changed_are_the_same(rank: Rank) -> None:
    """So that a backend need not write them again with every batch."""
    rank.apply(stored(1))
    rank.apply(stored(2, parent=1))
    rank.apply(stored(3, lora="ad2", life=2))

    first, second, third = (update.facts for update in rank.updates)
    assert first is second
    assert second is not third


def test_root_keys_of_many_adapters_are_not_all_remembered(rank: Rank) -> None:
    """They are worked out again, and are the same."""
    for number in range(1100):
        rank.apply(stored(number, **adapter(number)))
    full = rank.blocks.first_full()
    assert full is not None
    assert len(full._plain_roots) <= 1024

    rank.apply(stored(5000, **adapter(0)))

    assert rank.credit(5000, lora="user-0") == 1
