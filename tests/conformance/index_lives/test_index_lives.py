"""Random lives of a fleet: stream, tables and index against a model that has no memory of its own.

What the index says of a rank is compared whenever that rank's stream has applied all of the
engine's present life; `settle` makes it so.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from indexer.core.block_rows import BlockRow
from indexer.core.index import (
    BlockIndex,
    GroupSpec,
    PrefixMatch,
    Prompt,
    RankUpdate,
    StaleEpochError,
)
from indexer.core.types import RankId, Tier, Trust
from indexer.memory_index import MemoryIndex
from indexer.redis_index.redis_index import RedisIndex

STEPS_PER_LIFE = 40
DEEP = 10_000
"""Examples of the deep profile."""

Prompts = Mapping[tuple[str, tuple[int, ...]], Prompt]
NewLives = Callable[..., list[Any]]

ranks = st.integers(0, 3)
paths = st.integers(0, 29)
"""Which of the paths, up to four blocks deep, of two names each."""
tiers = st.sampled_from((Tier.GPU, Tier.GPU, Tier.GPU, Tier.CPU, Tier.STORAGE))
picks = st.integers(0, 10**6)
"""Which of the copies there are then."""
stores = st.tuples(st.just("store"), paths, tiers, st.integers(0, 3))
removals = st.tuples(st.just("remove"), paths, tiers, picks)
strangers = st.tuples(st.just("remove_unknown"), paths, tiers, st.integers(0, 1))
offloads = st.tuples(st.just("offload"), paths, tiers, picks)
fates = st.sampled_from(("sent", "sent", "sent", "lost", "twice", "overtaken"))
clocks = st.sampled_from((0, 0, -10, -(10**6), 10**6))
"""How much later a process says that it is than there were batches."""
steps = st.lists(stores | stores | removals | strangers | offloads, max_size=8)
sent = st.lists(st.tuples(steps, fates), min_size=1, max_size=4)

Step = tuple[str, int, Tier, int]


async def _await(awaited: Awaitable[None]) -> None:
    await awaited


class Fleet(RuleBasedStateMachine):
    """Engines publish, restart and leave; after each step every prompt is asked."""

    make_index: Callable[[], BlockIndex]
    close_index: Callable[[BlockIndex], Awaitable[None]]
    new_lives: NewLives
    prompts: Prompts
    shares_tables = False

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.index = self.make_index()
        self.lives = self.new_lives(self._write, shares_tables=self.shares_tables)
        self.trust: dict[RankId, Trust] = {}

    def teardown(self) -> None:
        self.runner.run(_await(self.close_index(self.index)))
        self.runner.close()

    def _write(self, update: RankUpdate) -> None:
        self.runner.run(self.index.apply(update))

    # What engines and the network do.

    @rule(at=ranks, sent=sent, settles=st.booleans())
    def publish(self, at: int, sent: Sequence[tuple[Sequence[Step], str]], settles: bool) -> None:
        """Some batches of one rank, and what becomes of each on the way."""
        life = self.lives[at]
        for steps, fate in sent:
            life.send(life.engine.take(steps), fate)
        if settles:
            life.settle_with_a_batch()

    @rule(at=ranks, before=steps, after=steps, fate=fates)
    def reset(self, at: int, before: Sequence[Step], after: Sequence[Step], fate: str) -> None:
        """The cache is cleared between other events of one batch."""
        engine = self.lives[at].engine
        events = [*engine.take(before), engine.clear(), *engine.take(after)]
        self.lives[at].send(events, fate)

    @rule(at=ranks, pick=picks)
    def deliver(self, at: int, pick: int) -> None:
        """A batch that was overtaken arrives at last."""
        self.lives[at].deliver(pick)

    @rule(at=ranks, messages=st.integers(1, 4))
    def answer(self, at: int, messages: int) -> None:
        """Some of a replay arrives."""
        self.lives[at].answer(messages)

    @rule(at=ranks)
    def silence(self, at: int) -> None:
        """A replay stops without its end."""
        self.lives[at].silence()

    @rule(at=ranks, is_seen=st.booleans(), clock_ahead=clocks)
    def restart(self, at: int, is_seen: bool, clock_ahead: int = 0) -> None:
        """Another process at the same address; the connection tells, or breaks unnoticed."""
        self.lives[at].restart(clock_ahead)
        if is_seen:
            self.lives[at].connect()

    @rule(at=ranks)
    def settle(self, at: int) -> None:
        """Everything arrives and every question is answered: all is as the engine says."""
        self.lives[at].settle()

    # What the indexer does.

    @rule(at=ranks)
    def retire(self, at: int) -> None:
        """The rank leaves the fleet, and is followed anew."""
        life = self.lives[at]
        self.runner.run(self.index.retire(life.rank))
        self.trust.pop(life.rank, None)
        life.begin_epoch()
        life.follow_anew()

    @rule(at=ranks)
    def resume(self, at: int) -> None:
        """Our process ends; another goes on with what the backend kept. Orphans aren't."""
        life = self.lives[at]
        kept = life.kept
        if not life.is_known or kept.seq < 0:
            return  # of an epoch without a batch there is nothing to go on with
        groups: Sequence[GroupSpec] = list(kept.groups.values())
        rows: Mapping[int, Sequence[BlockRow]] = {
            group: list(each.values()) for group, each in kept.rows.items()
        }
        if isinstance(self.index, RedisIndex):
            record = self.runner.run(self.index.restore(life.rank, life.model))
            assert record is not None
            assert {group: set(each) for group, each in record.rows.items()} == {
                group: set(each) for group, each in rows.items()
            }
            assert set(record.groups) == set(groups)
            assert (record.epoch, record.seq) == (life.epoch, kept.seq)
            assert (record.facts, record.trust) == (kept.facts, self._trust_of(life))
            groups, rows = record.groups, record.rows
        life.resume(groups, rows)

    @rule(at=ranks, part_blocks=st.integers(1, 5))
    def rewrite(self, at: int, part_blocks: int) -> None:
        """The backend lost the rank, and is told all of it again."""
        life = self.lives[at]
        if life.is_known:
            parts = life.blocks.snapshot(life.kept.seq, 0, part_blocks)
            self.runner.run(self._rewrite(life, parts))

    async def _rewrite(self, life: Any, parts: Iterable[RankUpdate]) -> None:
        if isinstance(self.index, RedisIndex):
            await self.index.rewrite(life.model, self._trust_of(life), parts)
            return
        await self.index.retire(life.rank)
        for part in parts:
            await self.index.apply(part)
        await self.index.set_trust(life.rank, self._trust_of(life))

    @rule(at=ranks, trust=st.sampled_from(Trust))
    def set_trust(self, at: int, trust: Trust) -> None:
        rank = self.lives[at].rank
        self.runner.run(self.index.set_trust(rank, trust))
        self.trust[rank] = trust

    def _trust_of(self, life: Any) -> Trust:
        return self.trust.get(life.rank, Trust.EXACT)

    @precondition(lambda self: any(life.is_known for life in self.lives))
    @rule()
    def write_late(self) -> None:
        """Updates of ended epochs are refused."""
        for life in self.lives:
            if life.is_known:
                late = RankUpdate(
                    rank=life.rank, model="tiny", epoch=life.epoch - 1, seq=0, changes=[]
                )
                with pytest.raises(StaleEpochError):
                    self._write(late)

    # What holds after each of these.

    @invariant()
    def kept_rows_are_those_of_the_tables(self) -> None:
        assert all(life.keeps_what_tables_have() for life in self.lives)

    @invariant()
    def every_prompt_has_the_overlap_of_the_model(self) -> None:
        for (model, leaf), matches in self.runner.run(self._match_all()).items():
            known = [life for life in self.lives if life.is_known and life.model == model]
            assert set(matches) == {life.rank for life in known}
            for life in known:
                match = matches[life.rank]
                if life.is_settled:
                    assert match.tokens_by_tier == life.engine.overlap(leaf)
                assert match.trust is self._trust_of(life)
                assert match.epoch == life.epoch

    async def _match_all(self) -> dict[tuple[str, tuple[int, ...]], dict[RankId, PrefixMatch]]:
        return {asked: await self.index.match(prompt) for asked, prompt in self.prompts.items()}

    @invariant()
    def index_holds_what_can_be_reached_and_no_more(self) -> None:
        """In the hybrid rank the window group's blocks come on top, so only the rest is counted."""
        held = self.runner.run(self.index.size()).entries_by_rank
        for life in self.lives:
            if life.is_known and life.is_settled and not life.engine.is_hybrid:
                assert held[life.rank] == life.engine.reachable_entries()
                assert life.blocks.held_blocks == life.engine.reachable_blocks()

    @invariant()
    def empty_ranks_keep_nothing(self) -> None:
        for life in self.lives:
            if life.is_settled and not life.engine.copies.total():
                assert life.blocks.tracked_entries() == 0


