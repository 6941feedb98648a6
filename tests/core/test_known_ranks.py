"""What is remembered of the index's answers."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from balancer.core.routing.known_ranks import KnownRanks
from indexer.core.index import PrefixMatch
from indexer.core.types import InstanceId, RankId, Trust

A, B = (RankId(InstanceId(f"http://{name}:8000"), 0) for name in "ab")
BOTH = frozenset({A, B})


def match(
    epoch: int = 1, block_size: int | None = 16, trust: Trust = Trust.EXACT, clears: int = 0
) -> PrefixMatch:
    return PrefixMatch(
        tokens_by_tier={}, block_size=block_size, trust=trust, epoch=epoch, clears=clears
    )


def test_new_epoch_is_a_restart_told_once() -> None:
    """The first epoch seen is none."""
    known = KnownRanks()

    assert known.learn(BOTH, {A: match(3), B: match(1)}) == ([], [])
    assert known.learn(BOTH, {A: match(4), B: match(1)}) == ([A], [])
    assert known.learn(BOTH, {A: match(4), B: match(1)}) == ([], [])


def test_clear_is_told_once_and_is_no_restart() -> None:
    """A new epoch counts its clears anew."""
    known = KnownRanks()

    assert known.learn(BOTH, {A: match(3, clears=2), B: match(1)}) == ([], [])
    assert known.learn(BOTH, {A: match(3, clears=3), B: match(1)}) == ([], [A])
    assert known.learn(BOTH, {A: match(3, clears=3), B: match(1)}) == ([], [])
    assert known.learn(BOTH, {A: match(4, clears=0), B: match(1)}) == ([A], [])


def test_block_size_outlives_the_epoch() -> None:
    """Until the new life has stored something."""
    known = KnownRanks()
    known.learn(BOTH, {A: match(1, 32)})
    known.learn(BOTH, {A: match(2, None, Trust.DEGRADED)})
    assert known.block_sizes == {A: 32}
    assert known.trusts == {A: Trust.DEGRADED}

    known.learn(BOTH, {A: match(2, 64)})
    assert known.block_sizes == {A: 64}


def test_stranger_is_counted_and_not_remembered() -> None:
    """So is a rank that left, however little was known of it."""
    known = KnownRanks()
    known.learn(BOTH, {A: match(), B: match(block_size=None)})
    known.learn(frozenset(), {A: match()})

    assert known.unknown == 1
    assert not known.block_sizes
    assert not known.trusts


def test_facts_are_what_the_last_answers_told() -> None:
    """For `/status` of a balancer that has no indexer to ask."""
    known = KnownRanks()
    known.learn(BOTH, {A: match(3), B: match(1, None, Trust.DEGRADED)})

    assert known.facts() == {
        A: {"trust": "exact", "epoch": 3, "block_size": 16},
        B: {"trust": "degraded", "epoch": 1, "block_size": None},
    }


def test_missed_rank_is_not_shown_but_remembered() -> None:
    """Its restart is noticed when the index has it again."""
    known = KnownRanks()
    known.learn(BOTH, {A: match(3), B: match(1)})
    known.miss({A})
    missed = known.facts()

    assert missed.keys() == known.trusts.keys() == {B}
    assert known.block_sizes[A] == 16
    assert known.learn(BOTH, {A: match(4)}) == ([A], [])
    assert known.facts().keys() == {A, B}


def test_reason_is_kept_as_long_as_it_is_told() -> None:
    """And no longer than the rank."""
    lowered = PrefixMatch(
        tokens_by_tier={}, block_size=16, trust=Trust.DEGRADED, epoch=1, reason="indexer_silent"
    )
    known = KnownRanks()
    known.learn(BOTH, {A: lowered, B: lowered})
    before = dict(known.reasons)
    known.learn(BOTH, {A: match()})
    known.miss({B})
    after = dict(known.reasons)
    known.learn(BOTH, {A: lowered, B: match()})
    known.learn(frozenset({B}), {B: match()})

    assert before == {A: "indexer_silent", B: "indexer_silent"}
    assert after == known.reasons == {}


@given(st.lists(st.integers(1, 3)))
def test_restarts_are_the_changes_of_the_epoch(epochs: list[int]) -> None:
    """As many as neighbours that differ."""
    known = KnownRanks()
    told = sum(len(known.learn(BOTH, {A: match(each)}).restarted) for each in epochs)

    assert told == sum(left != right for left, right in pairwise(epochs))
