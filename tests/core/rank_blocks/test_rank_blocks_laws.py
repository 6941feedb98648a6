"""Laws of a rank's blocks: whatever the order, the index ends up with what is reachable."""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.core.bound import TableLimits
from indexer.core.events import AllBlocksCleared, BlockRemoved, BlockStored
from indexer.core.types import BlockKey, EngineHash, Tier

Store = Callable[..., BlockStored]
Remove = Callable[..., BlockRemoved]
Keys = Callable[..., list[BlockKey]]
Announce = Callable[..., Iterator[BlockStored]]

CLEARED = AllBlocksCleared()


names = st.integers(1, 6)
chains = st.lists(st.lists(names, min_size=1, max_size=5, unique=True), max_size=6)


def salt_of(chain: Sequence[int]) -> str | None:
    """Chains that begin with one of three blocks are another tenant's."""
    return "tenant" if chain[0] % 2 else None


@pytest.fixture(scope="session")
def announcements(stored: Store) -> Announce:
    """The chains as an engine announces them, hash = whole prefix, cut at random places."""

    def announce(chains: Sequence[Sequence[int]], draw: random.Random) -> Iterator[BlockStored]:
        for chain in chains:
            prefixes = [
                EngineHash(hash(tuple(chain[: at + 1])) % 2**64) for at in range(len(chain))
            ]
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

    return announce


@given(chains, st.randoms(use_true_random=False))
def test_any_order_of_stores_ends_in_the_same_blocks(
    make_rank: Any,
    keys_of: Keys,
    announcements: Announce,
    chains: list[list[int]],
    draw: random.Random,
) -> None:
    """Orphans are attached whatever the order in which their ancestors show."""
    events = list(announcements(chains, draw))
    draw.shuffle(events)
    rank = make_rank()

    for event in events:
        rank.apply(event)
    assert rank.held() == {key for chain in chains for key in keys_of(*chain, salt=salt_of(chain))}
    assert rank.blocks.orphans == 0


@given(chains, st.randoms(use_true_random=False))
def test_removing_all_that_was_stored_leaves_nothing(
    make_rank: Any,
    removed: Remove,
    announcements: Announce,
    chains: list[list[int]],
    draw: random.Random,
) -> None:
    """Whatever the order of stores and of removals, no table keeps an entry."""
    events = list(announcements(chains, draw))
    draw.shuffle(events)
    removals = [removed(each) for event in events for each in event.hashes]
    draw.shuffle(removals)
    rank = make_rank()

    for event in (*events, *removals):
        rank.apply(event)
    assert rank.shown == set()
    assert rank.blocks.tracked_entries() == 0


@given(chains, st.randoms(use_true_random=False))
def test_batching_changes_nothing(
    make_rank: Any,
    removed: Remove,
    announcements: Announce,
    chains: list[list[int]],
    draw: random.Random,
) -> None:
    """One event per batch or all in one: the index ends up the same."""
    stores = list(announcements(chains, draw))
    events = [*stores, *(removed(draw.choice(event.hashes)) for event in stores)]
    one_by_one, at_once = make_rank(), make_rank()

    for event in events:
        one_by_one.apply(event)
    at_once.apply(*events)
    assert one_by_one.shown == at_once.shown


paths = st.lists(names, min_size=1, max_size=3).map(tuple)


@given(st.lists(st.tuples(paths, st.integers(0, 9)), max_size=60))
def test_after_each_event_what_is_held_is_what_can_be_reached(
    make_rank: Any,
    stored: Store,
    keys_of: Keys,
    steps: list[tuple[tuple[int, ...], int]],
) -> None:
    """Wide trees, rows used again: each step stores the end of a path or removes some block."""
    rank, held = make_rank(), list[tuple[int, ...]]()
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
    make_rank: Any,
    batches: list[list[BlockStored | BlockRemoved | AllBlocksCleared]],
) -> None:
    """No event raises, no key is told twice, and nothing survives a reset."""
    rank = make_rank(limits=TableLimits(max_parked_blocks=3))

    for events in batches:
        rank.apply(*events)
    rank.apply(CLEARED)
    assert rank.shown == set()
    assert rank.blocks.tracked_entries() == 0