@pytest.fixture
def fleet(new_lives: NewLives, prompts: Prompts) -> type[Fleet]:
    """A fleet that still needs an index."""

    class FleetOfLives(Fleet):
        pass

    FleetOfLives.new_lives = staticmethod(new_lives)
    FleetOfLives.prompts = prompts
    return FleetOfLives


@pytest.fixture
def indexed_fleet(
    fleet: type[Fleet],
    make_index: Callable[[], BlockIndex],
    close_index: Callable[[BlockIndex], Awaitable[None]],
) -> type[Fleet]:
    """A fleet over one backend."""
    fleet.make_index = staticmethod(make_index)
    fleet.close_index = staticmethod(close_index)
    return fleet


@pytest.fixture
def sharing_fleet(
    fleet: type[Fleet], close_index: Callable[[BlockIndex], Awaitable[None]]
) -> type[Fleet]:
    """Whose index reads the tables that events write, as `kvlb up` has it."""
    fleet.make_index = staticmethod(MemoryIndex)
    fleet.close_index = staticmethod(close_index)
    fleet.shares_tables = True
    return fleet


def test_epoch_without_a_batch_is_nothing_to_go_on_with(indexed_fleet: type[Fleet]) -> None:
    """The indexer ends after an engine's restart was seen, and before anything came of it."""
    fleet = indexed_fleet()
    fleet.settle(0)
    fleet.restart(0, is_seen=True)
    fleet.settle(0)
    fleet.resume(0)
    fleet.every_prompt_has_the_overlap_of_the_model()
    fleet.teardown()


