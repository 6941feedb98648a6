"""Chains of block keys, each shared beginning kept once."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.core.load.chain_tree import Begun, ChainTree, Stretch, run_blocks
from indexer.core.types import BlockKey, InstanceId, RankId

RANK = RankId(InstanceId("http://e0:8000"), 0)
OTHER = RankId(InstanceId("http://e0:8000"), 1)
forks = st.lists(st.integers(0, 2), max_size=8)
"""Where a chain turns at each of its blocks: chains that turn alike so far share their keys."""


def chain(turns: list[int]) -> list[BlockKey]:
    """Each key says how the chain got there, as real ones do."""
    keys, name = [], 1
    for turn in turns:
        name = name * 3 + turn
        keys.append(BlockKey(name))
    return keys


def line(length: int, *, last: int = 0) -> list[BlockKey]:
    """A chain of one line, which ends in another block if `last` says so."""
    return chain([0] * (length - 1) + [last])


def stretches(tree: ChainTree) -> list[Stretch]:
    found, waiting = [], [tree._root]
    while waiting:
        waiting += (each := waiting.pop()).following.values()
        found.append(each)
    return found[1:]


def new_tree() -> ChainTree:
    return ChainTree({}, RANK)


def both(tree: ChainTree, keys: list[BlockKey], near: int = 0) -> tuple[int, int]:
    """Blocks expected there, and in use."""
    top = tree._root.following.get(keys[0]) if keys else None
    return run_blocks(top, keys, near)


def run(tree: ChainTree, keys: list[BlockKey], near: int = 0) -> int:
    return both(tree, keys, near)[0]


def in_use(tree: ChainTree, keys: list[BlockKey]) -> int:
    return both(tree, keys)[1]


def blocks(tree: ChainTree) -> int:
    """Different ones of either kind."""
    return sum(each.end - each.start for each in stretches(tree))


def common(left: list[BlockKey], right: list[BlockKey]) -> int:
    pairs = zip(left, right, strict=False)
    return next(
        (at for at, (one, other) in enumerate(pairs) if one != other), min(len(left), len(right))
    )


@given(st.lists(st.tuples(forks, st.booleans()), max_size=12), forks, st.data())
def test_it_counts_as_two_plain_counters_do(
    chains: list[tuple[list[int], bool]], asked: list[int], data: st.DataObject
) -> None:
    """A block is in use, or expected, until the last such chain with it is out, whatever the order."""
    tree, models = new_tree(), {True: Counter[BlockKey](), False: Counter[BlockKey]()}
    ends = []
    for turns, used in chains:
        keys = chain(turns)
        ends.append((tree.add(keys, used=used), keys, used))
        models[used].update(keys)
    for end, keys, used in data.draw(st.permutations(ends)):
        tree.drop(end, used=used)
        models[used].subtract(keys)
        wanted, near = chain(asked), data.draw(st.integers(0, 9))
        left = {used: {key for key, count in models[used].items() if count} for used in models}
        runs = [
            next((at for at, key in enumerate(wanted) if key not in left[used]), len(wanted))
            for used in (False, True)
        ]

        assert tree.used_blocks == len(left[True])
        assert both(tree, wanted, near) == tuple(runs)
    assert stretches(tree) == []


@given(st.lists(forks, min_size=1, max_size=12), st.data())
def test_it_stays_small(turns: list[list[int]], data: st.DataObject) -> None:
    """Whatever came and went: at most two stretches per chain that is in, and none without one."""
    tree = new_tree()
    ends = [tree.add(chain(each)) for each in turns]
    gone = data.draw(st.sets(st.integers(0, len(ends) - 1)))
    for number in gone:
        tree.drop(ends[number])

    left = stretches(tree)
    assert len(left) <= 2 * (len(ends) - len(gone))
    assert all(each.chains >= 1 for each in left)
    assert all(each.start < each.end for each in left)
    assert all(each.above is not None and each.above.end == each.start for each in left)


def test_a_chain_that_ends_where_another_goes_on_is_a_stretch() -> None:
    """The longer one begins with it."""
    tree = new_tree()
    short = tree.add(line(3))
    long = tree.add(line(9))

    assert [(each.start, each.end, each.chains) for each in stretches(tree)] == [
        (0, 3, 2),
        (3, 9, 1),
    ]
    assert blocks(tree) == 9

    tree.drop(short)
    assert [(each.start, each.end, each.chains) for each in stretches(tree)] == [(0, 9, 1)]

    tree.drop(long)
    assert blocks(tree) == 0


def test_chains_that_part_within_a_stretch_split_it() -> None:
    """Who was in before leaves as if nothing had happened."""
    tree = new_tree()
    first = tree.add(line(8))
    tree.add(line(5, last=1))

    assert blocks(tree) == 9
    assert run(tree, line(8)) == 8
    assert run(tree, line(6, last=2)) == 5

    tree.drop(first)
    assert blocks(tree) == 5
    assert run(tree, line(8)) == 4


def test_the_same_chain_twice_is_held_until_both_are_out() -> None:
    """And no block of it counts twice."""
    tree = new_tree()
    first, second = tree.add(line(4)), tree.add(line(4))
    tree.drop(first)

    assert (blocks(tree), run(tree, line(4))) == (4, 4)

    tree.drop(second)
    assert (blocks(tree), run(tree, line(4))) == (0, 0)


def test_a_chain_of_no_block_changes_nothing() -> None:
    """A prompt shorter than one block."""
    tree = new_tree()
    tree.drop(tree.add([]))

    assert (blocks(tree), run(tree, []), stretches(tree)) == (0, 0, [])


@given(st.lists(st.lists(st.integers(0, 3).map(BlockKey), max_size=6), max_size=8), st.data())
def test_keys_that_are_no_chains_leave_nothing_behind(
    lists: list[list[BlockKey]], data: st.DataObject
) -> None:
    """What a peer of another release sends may count for too little, never for ever."""
    tree = new_tree()
    ends = [tree.add(each) for each in lists]
    for end in data.draw(st.permutations(ends)):
        tree.drop(end)

    assert (blocks(tree), stretches(tree)) == (0, [])


@given(forks, forks)
def test_two_chains_share_what_they_begin_alike(left: list[int], right: list[int]) -> None:
    """Found without a look at every block."""
    tree = new_tree()
    tree.add(chain(left))

    assert run(tree, chain(right)) == common(chain(left), chain(right))


@given(forks, forks, forks, st.integers(0, 9))
def test_where_others_parted_is_only_a_guess(
    held: list[int], before: list[int], asked: list[int], near: int
) -> None:
    """Right or wrong, it changes nothing but the time it takes."""
    tree = new_tree()
    tree.add(chain(held))
    run(tree, chain(before))

    assert run(tree, chain(asked), near) == common(chain(held), chain(asked))


def test_a_chain_in_use_is_not_expected() -> None:
    """A leg that waits for a transfer holds room for its blocks; they aren't there yet."""
    tree = new_tree()
    used = tree.add(line(8), used=True)
    tree.add(line(3))

    assert (run(tree, line(9)), in_use(tree, line(9)), tree.used_blocks) == (3, 8, 8)

    tree.drop(used, used=True)
    assert (run(tree, line(9)), in_use(tree, line(9)), tree.used_blocks) == (3, 0, 0)


