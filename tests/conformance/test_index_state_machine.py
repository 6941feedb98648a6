"""Random lives of a fleet: stream, tables and index against a model that has no memory of its own.

The model keeps what engines hold (copies per rank, group, tier and block) and works out every
answer from scratch: a block is held if a copy lies anywhere, a prompt's overlap is the run of held
blocks from its start, and in the hybrid rank the last blocks before the end must lie in the
window group too. A block's engine hash is a hash of the tuple of names of its prefix.

Between the model and the tables lies a network: batches are lost, doubled, overtaken; replays come
bit by bit or not at all; engines restart, seen or not. What the index says of a rank is compared
whenever that rank's stream has applied all of the engine's present life; `settle` makes it so.
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
from indexer.core.block_tree import BlockTree
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
from indexer.core.known_batches import payload_digest
from indexer.core.rank_blocks import RankBlocks
from indexer.core.replay import StreamLimits
from indexer.core.stream import RankStream
from indexer.core.stream_effects import (
    ApplyBatch,
    BatchOutcome,
    Effect,
    OpenEpoch,
    RequestReplay,
)
from indexer.core.types import EngineHash, InstanceId, RankId, Tier, Trust
from indexer.memory_index import MemoryIndex
from indexer.redis_index.redis_index import RedisIndex

SIZE = 2
DEPTH = 4
STEPS_PER_LIFE = 40
DEEP = 10_000
"""Examples of the deep profile."""
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
    # Of numbers only: the same in every process, so that a failing example fails again.
    return EngineHash(hash((0xE, *path)) % 2**64)


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
    """One rank: the engine as the model has it, the network, and our stream and tables."""

    def __init__(self, at: int, *, shares_tables: bool) -> None:
        self.at = at
        self.shares_tables = shares_tables
        """The index reads our tables."""
        self.epoch = 1
        self.is_known = False
        """The index has heard of this epoch."""
        # The engine.
        self.copies: Counter[tuple[int, Tier, Path]] = Counter()
        self.batches: list[bytes] = []
        """Payloads of the engine's present life; all of them can be replayed."""
        self.contents: dict[bytes, EventBatch] = {}
        self.published = 0
        # The network.
        self.delayed: list[tuple[int, bytes]] = []
        self.answer: list[int] = []
        """Numbers that the replay under way has yet to deliver."""
        self.ticket = 0
        # The indexer.
        self.is_connected = False
        self.is_silenced = False
        """Some question was never answered, so something may have been given up."""
        self.stream = new_stream()
        self.blocks = self.new_blocks()
        self.kept = KeptRows()
        self.applied: list[bytes] = []
        """Payloads applied in the present epoch."""

    def new_blocks(self) -> RankBlocks:
        return RankBlocks(
            rank=RANKS[self.at],
            model=MODELS[self.at],
            epoch=self.epoch,
            keeps_rows=True,
            tree=BlockTree(is_read=self.shares_tables),
        )

    def begin_epoch(self) -> None:
        """The tables are empty, whatever the engine holds."""
        self.epoch += 1
        self.is_known = False
        self.blocks, self.kept, self.applied = self.new_blocks(), KeptRows(), []

    def follow_anew(self) -> None:
        """Over new sockets: what was on its way to the old ones is lost."""
        self.stream, self.is_connected = new_stream(), False
        self.answer.clear()
        self.delayed.clear()

    @property
    def is_settled(self) -> bool:
        """All of the engine's present life was applied, in order, and nothing else."""
        return self.applied == self.batches

    def add_batch(self, events: Sequence[Event]) -> tuple[int, bytes]:
        """The engine publishes: its clock and its count of batches only rise."""
        self.published += 1
        payload = b"%d" % self.published
        self.contents[payload] = EventBatch(float(self.published), 0, list(events))
        self.batches.append(payload)
        return len(self.batches) - 1, payload

    def restart_engine(self) -> None:
        """Empty caches, numbers from 0. What is on its way may still arrive."""
        self.copies.clear()
        self.batches.clear()
        self.answer.clear()

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


def time_of(payload: bytes) -> float | None:
    """Payloads are the times at which they were published."""
    return float(payload) if payload else None


def new_stream() -> RankStream:
    return RankStream(can_replay=True, ts_of=time_of, limits=StreamLimits())


ranks = st.integers(0, len(RANKS) - 1)
paths = st.sampled_from(PATHS)
tiers = st.sampled_from((Tier.GPU, Tier.GPU, Tier.GPU, Tier.CPU, Tier.STORAGE))
picks = st.integers(0, 10**6)
"""Which of the copies there are then."""
stores = st.tuples(st.just("store"), paths, tiers, st.integers(0, DEPTH - 1))
removals = st.tuples(st.just("remove"), paths, tiers, picks)
strangers = st.tuples(st.just("remove_unknown"), paths, tiers, st.integers(0, 1))
offloads = st.tuples(st.just("offload"), paths, tiers, picks)
fates = st.sampled_from(("sent", "sent", "sent", "lost", "twice", "overtaken"))
steps = st.lists(stores | stores | removals | strangers | offloads, max_size=8)
sent = st.lists(st.tuples(steps, fates), min_size=1, max_size=4)

