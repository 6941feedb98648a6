"""Why an engine had other blocks cached than predicted, and what leaves the tables for it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from indexer.core.contradictions import MOST_COPIES, Cause, Weighed, weigh
from indexer.core.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from indexer.core.hashing import Namespace, block_keys, pack_tokens, root_key
from indexer.core.index import BlocksDropped, BlocksHeld
from indexer.core.rank_blocks import RankBlocks
from indexer.core.rank_holdings import RankHoldings
from indexer.core.recent_batches import RecentBatches
from indexer.core.reports import CacheReport
from indexer.core.types import BlockKey, EngineHash, InstanceId, RankId, Tier

SIZE = 4
RANK = RankId(InstanceId("http://e0:8000"), 0)
PROMPT = list(range(10 * SIZE))
KEYS = block_keys(root_key(Namespace(model="tiny")), pack_tokens(PROMPT), SIZE)


def stored(*hashes: int, parent: int | None = None, first: int = 0, **more: Any) -> BlockStored:
    """Blocks number `first` and on of the one prompt."""
    span = PROMPT[first * SIZE : (first + len(hashes)) * SIZE]
    above = None if parent is None else EngineHash(parent)
    return BlockStored([EngineHash(each) for each in hashes], above, span, SIZE, **more)


def branch(*hashes: int, parent: int, start: int) -> BlockStored:
    """Blocks of another prompt under a block of the first."""
    span = list(range(start, start + len(hashes) * SIZE))
    return BlockStored([EngineHash(each) for each in hashes], EngineHash(parent), span, SIZE)


def removed(*hashes: int, tier: Tier = Tier.GPU) -> BlockRemoved:
    return BlockRemoved([EngineHash(each) for each in hashes], tier=tier)


@dataclass
class Rank:
    """One rank's tables and recent batches; each batch comes a second after the last."""

    blocks: RankBlocks = field(default_factory=lambda: RankBlocks(rank=RANK, model="tiny", epoch=1))
    recent: RecentBatches = field(default_factory=lambda: RecentBatches(0.0))
    seq: int = 0

    @property
    def held(self) -> RankHoldings:
        return RankHoldings(self.blocks)

    def batch(self, *events: Any) -> None:
        self.seq += 1
        batch = EventBatch(0.0, 0, list(events))
        self.recent.note(float(self.seq), batch)
        for change in self.blocks.apply(self.seq, batch).changes:
            if isinstance(change, BlocksDropped):
                self.recent.lose(float(self.seq), change.keys)
            elif isinstance(change, BlocksHeld):
                self.recent.gain(float(self.seq), change.keys)

    def over(self, block: int, matched_s: float) -> Weighed:
        """The engine lacked a block that was promised."""
        report = CacheReport(
            rank=RANK,
            epoch=1,
            age_s=0.0,
            block_size=SIZE,
            predicted_tokens=(block + 2) * SIZE,
            cached_tokens=block * SIZE,
            key=KEYS[block],
        )
        return self.weigh(report, matched_s)

    def weigh(self, report: CacheReport, matched_s: float) -> Weighed:
        weighed = weigh(report, matched_s, self.held, self.recent)
        for event in weighed.events:
            self.blocks.apply(self.seq, EventBatch(0.0, None, [event]))
        self.recent.remove(float(self.seq), list(weighed.events))
        return weighed

    def under(self, block: int, matched_s: float = 0.5) -> Weighed:
        """The engine had a block that was not promised."""
        report = CacheReport(
            rank=RANK,
            epoch=1,
            age_s=0.0,
            block_size=SIZE,
            predicted_tokens=0,
            cached_tokens=(block + 1) * SIZE,
            key=KEYS[block],
        )
        return self.weigh(report, matched_s)

    def copies(self, key: BlockKey) -> int:
        found = self.held.copies_below(key)
        return sum(each.copies for each in found if each.key == key)