def test_unproved_life_of_an_idle_engine_ends_once_replay_answers(
    indexed_fleet: type[Fleet],
) -> None:
    """Whether it restarted was asked in vain, and it publishes nothing that could tell."""
    fleet = indexed_fleet()
    fleet.publish(0, sent=[([("store", 0, Tier.GPU, 0)], "sent")], settles=True)
    fleet.restart(0, is_seen=True)
    fleet.silence(0)
    fleet.silence(0)
    fleet.settle(0)
    fleet.every_prompt_has_the_overlap_of_the_model()
    fleet.index_holds_what_can_be_reached_and_no_more()
    fleet.teardown()


@pytest.mark.timeout(3600)
def test_fleet_answers_as_the_model_does(indexed_fleet: type[Fleet]) -> None:
    """Whatever engines say and in whatever order, every prompt's overlap is the model's."""
    run_lives(indexed_fleet)


@pytest.mark.timeout(3600)
def test_fleet_answers_from_shared_tables_as_the_model_does(sharing_fleet: type[Fleet]) -> None:
    """It makes no difference whether the index is told of blocks or reads where they are kept."""
    run_lives(sharing_fleet)


def run_lives(fleet: type[Fleet]) -> None:
    """As many as the profile asks for."""
    examples = settings().max_examples
    run_state_machine_as_test(
        fleet,
        # The deep profile asks for 10,000 steps, not for as many lives; some end early.
        settings=settings(
            stateful_step_count=STEPS_PER_LIFE,
            max_examples=examples * 6 // (5 * STEPS_PER_LIFE) if examples >= DEEP else examples,
        ),
    )