Step = tuple[str, Path, Tier, int]


class Fleet(RuleBasedStateMachine):
    """Engines publish, restart and leave; after each step every prompt is asked."""

    make_index: Callable[[], BlockIndex]
    close_index: Callable[[BlockIndex], Awaitable[None]]
    shares_tables = False

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.index = self.make_index()
        self.lives = [Life(at, shares_tables=self.shares_tables) for at in range(len(RANKS))]
        self.trust: dict[RankId, Trust] = {}

    def teardown(self) -> None:
        self.runner.run(_await(self.close_index(self.index)))
        self.runner.close()

    # What engines and the network do.

    @rule(at=ranks, sent=sent, settles=st.booleans())
    def publish(self, at: int, sent: Sequence[tuple[Sequence[Step], str]], settles: bool) -> None:
        """Some batches of one rank, and what becomes of each on the way."""
        life = self.lives[at]
        for steps, fate in sent:
            events = [event for step in steps for event in self._events(life, step)]
            self._send(life, events, fate)
        if settles:
            self._settle(life)

    @rule(at=ranks, before=steps, after=steps, fate=fates)
    def reset(self, at: int, before: Sequence[Step], after: Sequence[Step], fate: str) -> None:
        """The cache is cleared between other events of one batch."""
        life = self.lives[at]
        events: list[Event] = [event for step in before for event in self._events(life, step)]
        life.copies.clear()
        events.append(AllBlocksCleared())
        events += [event for step in after for event in self._events(life, step)]
        self._send(life, events, fate)

    @rule(at=ranks, pick=picks)
    def deliver(self, at: int, pick: int) -> None:
        """A batch that was overtaken arrives at last."""
        life = self.lives[at]
        if life.delayed:
            seq, payload = life.delayed.pop(pick % len(life.delayed))
            self._perform(life, life.stream.on_live(seq, payload))

    @rule(at=ranks, messages=st.integers(1, 4))
    def answer(self, at: int, messages: int) -> None:
        """Some of a replay arrives."""
        self._answer(self.lives[at], messages)

    @rule(at=ranks)
    def silence(self, at: int) -> None:
        """A replay stops without its end."""
        life = self.lives[at]
        if life.stream.is_replaying:
            life.is_silenced = True
            self._perform(life, life.stream.on_replay_failed(life.ticket))

    @rule(at=ranks, is_seen=st.booleans())
    def restart(self, at: int, is_seen: bool) -> None:
        """Another process at the same address; the connection tells, or breaks unnoticed."""
        life = self.lives[at]
        life.restart_engine()
        if life.is_connected:
            self._perform(life, life.stream.on_disconnected())
            life.is_connected = False
        if is_seen:
            self._connect(life)

    @rule(at=ranks)
    def settle(self, at: int) -> None:
        """Everything arrives and every question is answered: all is as the engine says.

        An engine that was restarted and has published nothing need not publish for that.
        """
        life = self.lives[at]
        if life.batches or not life.is_connected:
            self._settle(life)
            return
        life.delayed.clear()
        self._answer(life, 10_000)
        assert life.is_settled

    # What the indexer does.

    @rule(at=ranks)
    def retire(self, at: int) -> None:
        """The rank leaves the fleet, and is followed anew."""
        life = self.lives[at]
        self.runner.run(self.index.retire(RANKS[at]))
        self.trust.pop(RANKS[at], None)
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
            record = self.runner.run(self.index.restore(RANKS[at], MODELS[at]))
            assert (record is None) == (kept.seq < 0)  # then there is no batch to go on from
        else:
            record = None
        if record:
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
        if life.blocks.orphans:
            return
        life.blocks = restored
        if life.applied:
            last = len(life.applied) - 1
            life.follow_anew()
            life.stream.resume(last, payload_digest(life.applied[last]), Trust.EXACT)

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
            known = [life for life in self.lives if life.is_known and MODELS[life.at] == model]
            assert set(matches) == {RANKS[life.at] for life in known}
            for life in known:
                match = matches[RANKS[life.at]]
                if life.is_settled:
                    assert match.tokens_by_tier == life.overlap(leaf)
                assert match.trust is self._trust_of(life.at)
                assert match.epoch == life.epoch

    async def _match_all(self) -> dict[tuple[str, Path], dict[RankId, PrefixMatch]]:
        return {asked: await self.index.match(prompt) for asked, prompt in PROMPTS.items()}

    @invariant()
    def index_holds_what_can_be_reached_and_no_more(self) -> None:
        """In the hybrid rank the window group's blocks come on top, so only the rest is counted."""
        held = self.runner.run(self.index.size()).entries_by_rank
        for life in self.lives:
            if life.is_known and life.is_settled and life.at != HYBRID:
                assert held[RANKS[life.at]] == life.reachable_entries()
                assert life.blocks.held_blocks == life.reachable_blocks()

    @invariant()
    def empty_ranks_keep_nothing(self) -> None:
        for life in self.lives:
            if life.is_settled and not life.copies.total():
                assert life.blocks.tracked_entries() == 0

    def _connect(self, life: Life) -> None:
        """To the present process; what another had sent came before, or never does."""
        if not life.is_connected:
            life.is_connected = True
            life.delayed = [batch for batch in life.delayed if batch[1] in life.batches]
            self._perform(life, life.stream.on_connected())

    def _send(self, life: Life, events: Sequence[Event], fate: str) -> None:
        batch = life.add_batch(events)
        self._connect(life)
        if fate == "overtaken":
            life.delayed.append(batch)
        elif fate != "lost":
            for _ in range(2 if fate == "twice" else 1):
                self._perform(life, life.stream.on_live(*batch))

    def _settle(self, life: Life) -> None:
        for batch in life.delayed:
            self._perform(life, life.stream.on_live(*batch))
        life.delayed.clear()
        self._send(life, (), "sent")
        self._answer(life, 10_000)
        if life.is_silenced and life.stream.wants_rebuild:
            self._perform(life, life.stream.on_rebuild_wanted())
            self._answer(life, 10_000)
        life.is_silenced = False
        assert life.is_settled

    def _answer(self, life: Life, messages: int) -> None:
        for _ in range(messages):
            if not life.stream.is_replaying:
                return
            if life.answer:
                seq = life.answer.pop(0)
                replayed = life.stream.on_replayed(life.ticket, seq, life.batches[seq])
                self._perform(life, replayed)
            else:
                self._perform(life, life.stream.on_replay_end(life.ticket))

    def _perform(self, life: Life, effects: Sequence[Effect]) -> None:
        """In order, as the subscriber does; what a batch showed goes back to the stream."""
        for effect in effects:
            match effect:
                case ApplyBatch(seq=seq, payload=payload):
                    self._apply(life, seq, payload)
                    outcome = BatchOutcome(orphans=life.blocks.orphans)
                    self._perform(life, life.stream.on_applied(seq, outcome))
                case RequestReplay(from_seq=from_seq, ticket=ticket):
                    life.ticket = ticket
                    life.answer = list(range(from_seq, len(life.batches)))
                case OpenEpoch():
                    life.begin_epoch()
                    self._write(life, life.blocks.apply(-1, EventBatch(0.0, 0, [])))
                case _:
                    pass

    def _apply(self, life: Life, seq: int, payload: bytes) -> None:
        batch = life.contents[payload]
        self._write(life, life.blocks.apply(seq, batch, payload_digest(payload)))
        life.applied.append(payload)

    def _write(self, life: Life, update: RankUpdate) -> None:
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
                return [BlockRemoved([hash_of(block)], tier=where, group=group)]
            case "remove_unknown" if not life.copies[number, tier, path]:
                return [BlockRemoved([hash_of(path)], tier=tier, group=number)]
            case "offload" if there:
                life.copies[group, tier, block] += 1
                return [BlockStored([hash_of(block)], None, [], 0, tier=tier, group=group)]
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
            tier=tier,
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
            tier=tier,
            group=1,
            kind="sliding_window",
            window_tokens=WINDOW_TOKENS,
        )
        return [window, full]