def test_ghost_goes_and_what_was_computed_instead_stays() -> None:
    """The request computed the blocks anew and had them announced: one copy each is true."""
    rank = Rank()
    rank.batch(stored(1, 2, 3))
    rank.batch(stored(1, 2, 3))

    weighed = rank.over(0, matched_s=1.5)

    assert (weighed.cause, weighed.copies) == (Cause.GHOST, 3)
    assert [rank.copies(key) for key in KEYS[:3]] == [1, 1, 1]


def test_true_blocks_above_a_ghost_keep_their_copies() -> None:
    """Only from the contradicted block on."""
    rank = Rank()
    rank.batch(stored(1, 2, 3))
    rank.batch(stored(2, 3, parent=1, first=1))

    rank.over(1, matched_s=1.5)

    assert [rank.copies(key) for key in KEYS[:3]] == [1, 1, 1]
    rank.batch(removed(1))
    assert not rank.held.holds(KEYS[0])


def test_all_that_hangs_under_a_ghost_goes_too() -> None:
    """Other prompts' blocks under it were evicted before it; unless they were stored since."""
    rank = Rank()
    rank.batch(stored(1, 2), branch(5, 6, parent=1, start=500), branch(7, parent=1, start=700))
    rank.batch(stored(1, 2), branch(7, parent=1, start=700))

    weighed = rank.over(0, matched_s=1.5)

    assert weighed.copies == 5
    assert rank.blocks.held_blocks == 3
    rank.batch(removed(7), removed(2), removed(1))
    assert rank.blocks.tracked_entries() == 0


def test_eviction_told_since_explains_it() -> None:
    """Then the copy that is there is the one computed anew."""
    rank = Rank()
    rank.batch(stored(1, 2))
    rank.batch(removed(2), removed(1), stored(1, 2))

    assert rank.over(0, matched_s=1.5) == Weighed(cause=Cause.EVICTED_SINCE)
    assert [rank.copies(key) for key in KEYS[:2]] == [1, 1]


def test_block_that_is_gone_by_now_needs_nothing() -> None:
    """Evicted again already."""
    rank = Rank()
    rank.batch(stored(1, 2))
    rank.batch(removed(2), removed(1))

    assert rank.over(0, matched_s=1.5).cause is Cause.EVICTED_SINCE


def test_index_that_promises_what_the_tables_never_had_differs() -> None:
    """Whether or not the request computed the block meanwhile; that copy stays."""
    rank = Rank()
    rank.batch(stored(1))
    untold = rank.over(1, matched_s=1.5)
    rank.batch(stored(2, parent=1, first=1))

    assert [untold, rank.over(1, matched_s=1.5)] == [Weighed(cause=Cause.INDEX_DIFFERS)] * 2
    assert rank.copies(KEYS[1]) == 1


def test_ghost_found_out_twice_is_no_fault_of_the_index() -> None:
    """Two requests were promised it; the first one's report has pruned it."""
    rank = Rank()
    rank.batch(stored(1, 2))
    rank.batch(stored(1, 2))

    found = [rank.over(0, matched_s=1.5).cause for _ in range(2)]

    assert found == [Cause.GHOST, Cause.EVICTED_SINCE]


def test_index_is_not_blamed_if_losses_since_are_forgotten() -> None:
    """What is absent now may have been there then."""
    rank = Rank(recent=RecentBatches(0.0, max_hashes=1))
    rank.batch(stored(1))
    rank.batch(removed(1))
    rank.batch(stored(2, 3))
    rank.batch(removed(3), removed(2))

    assert rank.over(0, matched_s=1.5).cause is Cause.TOO_LONG_AGO


def test_reset_told_since_explains_it() -> None:
    """The event came with the request's own step."""
    rank = Rank()
    rank.batch(stored(1, 2))
    rank.batch(AllBlocksCleared(), stored(1, 2))

    assert rank.over(0, matched_s=1.5).cause is Cause.RESET_SEEN_LATE
    assert rank.copies(KEYS[0]) == 1


