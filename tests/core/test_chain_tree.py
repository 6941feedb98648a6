"""Chains of block keys, each shared beginning kept once."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from balancer.core.load.chain_tree import ChainTree, Stretch
from indexer.core.types import BlockKey

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


def common(left: list[BlockKey], right: list[BlockKey]) -> int:
    pairs = zip(left, right, strict=False)
    return next(
        (at for at, (one, other) in enumerate(pairs) if one != other), min(len(left), len(right))
    )


@given(st.lists(forks, max_size=12), forks, st.data())
def test_it_counts_as_a_plain_counter_does(
    turns: list[list[int]], asked: list[int], data: st.DataObject
) -> None:
    """A block is held until the last chain with it is out, whatever the order."""
    tree, model = ChainTree(), Counter[BlockKey]()
    ends = []
    for each in map(chain, turns):
        ends.append((tree.add(each), each))
        model.update(each)
    for end, each in data.draw(st.permutations(ends)):
        tree.drop(end)
        model.subtract(each)
        left = {key for key, count in model.items() if count}
        wanted = chain(asked)
        run = next((at for at, key in enumerate(wanted) if key not in left), len(wanted))

        assert tree.blocks == len(left)
        assert tree.run_blocks(wanted) == run
    assert stretches(tree) == []


@given(st.lists(forks, min_size=1, max_size=12), st.data())
def test_it_stays_small(turns: list[list[int]], data: st.DataObject) -> None:
    """Whatever came and went: at most two stretches per chain that is in, and none without one."""
    tree = ChainTree()
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
    tree = ChainTree()
    short = tree.add(line(3))
    long = tree.add(line(9))

    assert [(each.start, each.end, each.chains) for each in stretches(tree)] == [
        (0, 3, 2),
        (3, 9, 1),
    ]
    assert tree.blocks == 9

    tree.drop(short)
    assert [(each.start, each.end, each.chains) for each in stretches(tree)] == [(0, 9, 1)]

    tree.drop(long)
    assert tree.blocks == 0


def test_chains_that_part_within_a_stretch_split_it() -> None:
    """Who was in before leaves as if nothing had happened."""
    tree = ChainTree()
    first = tree.add(line(8))
    tree.add(line(5, last=1))

    assert tree.blocks == 9
    assert tree.run_blocks(line(8)) == 8
    assert tree.run_blocks(line(6, last=2)) == 5

    tree.drop(first)
    assert tree.blocks == 5
    assert tree.run_blocks(line(8)) == 4


def test_the_same_chain_twice_is_held_until_both_are_out() -> None:
    """And no block of it counts twice."""
    tree = ChainTree()
    first, second = tree.add(line(4)), tree.add(line(4))
    tree.drop(first)

    assert (tree.blocks, tree.run_blocks(line(4))) == (4, 4)

    tree.drop(second)
    assert (tree.blocks, tree.run_blocks(line(4))) == (0, 0)


def test_a_chain_of_no_block_changes_nothing() -> None:
    """A prompt shorter than one block."""
    tree = ChainTree()
    tree.drop(tree.add([]))

    assert (tree.blocks, tree.run_blocks([]), stretches(tree)) == (0, 0, [])


def test_cleared_it_begins_anew() -> None:
    """As if nothing had ever been in."""
    tree = ChainTree()
    tree.add(line(4))
    tree.clear()
    end = tree.add(line(2))

    assert (tree.blocks, tree.run_blocks(line(4))) == (2, 2)

    tree.drop(end)
    assert tree.blocks == 0


@given(st.lists(st.lists(st.integers(0, 3).map(BlockKey), max_size=6), max_size=8), st.data())
def test_keys_that_are_no_chains_leave_nothing_behind(
    lists: list[list[BlockKey]], data: st.DataObject
) -> None:
    """What a peer of another release sends may count for too little, never for ever."""
    tree = ChainTree()
    ends = [tree.add(each) for each in lists]
    for end in data.draw(st.permutations(ends)):
        tree.drop(end)

    assert (tree.blocks, stretches(tree)) == (0, [])


@given(forks, forks)
def test_two_chains_share_what_they_begin_alike(left: list[int], right: list[int]) -> None:
    """Found without a look at every block."""
    tree = ChainTree()
    tree.add(chain(left))

    assert tree.run_blocks(chain(right)) == common(chain(left), chain(right))
