"""What leaves the tables once an engine lacked what was promised, and what stays."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from indexer.core.contradictions import MOST_COPIES, Cause, Weighed
from indexer.core.types import Tier

NewRank = Callable[..., Any]


def test_ghost_goes_and_what_was_computed_instead_stays(rank: Any) -> None:
    """The request computed the blocks anew and had them announced: one copy each is true."""
    rank.batch(rank.stored(1, 2, 3))
    rank.batch(rank.stored(1, 2, 3))

    weighed = rank.over(0, matched_s=1.5)

    assert (weighed.cause, weighed.copies) == (Cause.GHOST, 3)
    assert [rank.copies(key) for key in rank.keys[:3]] == [1, 1, 1]


def test_true_blocks_above_a_ghost_keep_their_copies(rank: Any) -> None:
    """Only from the contradicted block on."""
    rank.batch(rank.stored(1, 2, 3))
    rank.batch(rank.stored(2, 3, parent=1, first=1))

    rank.over(1, matched_s=1.5)

    assert [rank.copies(key) for key in rank.keys[:3]] == [1, 1, 1]
    rank.batch(rank.removed(1))
    assert not rank.held.holds(rank.keys[0])


def test_all_that_hangs_under_a_ghost_goes_too(rank: Any) -> None:
    """Other prompts' blocks under it were evicted before it; unless they were stored since."""
    rank.batch(
        rank.stored(1, 2),
        rank.branch(5, 6, parent=1, start=500),
        rank.branch(7, parent=1, start=700),
    )
    rank.batch(rank.stored(1, 2), rank.branch(7, parent=1, start=700))

    weighed = rank.over(0, matched_s=1.5)

    assert weighed.copies == 5
    assert rank.blocks.held_blocks == 3
    rank.batch(rank.removed(7), rank.removed(2), rank.removed(1))
    assert rank.blocks.tracked_entries() == 0


def test_every_tier_and_every_twin_of_a_ghost_goes(rank: Any) -> None:
    """Several hashes may mean one key, and copies lie on several tiers."""
    rank.batch(
        rank.stored(1),
        rank.stored(1, tier=Tier.CPU),
        rank.stored(91),
        rank.stored(1, tier=Tier.STORAGE),
    )
    rank.batch(rank.stored(1))

    weighed = rank.over(0, matched_s=1.5)

    assert weighed.copies == 4
    assert Counter(event.tier for event in weighed.events) == dict.fromkeys(Tier, 1)
    assert rank.copies(rank.keys[0]) == 1


def test_many_ghosts_go_bit_by_bit_and_the_block_itself_last(rank: Any) -> None:
    """So that no write of the index is long."""
    rank.batch(rank.stored(1))
    for number in range(21):
        rank.batch(
            rank.branch(*range(100 + number * 100, 200 + number * 100), parent=1, start=number)
        )
    rank.batch(rank.stored(1))
    matched_s = rank.seq - 0.5

    weighed = [rank.over(0, matched_s) for _ in range(4)]

    assert [(each.copies, each.is_all) for each in weighed] == [
        (MOST_COPIES, False),
        (MOST_COPIES, False),
        (2101 - 2 * MOST_COPIES, True),
        (0, True),
    ]
    assert [each.cause for each in weighed] == [*[Cause.GHOST] * 3, Cause.EVICTED_SINCE]
    assert rank.copies(rank.keys[0]) == 1


def test_nothing_is_pruned_before_the_recomputation_is_told(rank: Any) -> None:
    """The stream hasn't come that far: a removal may be on its way."""
    rank.batch(rank.stored(1, 2))

    assert rank.over(0, matched_s=1.5) == Weighed(cause=Cause.RECOMPUTE_UNTOLD)


def test_nothing_is_pruned_if_batches_since_are_forgotten(new_rank: NewRank) -> None:
    """What was stored since can't be told from what was there."""
    rank = new_rank(since_s=1.0)
    rank.batch(rank.stored(1, 2))

    assert rank.over(0, matched_s=0.5) == Weighed(cause=Cause.TOO_LONG_AGO)


def test_nothing_is_pruned_where_another_group_may_have_ended_the_hit(rank: Any) -> None:
    """A window's block may be what was missing."""
    window: dict[str, Any] = {"kind": "sliding_window", "window_tokens": 9, "group": 1}
    rank.batch(rank.stored(1, 2, kind="full_attention"), rank.stored(1, 2, **window))
    rank.batch(rank.stored(1, 2, kind="full_attention"))

    assert rank.over(0, matched_s=1.5) == Weighed(cause=Cause.OTHER_GROUPS)


@dataclass
class Engine:
    """What an engine really has of the one prompt, beside the tables of its rank."""

    rank: Any
    true: Counter[int] = field(default_factory=Counter)

    def compute(self, blocks: int) -> int:
        """Serve the prompt's first blocks; return how many were cached."""
        cached = next((each for each in range(blocks) if not self.true[each]), blocks)
        new = range(cached, blocks)
        self.true.update(new)
        if new:
            above = cached or None
            self.rank.batch(
                self.rank.stored(*[each + 1 for each in new], parent=above, first=cached)
            )
        return cached

    def evict(self, *, told: bool) -> None:
        """The tail goes first."""
        last = max((block for block, copies in self.true.items() if copies), default=None)
        if last is not None:
            self.true[last] -= 1
            self.rank.batch(*([self.rank.removed(last + 1)] if told else []))

    def lie(self, blocks: int) -> None:
        self.rank.batch(self.rank.stored(*range(1, blocks + 1)))


STEPS = st.one_of(
    st.tuples(st.just("compute"), st.integers(1, 6)),
    st.tuples(st.just("evict"), st.booleans()),
    st.tuples(st.just("lie"), st.integers(1, 6)),
)


@given(steps=st.lists(STEPS, max_size=30))
def test_no_true_copy_is_ever_pruned(new_rank: NewRank, steps: Sequence[tuple[str, Any]]) -> None:
    """Law: after any report the tables have at least what the engine has; a serial one they match.

    Blocks are lied about, and their eviction is kept from us.
    """
    rank = new_rank()
    engine = Engine(rank)
    for what, argument in steps:
        if what == "evict":
            engine.evict(told=argument)
        elif what == "lie":
            engine.lie(argument)
        else:
            held = [rank.held.holds(key) for key in rank.keys[:argument]]
            predicted = next((n for n, is_held in enumerate(held) if not is_held), argument)
            matched_s = rank.seq + 0.5
            cached = engine.compute(argument)
            if predicted > cached:
                assert rank.over(cached, matched_s).cause is Cause.GHOST
                assert rank.copies(rank.keys[cached]) == engine.true[cached] == 1
        assert all(rank.copies(key) >= engine.true[each] for each, key in enumerate(rank.keys))