def test_reset_before_the_lookup_explains_nothing() -> None:
    """It was known when the index was asked."""
    rank = Rank()
    rank.batch(AllBlocksCleared(), stored(1, 2))
    rank.batch(stored(1, 2))

    assert rank.over(0, matched_s=1.5).cause is Cause.GHOST


def test_nothing_is_pruned_before_the_recomputation_is_told() -> None:
    """The stream hasn't come that far: a removal may be on its way."""
    rank = Rank()
    rank.batch(stored(1, 2))

    assert rank.over(0, matched_s=1.5) == Weighed(cause=Cause.RECOMPUTE_UNTOLD)


def test_nothing_is_pruned_if_batches_since_are_forgotten() -> None:
    """What was stored since can't be told from what was there."""
    rank = Rank(recent=RecentBatches(1.0))
    rank.batch(stored(1, 2))

    assert rank.over(0, matched_s=0.5) == Weighed(cause=Cause.TOO_LONG_AGO)


def test_nothing_is_pruned_where_another_group_may_have_ended_the_hit() -> None:
    """A window's block may be what was missing."""
    rank = Rank()
    window: dict[str, Any] = {"kind": "sliding_window", "window_tokens": 9, "group": 1}
    rank.batch(stored(1, 2, kind="full_attention"), stored(1, 2, **window))
    rank.batch(stored(1, 2, kind="full_attention"))

    assert rank.over(0, matched_s=1.5) == Weighed(cause=Cause.OTHER_GROUPS)


def test_every_tier_and_every_twin_of_a_ghost_goes() -> None:
    """Several hashes may mean one key, and copies lie on several tiers."""
    rank = Rank()
    rank.batch(stored(1), stored(1, tier=Tier.CPU), stored(91), stored(1, tier=Tier.STORAGE))
    rank.batch(stored(1))

    weighed = rank.over(0, matched_s=1.5)

    assert weighed.copies == 4
    assert Counter(event.tier for event in weighed.events) == dict.fromkeys(Tier, 1)
    assert rank.copies(KEYS[0]) == 1


def test_many_ghosts_go_bit_by_bit_and_the_block_itself_last() -> None:
    """So that no write of the index is long."""
    rank = Rank()
    rank.batch(stored(1))
    for number in range(21):
        rank.batch(branch(*range(100 + number * 100, 200 + number * 100), parent=1, start=number))
    rank.batch(stored(1))
    matched_s = rank.seq - 0.5

    weighed = [rank.over(0, matched_s) for _ in range(4)]

    assert [(each.copies, each.is_all) for each in weighed] == [
        (MOST_COPIES, False),
        (MOST_COPIES, False),
        (2101 - 2 * MOST_COPIES, True),
        (0, True),
    ]
    assert [each.cause for each in weighed] == [*[Cause.GHOST] * 3, Cause.EVICTED_SINCE]
    assert rank.copies(KEYS[0]) == 1


def test_blocks_stored_since_explain_that_more_was_cached() -> None:
    """A sibling's, between the lookup and the request's turn; even if they have left again."""
    rank = Rank()
    rank.batch(stored(1, 2))

    assert rank.under(1).cause is Cause.STORED_SINCE
    assert rank.under(2).cause is Cause.UNSEEN

    rank.recent.lose(2.0, [KEYS[2]])
    assert rank.under(2).cause is Cause.STORED_SINCE


def told(**limits: int) -> Rank:
    """A rank whose index has to be told of its blocks."""
    return Rank(recent=RecentBatches(0.0, hears_gains=True, **limits))


def test_index_that_lacks_what_it_was_told_of_before_differs() -> None:
    """Nothing was stored since, the tables hold it, and the engine had it."""
    rank = told()
    rank.batch(stored(1, 2))

    assert rank.under(1, matched_s=1.5).cause is Cause.INDEX_DIFFERS


