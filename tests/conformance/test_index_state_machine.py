"""Random lives of a fleet: our tables and index against a model that has no memory of its own.

The model keeps what engines said (copies per rank, group, tier and block) and works out every
answer from scratch: a block is held if a copy lies anywhere, a prompt's overlap is the run of held
blocks from its start, and in the hybrid rank the last blocks before the end must lie in the
window group too. A block's engine hash is a hash of the tuple of names of its prefix.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import product

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

from indexer.core.block_rows import BlockRow, RankFacts
from indexer.core.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch
from indexer.core.hashing import Namespace
from indexer.core.index import (
    AllDropped,
    BlockIndex,
    BlocksHeld,
    GroupSpec,
    PrefixMatch,
    Prompt,
    RankUpdate,
    StaleEpochError,
)
from indexer.core.rank_blocks import RankBlocks
from indexer.core.types import EngineHash, InstanceId, RankId, Tier, Trust
from indexer.redis_index.redis_index import RedisIndex

SIZE = 2
DEPTH = 4
WINDOW_TOKENS = 2 * SIZE + 1
"""Two blocks before the end of a hit."""
HYBRID = 1
MODELS = ("tiny", "tiny", "big")
RANKS = tuple(RankId(InstanceId(f"http://engine-{at}:8000"), 0) for at in range(len(MODELS)))

Path = tuple[int, ...]
"""Names of the blocks from the root on: one block and its whole prefix."""
PATHS = [path for length in range(1, DEPTH + 1) for path in product((0, 1), repeat=length)]
LEAVES = [path for path in PATHS if len(path) == DEPTH]


def hash_of(path: Path) -> EngineHash:
    return EngineHash(hash(("engine", *path)) % 2**64)


def tokens_of(path: Path) -> list[int]:
    return [name * 1000 + at for name in path for at in range(SIZE)]


PROMPTS = {
    (model, leaf): Prompt(Namespace(model=model), [*tokens_of(leaf), 0])
    for model, leaf in product(("tiny", "big"), LEAVES)
}


async def _await(awaited: Awaitable[None]) -> None:
    await awaited


class KeptRows:
    """What a backend should have kept for a restarted indexer."""

    def __init__(self) -> None:
        self.groups: dict[int, GroupSpec] = {}
        self.rows: dict[int, dict[EngineHash, BlockRow]] = {}
        self.facts = RankFacts()
        self.seq = -1

    def take(self, update: RankUpdate) -> None:
        for change in update.changes:
            if isinstance(change, GroupSpec):
                self.groups[change.group] = change
                self.rows[change.group] = {}
            elif isinstance(change, AllDropped):
                self.rows = {group: {} for group in self.groups}
        for each in update.rows:
            rows = self.rows[each.group]
            rows.update({row.engine_hash: row for row in each.rows()})
            for gone in each.gone:
                rows.pop(gone, None)
        self.facts = update.facts or self.facts
        self.seq = update.seq


def contents(blocks: RankBlocks) -> set[tuple[int, BlockRow | None, Tier | None, int]]:
    """Every row and every key that the index should have."""
    parts = list(blocks.snapshot(0, 0))
    keys = [change for part in parts for change in part.changes if isinstance(change, BlocksHeld)]
    rows = [each for part in parts for each in part.rows]
    return {(held.group, None, held.tier, key) for held in keys for key in held.keys} | {
        (each.group, row, None, 0) for each in rows for row in each.rows()
    }


class Life:
    """One rank: our tables, and the model."""

    def __init__(self, at: int, epoch: int) -> None:
        self.at = at
        self.epoch = epoch
        self.is_known = False
        """The index has heard of this epoch."""
        self.blocks = self.new_blocks()
        self.kept = KeptRows()
        self.copies: Counter[tuple[int, Tier, Path]] = Counter()
        self.seq = 0

    def new_blocks(self) -> RankBlocks:
        return RankBlocks(
            rank=RANKS[self.at], model=MODELS[self.at], epoch=self.epoch, keeps_rows=True
        )

    def holds(self, path: Path, group: int = 0) -> bool:
        return any(self.copies[group, tier, path] for tier in Tier)

    def can_reach(self, path: Path) -> bool:
        return all(self.holds(path[: at + 1]) for at in range(len(path)))

    def reachable_blocks(self) -> int:
        return sum(self.can_reach(path) for path in PATHS)

    def reachable_entries(self) -> int:
        """Blocks x tiers."""
        return sum(
            self.copies[0, tier, path] > 0
            for tier, path in product(Tier, PATHS)
            if self.can_reach(path)
        )

    def overlap(self, leaf: Path) -> dict[Tier, int]:
        """Tokens per tier of a prompt of `leaf` and one token more."""
        end = 0
        while end < DEPTH and self.holds(leaf[: end + 1]):
            end += 1
        while self.at == HYBRID and not all(
            self.holds(leaf[: at + 1], group=1) for at in range(max(0, end - 2), end)
        ):
            end -= 1
        fastest = Counter(
            next(tier for tier in Tier if self.copies[0, tier, leaf[: at + 1]]) for at in range(end)
        )
        return {tier: blocks * SIZE for tier, blocks in fastest.items()}


ranks = st.integers(0, len(RANKS) - 1)
paths = st.sampled_from(PATHS)
tiers = st.sampled_from((Tier.GPU, Tier.GPU, Tier.GPU, Tier.CPU, Tier.STORAGE))
picks = st.integers(0, 10**6)
"""Which of the copies there are then."""
stores = st.tuples(st.just("store"), paths, tiers, st.integers(0, DEPTH - 1))
removals = st.tuples(st.just("remove"), paths, tiers, picks)
strangers = st.tuples(st.just("remove_unknown"), paths, tiers, st.integers(0, 1))
offloads = st.tuples(st.just("offload"), paths, tiers, picks)
steps = st.lists(stores | stores | removals | strangers | offloads, max_size=8)

Step = tuple[str, Path, Tier, int]


class Fleet(RuleBasedStateMachine):
    """Engines publish, restart and leave; after each step every prompt is asked."""

    make_index: Callable[[], BlockIndex]
    close_index: Callable[[BlockIndex], Awaitable[None]]

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.index = self.make_index()
        self.lives = [Life(at, 1) for at in range(len(RANKS))]
        self.trust: dict[RankId, Trust] = {}

    def teardown(self) -> None:
        self.runner.run(_await(self.close_index(self.index)))
        self.runner.close()

    @rule(at=ranks, steps=steps)
    def publish(self, at: int, steps: Sequence[Step]) -> None:
        """One batch of one rank."""
        life = self.lives[at]
        events = [event for step in steps for event in self._events(life, step)]
        self._apply(life, EventBatch(float(life.seq), 0, events))

    @rule(at=ranks, steps=steps)
    def restart(self, at: int, steps: Sequence[Step]) -> None:
        """A new epoch empties the rank."""
        self.lives[at] = Life(at, self.lives[at].epoch + 1)
        self.publish(at, steps)

    @rule(at=ranks, before=steps, after=steps)
    def reset(self, at: int, before: Sequence[Step], after: Sequence[Step]) -> None:
        """The cache is cleared between other events of one batch."""
        life = self.lives[at]
        events: list[Event] = [event for step in before for event in self._events(life, step)]
        life.copies.clear()
        events.append(AllBlocksCleared())
        events += [event for step in after for event in self._events(life, step)]
        self._apply(life, EventBatch(float(life.seq), 0, events))

    @rule(at=ranks)
    def retire(self, at: int) -> None:
        """The rank leaves the fleet; it may return with its next batch."""
        self.runner.run(self.index.retire(RANKS[at]))
        self.trust.pop(RANKS[at], None)
        self.lives[at] = Life(at, self.lives[at].epoch + 1)

    @rule(at=ranks)
    def resume(self, at: int) -> None:
        """Our process ends; another goes on with what the backend kept. Orphans aren't."""
        life = self.lives[at]
        if not life.is_known:
            return
        kept = life.kept
        groups: Sequence[GroupSpec] = list(kept.groups.values())
        rows: Mapping[int, Sequence[BlockRow]] = {
            group: list(each.values()) for group, each in kept.rows.items()
        }
        if isinstance(self.index, RedisIndex):
            record = self.runner.run(self.index.restore(RANKS[at], MODELS[at]))
            assert record
            assert {group: set(each) for group, each in record.rows.items()} == {
                group: set(each) for group, each in rows.items()
            }
            assert set(record.groups) == set(groups)
            assert (record.epoch, record.seq) == (life.epoch, kept.seq)
            assert (record.facts, record.trust) == (kept.facts, self._trust_of(at))
            groups, rows = record.groups, record.rows
        restored = life.new_blocks()
        assert restored.restore(groups, rows, kept.facts)
        assert contents(restored) == contents(life.blocks)
        if not life.blocks.orphans:
            life.blocks = restored

    @rule(at=ranks, part_blocks=st.integers(1, 5))
    def rewrite(self, at: int, part_blocks: int) -> None:
        """The backend lost the rank, and is told all of it again."""
        life = self.lives[at]
        if not life.is_known:
            return
        parts = life.blocks.snapshot(life.kept.seq, 0, part_blocks)
        self.runner.run(self._rewrite(at, parts))

    @invariant()
    def kept_rows_are_those_of_the_tables(self) -> None:
        for life in self.lives:
            rows = {(group, row) for group, row, _, _ in contents(life.blocks) if row}
            assert rows == {
                (group, row) for group, each in life.kept.rows.items() for row in each.values()
            }

    async def _rewrite(self, at: int, parts: Iterable[RankUpdate]) -> None:
        if isinstance(self.index, RedisIndex):
            await self.index.rewrite(MODELS[at], self._trust_of(at), parts)
            return
        await self.index.retire(RANKS[at])
        for part in parts:
            await self.index.apply(part)
        await self.index.set_trust(RANKS[at], self._trust_of(at))

    def _trust_of(self, at: int) -> Trust:
        return self.trust.get(RANKS[at], Trust.EXACT)

    @rule(at=ranks, trust=st.sampled_from(Trust))
    def set_trust(self, at: int, trust: Trust) -> None:
        self.runner.run(self.index.set_trust(RANKS[at], trust))
        self.trust[RANKS[at]] = trust

    @precondition(lambda self: any(life.is_known for life in self.lives))
    @rule()
    def write_late(self) -> None:
        """Updates of ended epochs are refused."""
        for life in self.lives:
            if life.is_known:
                late = RankUpdate(
                    rank=RANKS[life.at], model="tiny", epoch=life.epoch - 1, seq=0, changes=[]
                )
                with pytest.raises(StaleEpochError):
                    self.runner.run(self.index.apply(late))

    @invariant()
    def every_prompt_has_the_overlap_of_the_model(self) -> None:
        for (model, leaf), matches in self.runner.run(self._match_all()).items():
            assert {rank: match.tokens_by_tier for rank, match in matches.items()} == {
                RANKS[life.at]: life.overlap(leaf)
                for life in self.lives
                if life.is_known and MODELS[life.at] == model
            }
            for rank, match in matches.items():
                assert match.trust is self.trust.get(rank, Trust.EXACT)
                assert match.epoch == self.lives[RANKS.index(rank)].epoch

    async def _match_all(self) -> dict[tuple[str, Path], dict[RankId, PrefixMatch]]:
        return {asked: await self.index.match(prompt) for asked, prompt in PROMPTS.items()}

    @invariant()
    def index_holds_what_can_be_reached_and_no_more(self) -> None:
        """In the hybrid rank the window group's blocks come on top, so only the rest is counted."""
        held = self.runner.run(self.index.size()).entries_by_rank
        for life in self.lives:
            if life.is_known and life.at != HYBRID:
                assert held[RANKS[life.at]] == life.reachable_entries()
                assert life.blocks.held_blocks == life.reachable_blocks()

    @invariant()
    def empty_ranks_keep_nothing(self) -> None:
        for life in self.lives:
            if not life.copies.total():
                assert life.blocks.tracked_entries() == 0

    def _apply(self, life: Life, batch: EventBatch) -> None:
        update = life.blocks.apply(life.seq, batch)
        life.seq += 1
        life.kept.take(update)
        self.runner.run(self.index.apply(update))
        life.is_known = True

    def _events(self, life: Life, step: Step) -> Sequence[Event]:
        """What the engine says of one step, which the model notes down."""
        what, path, tier, number = step
        there = sorted(copy for copy, count in life.copies.items() if count)
        group, where, block = there[number % len(there)] if there else (0, tier, path)
        match what:
            case "store":
                return self._store(life, path, tier, min(number, len(path) - 1))
            case "remove" if there:
                life.copies[group, where, block] -= 1
                return [BlockRemoved([hash_of(block)], where, group)]
            case "remove_unknown" if not life.copies[number, tier, path]:
                return [BlockRemoved([hash_of(path)], tier, number)]
            case "offload" if there:
                life.copies[group, tier, block] += 1
                return [BlockStored([hash_of(block)], None, [], 0, tier, group=group)]
            case _:
                return []

    def _store(self, life: Life, path: Path, tier: Tier, start: int) -> Sequence[BlockStored]:
        """Blocks `start` and on of `path`; the hybrid rank's window group comes first, masked."""
        added = [path[: at + 1] for at in range(start, len(path))]
        parent = hash_of(path[:start]) if start else None
        tokens = tokens_of(path)[start * SIZE :]
        for each in added:
            life.copies[0, tier, each] += 1
        full = BlockStored(
            [hash_of(each) for each in added],
            parent,
            tokens,
            SIZE,
            tier,
            kind="full_attention",
        )
        if life.at != HYBRID:
            return [full]
        masked = added[-2:]
        for each in masked:
            life.copies[1, tier, each] += 1
        window = BlockStored(
            [hash_of(each) for each in masked],
            parent,
            tokens,
            SIZE,
            tier,
            group=1,
            kind="sliding_window",
            window_tokens=WINDOW_TOKENS,
        )
        return [window, full]


@pytest.mark.timeout(3600)
def test_fleet_answers_as_the_model_does(
    make_index: Callable[[], BlockIndex], close_index: Callable[[BlockIndex], Awaitable[None]]
) -> None:
    """Whatever engines say and in whatever order, every prompt's overlap is the model's."""

    class FleetOfBackend(Fleet):
        pass

    FleetOfBackend.make_index = staticmethod(make_index)
    FleetOfBackend.close_index = staticmethod(close_index)
    run_state_machine_as_test(FleetOfBackend, settings=settings(stateful_step_count=40))