@given(st.lists(st.tuples(forks, st.booleans(), st.booleans()), max_size=8), st.data())
def test_where_chains_begin_is_known_of_every_rank(
    chains: list[tuple[list[int], bool, bool]], data: st.DataObject
) -> None:
    """As the trees say, whatever came, parted, joined and went; and nothing of what went is kept."""
    begun: Begun = {}
    trees = {rank: ChainTree(begun, rank) for rank in (RANK, OTHER)}
    ends = []
    for turns, is_other, used in chains:
        tree = trees[OTHER if is_other else RANK]
        ends.append((tree, tree.add(chain(turns), used=used), used))
    for tree, end, used in data.draw(st.permutations(ends)):
        tops = {rank: dict(each._root.following) for rank, each in trees.items()}
        told = {
            rank: {first: tops_[rank] for first, tops_ in begun.items() if rank in tops_}
            for rank in trees
        }

        assert told == tops
        tree.drop(end, used=used)
    assert begun == {}


@pytest.mark.parametrize("asked", [[0] * 5 + [2], [0] * 5 + [1] * 5], ids=["short", "long"])
@pytest.mark.parametrize("near", range(11))
def test_a_guess_too_early_or_too_late_is_corrected(near: int, asked: list[int]) -> None:
    """Before where they part, behind it, at it, or nowhere in the stretch."""
    tree = new_tree()
    tree.add(line(10))

    assert run(tree, chain(asked), near) == 5
