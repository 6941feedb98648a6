"""Blocks that are held and not believed in: counted, and told to nobody."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.core.block_tree import BlockTree
from indexer.core.events import BlockStored
from indexer.core.full_group import FullGroup
from indexer.core.index import GroupKind, GroupSpec
from indexer.core.types import BlockKey, EngineHash

SIZE = 2
GPU, CPU = range(2)
PARENTS = {1: None, 2: 1, 3: 2, 4: 2, 5: 4, 6: None, 7: 6}
"""By name: a chain with a branch, and another."""


class Held:
    """One group; an engine hash is a block's name."""

    def __init__(self) -> None:
        self.group = FullGroup(
            GroupSpec(group=0, kind=GroupKind.FULL, block_size=SIZE),
            model="tiny",
            tree=BlockTree(),
            counts=Counter(),
            max_parked_blocks=10,
        )
        self.keys: dict[int, BlockKey] = {}
        self.told: set[int] = set()

    def store(self, *names: int) -> None:
        for name in names:
            above = PARENTS[name]
            tokens = [100 * name + at for at in range(SIZE)]
            parent = None if above is None else EngineHash(above)
            self.group.store(BlockStored([EngineHash(name)], parent, tokens, SIZE), GPU)
            self.keys[name] = self.group.key_of(EngineHash(name)) or BlockKey(0)

    def remove(self, *names: int, tier: int = GPU) -> None:
        self.group.remove([EngineHash(name) for name in names], tier)

    def doubt(self, *names: int) -> int:
        return self.group.held.doubt(map(EngineHash, names))

    def believe(self, *names: int) -> int:
        return self.group.held.believe([self.keys[name] for name in names])

    def is_doubted(self, name: int) -> bool:
        return self.group.held.is_doubted(self.keys[name])

    def reachable(self) -> set[int]:
        """As a reader of the tables sees it, and as the index was told: the same."""
        names = {key: name for name, key in self.keys.items()}
        for change in self.group.changes.take(0):
            changed = {names[key] for key in change.keys}
            is_gain = type(change).__name__ == "BlocksHeld"
            self.told = self.told | changed if is_gain else self.told - changed
        read = {names[key] for key in self.group.held_keys(GPU)}
        assert read == self.told
        assert self.group.reachable_blocks == len(read)
        return read


@pytest.fixture
def held() -> Held:
    """Everything is stored once."""
    made = Held()
    made.store(*PARENTS)
    return made


def test_doubted_block_takes_what_hangs_on_it_along(held: Held) -> None:
    """Believed again, all of it is back."""
    assert held.doubt(2, 99) == 1
    doubted = held.reachable()
    assert held.believe(2, 6) == 1

    assert doubted == {1, 6, 7}
    assert held.reachable() == set(PARENTS)


def test_block_below_a_doubted_one_is_doubted_for_itself(held: Held) -> None:
    """It stays so when the upper one is believed again; what was cut by an upper one only doesn't."""
    assert held.doubt(4, 2, 4) == 2
    both = held.reachable()
    held.believe(2)

    assert both == {1, 6, 7}
    assert held.reachable() == {1, 2, 3, 6, 7}
    assert [held.is_doubted(name) for name in (3, 4, 5)] == [False, True, True]


def test_lower_block_believed_first_waits_for_the_upper_one(held: Held) -> None:
    """Nothing is reached through a block that isn't believed in."""
    held.doubt(2, 4)
    held.believe(4)
    before = held.reachable()
    held.believe(2)

    assert before == {1, 6, 7}
    assert held.reachable() == set(PARENTS)


def test_storing_it_again_ends_the_doubt_and_the_old_copy(held: Held) -> None:
    """So one removal takes it out."""
    held.doubt(6)
    held.store(6)
    again = held.reachable()
    held.remove(6)

    assert again == set(PARENTS)
    assert held.reachable() == {1, 2, 3, 4, 5}
    assert held.group.held.copies(EngineHash(6)) == (0, 0, 0)


def test_copies_stored_at_once_count_all_but_the_old_one(held: Held) -> None:
    """Of an orphan that was stored twice while its parent was unknown."""
    held.doubt(6)
    node = held.group.held.find(EngineHash(6))
    assert node is not None
    held.group.held.hold(EngineHash(6), node, GPU, 2)

    assert held.group.held.copies(EngineHash(6)) == (2, 0, 0)
    assert held.reachable() == set(PARENTS)


def test_who_extends_a_block_has_it(held: Held) -> None:
    """And all above it; others stay doubted."""
    held.remove(5)
    held.doubt(1, 2, 4, 6)
    held.store(5)

    assert held.reachable() == {1, 2, 3, 4, 5}
    assert held.is_doubted(7)


def test_block_with_a_newer_copy_is_spared(held: Held) -> None:
    """One of its copies may be true."""
    held.store(2)

    assert held.doubt(2) == 0
    assert held.reachable() == set(PARENTS)


def test_removed_block_is_doubted_no_more(held: Held) -> None:
    """Stored anew later it is as any other."""
    held.doubt(2, 6)
    held.remove(2, 6)
    gone = held.reachable()
    held.store(2, 6)

    assert gone == {1}
    assert held.reachable() == set(PARENTS)
    assert held.group.held.doubted_blocks == 0


def test_cleared_group_doubts_nothing(held: Held) -> None:
    """Nothing is left of it."""
    held.doubt(2)
    held.group.clear()

    assert held.group.tracked_entries() == 0
    assert not held.is_doubted(2)


def test_other_tiers_go_with_the_block(held: Held) -> None:
    """It is one block, and what was offloaded came from it."""
    held.group.recall([EngineHash(2)], CPU)
    held.reachable()
    held.doubt(2)
    doubted = set(held.group.held_keys(CPU)), held.group.held.reachable_entries
    held.believe(2)

    assert doubted == (set(), 3)
    assert set(held.group.held_keys(CPU)) == {held.keys[2]}


class Model:
    """Copies and doubts by name."""

    def __init__(self) -> None:
        self.copies: Counter[int] = Counter()
        self.doubted: set[int] = set()

    def store(self, name: int) -> None:
        above = PARENTS[name]
        while above is not None:
            self.doubted.discard(above)
            above = PARENTS[above]
        self.copies[name] = 1 if name in self.doubted else self.copies[name] + 1
        self.doubted.discard(name)

    def remove(self, name: int) -> None:
        self.copies[name] = max(0, self.copies[name] - 1)
        if not self.copies[name]:
            self.doubted.discard(name)

    def doubt(self, name: int) -> None:
        if self.copies[name] == 1:
            self.doubted.add(name)

    def believe(self, name: int) -> None:
        self.doubted.discard(name)

    def is_reachable(self, name: int | None) -> bool:
        if name is None:
            return True
        is_here = self.copies[name] > 0 and name not in self.doubted
        return is_here and self.is_reachable(PARENTS[name])


STEPS = st.lists(
    st.tuples(st.sampled_from(["store", "remove", "doubt", "believe"]), st.sampled_from([*PARENTS]))
)


@given(STEPS)
def test_reachable_is_what_is_held_and_believed_up_to_the_root(
    steps: list[tuple[str, int]],
) -> None:
    """Whatever comes in between."""
    held, model = Held(), Model()
    for step, name in steps:
        above = PARENTS[name]
        is_orphan = step == "store" and above is not None and not model.copies[above]
        if is_orphan or (step == "believe" and name not in held.keys):
            continue
        getattr(model, step)(name)
        getattr(held, step)(name)

        assert held.reachable() == set(filter(model.is_reachable, PARENTS))