def test_index_that_was_told_since_explains_that_more_was_cached() -> None:
    """Of the block itself, of the one above that cut it off, or of everything."""
    rank = told()
    rank.batch(stored(1, 2))
    rank.batch(removed(1))
    rank.batch(stored(1))

    assert rank.under(1, matched_s=2.5).cause is Cause.STORED_SINCE
    assert rank.under(1, matched_s=3.5).cause is Cause.INDEX_DIFFERS

    rank.recent.gain_all(4.0)
    assert rank.under(1, matched_s=3.5).cause is Cause.STORED_SINCE


def test_index_is_not_blamed_if_what_it_was_told_is_forgotten() -> None:
    """It may have been told since."""
    rank = told(max_hashes=1)
    rank.batch(stored(1))
    rank.batch(stored(2, parent=1, first=1))

    assert rank.under(0, matched_s=0.5).cause is Cause.TOO_LONG_AGO


def test_index_is_not_blamed_where_another_group_may_have_ended_the_match() -> None:
    """A window's block may be what it rightly missed."""
    rank = told()
    window: dict[str, Any] = {"kind": "sliding_window", "window_tokens": 9, "group": 1}
    rank.batch(stored(1, 2, kind="full_attention"), stored(1, 2, **window))

    assert rank.under(1, matched_s=1.5).cause is Cause.STORED_SINCE


def test_rank_without_a_full_group_holds_nothing() -> None:
    """Nothing was ever stored."""
    rank = Rank()

    assert rank.under(0).cause is Cause.UNSEEN
    assert rank.over(0, matched_s=0.5).cause is Cause.INDEX_DIFFERS
    assert list(rank.held.copies_below(KEYS[0])) == []
    assert rank.held.full_group == -1


def test_only_some_causes_speak_against_the_tables() -> None:
    """What is explained, or can't be judged, proves nothing."""
    speaking = {cause for cause in Cause if cause.is_over_evidence}

    assert speaking == {Cause.GHOST, Cause.OTHER_GROUPS}


@dataclass
class Engine:
    """What an engine really has of the one prompt, beside the tables of its rank."""

    rank: Rank = field(default_factory=Rank)
    true: Counter[int] = field(default_factory=Counter)

    def compute(self, blocks: int) -> int:
        """Serve the prompt's first blocks; return how many were cached."""
        cached = next((each for each in range(blocks) if not self.true[each]), blocks)
        new = range(cached, blocks)
        self.true.update(new)
        if new:
            above = cached or None
            self.rank.batch(stored(*[each + 1 for each in new], parent=above, first=cached))
        return cached

    def evict(self, *, told: bool) -> None:
        """The tail goes first."""
        last = max((block for block, copies in self.true.items() if copies), default=None)
        if last is not None:
            self.true[last] -= 1
            self.rank.batch(*([removed(last + 1)] if told else []))

    def lie(self, blocks: int) -> None:
        self.rank.batch(stored(*range(1, blocks + 1)))


STEPS = st.one_of(
    st.tuples(st.just("compute"), st.integers(1, 6)),
    st.tuples(st.just("evict"), st.booleans()),
    st.tuples(st.just("lie"), st.integers(1, 6)),
)


@given(st.lists(STEPS, max_size=30))
def test_no_true_copy_is_ever_pruned(steps: Sequence[tuple[str, Any]]) -> None:
    """Law: after any report the tables have at least what the engine has; a serial one they match.

    Blocks are lied about, and their eviction is kept from us.
    """
    engine = Engine()
    rank = engine.rank
    for what, argument in steps:
        if what == "evict":
            engine.evict(told=argument)
        elif what == "lie":
            engine.lie(argument)
        else:
            held = [rank.held.holds(key) for key in KEYS[:argument]]
            predicted = next((n for n, is_held in enumerate(held) if not is_held), argument)
            matched_s = rank.seq + 0.5
            cached = engine.compute(argument)
            if predicted > cached:
                assert rank.over(cached, matched_s).cause is Cause.GHOST
                assert rank.copies(KEYS[cached]) == engine.true[cached] == 1
        assert all(rank.copies(key) >= engine.true[each] for each, key in enumerate(KEYS))