async def _close_nothing(_index: BlockIndex) -> None:
    """An index in memory holds nothing open."""


class SharingFleet(Fleet):
    """Whose index reads the tables that events write, as `kvlb up` has it."""

    make_index = staticmethod(MemoryIndex)
    close_index = staticmethod(_close_nothing)
    shares_tables = True


@pytest.fixture
def new_fleet(
    make_index: Callable[[], BlockIndex], close_index: Callable[[BlockIndex], Awaitable[None]]
) -> type[Fleet]:
    """A fleet over one backend."""

    class FleetOfBackend(Fleet):
        pass

    FleetOfBackend.make_index = staticmethod(make_index)
    FleetOfBackend.close_index = staticmethod(close_index)
    return FleetOfBackend


def test_epoch_without_a_batch_is_nothing_to_go_on_with(new_fleet: type[Fleet]) -> None:
    """The indexer ends after an engine's restart was seen, and before anything came of it."""
    fleet = new_fleet()
    fleet.settle(0)
    fleet.restart(0, is_seen=True)
    fleet.settle(0)
    fleet.resume(0)
    fleet.every_prompt_has_the_overlap_of_the_model()
    fleet.teardown()


@pytest.mark.timeout(3600)
def test_fleet_answers_as_the_model_does(new_fleet: type[Fleet]) -> None:
    """Whatever engines say and in whatever order, every prompt's overlap is the model's."""
    run_lives(new_fleet)


@pytest.mark.timeout(3600)
def test_fleet_answers_from_shared_tables_as_the_model_does() -> None:
    """It makes no difference whether the index is told of blocks or reads where they are kept."""
    run_lives(SharingFleet)


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
