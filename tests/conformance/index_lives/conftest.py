"""Lives of ranks: what an engine holds and says, what becomes of it on the way, what our side has.

`Engine` is the model and has no memory of its own: it keeps copies per group, tier and block, and
works out every answer from scratch. A block is held if a copy lies anywhere, a prompt's overlap is
the run of held blocks from its start, and in the hybrid rank the last blocks before the end must
lie in the window group too. A block's engine hash is a hash of the names of its prefix.

`Life` has the network and our stream and tables: batches are lost, doubled, overtaken; replays come
bit by bit or not at all; engines restart, seen or not, and their clocks are set back. One has no replay:
what is lost of it stays lost, until it restarts.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import product

import pytest

from indexer.core.block_rows import BlockRow, RankFacts
from indexer.core.block_tree import BlockTree
from indexer.core.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch
from indexer.core.hashing import Namespace
from indexer.core.index import AllDropped, BlocksHeld, GroupSpec, Prompt, RankUpdate
from indexer.core.known_batches import payload_digest
from indexer.core.rank_blocks import RankBlocks
from indexer.core.replay import StreamLimits
from indexer.core.stream import RankStream
from indexer.core.stream_effects import ApplyBatch, BatchOutcome, Effect, OpenEpoch, RequestReplay
from indexer.core.types import EngineHash, InstanceId, RankId, Tier, Trust

SIZE = 2
DEPTH = 4
WINDOW_TOKENS = 2 * SIZE + 1
"""Two blocks before the end of a hit."""
MODELS = ("tiny", "tiny", "big", "big")
HYBRID = 1
WITHOUT_REPLAY = 3

Path = tuple[int, ...]
"""Names of the blocks from the root on: one block and its whole prefix."""
PATHS = [path for length in range(1, DEPTH + 1) for path in product((0, 1), repeat=length)]
LEAVES = [path for path in PATHS if len(path) == DEPTH]

Step = tuple[str, int, Tier, int]
"""What happens, to which of the paths, where, and a number of its own."""


def _hash_of(path: Path) -> EngineHash:
    # Of numbers only: the same in every process, so that a failing example fails again.
    return EngineHash(hash((0xE, *path)) % 2**64)


def _tokens_of(path: Path) -> list[int]:
    return [name * 1000 + at for name in path for at in range(SIZE)]


@pytest.fixture(scope="session")
def prompts() -> dict[tuple[str, Path], Prompt]:
    """One for each model and leaf, a token longer than the leaf's blocks."""
    return {
        (model, leaf): Prompt(Namespace(model=model), [*_tokens_of(leaf), 0])
        for model, leaf in product(("tiny", "big"), LEAVES)
    }


class Engine:
    """One rank's caches, and the events that they are published by."""

    def __init__(self, *, is_hybrid: bool) -> None:
        self.is_hybrid = is_hybrid
        self.copies: Counter[tuple[int, Tier, Path]] = Counter()

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
        while self.is_hybrid and not all(
            self.holds(leaf[: at + 1], group=1) for at in range(max(0, end - 2), end)
        ):
            end -= 1
        fastest = Counter(
            next(tier for tier in Tier if self.copies[0, tier, leaf[: at + 1]]) for at in range(end)
        )
        return {tier: blocks * SIZE for tier, blocks in fastest.items()}

    def clear(self) -> AllBlocksCleared:
        self.copies.clear()
        return AllBlocksCleared()

    def take(self, steps: Sequence[Step]) -> list[Event]:
        """Do as they say; return what the engine tells of it."""
        return [event for step in steps for event in self._take_one(step)]

    def _take_one(self, step: Step) -> Sequence[Event]:
        what, number_of_path, tier, number = step
        path = PATHS[number_of_path]
        there = sorted(copy for copy, count in self.copies.items() if count)
        group, where, block = there[number % len(there)] if there else (0, tier, path)
        match what:
            case "store":
                return self._store(path, tier, min(number, len(path) - 1))
            case "remove" if there:
                self.copies[group, where, block] -= 1
                return [BlockRemoved([_hash_of(block)], tier=where, group=group)]
            case "remove_unknown" if not self.copies[number, tier, path]:
                return [BlockRemoved([_hash_of(path)], tier=tier, group=number)]
            case "offload" if there:
                self.copies[group, tier, block] += 1
                return [BlockStored([_hash_of(block)], None, [], 0, tier=tier, group=group)]
            case _:
                return []

    def _store(self, path: Path, tier: Tier, start: int) -> Sequence[BlockStored]:
        """Blocks `start` and on of `path`; the hybrid rank's window group comes first, masked."""
        added = [path[: at + 1] for at in range(start, len(path))]
        groups: list[tuple[int, list[Path], str, int | None]] = [(0, added, "full_attention", None)]
        if self.is_hybrid:
            groups.insert(0, (1, added[-2:], "sliding_window", WINDOW_TOKENS))
        self.copies.update((group, tier, each) for group, blocks, *_ in groups for each in blocks)
        return [
            BlockStored(
                [_hash_of(each) for each in blocks],
                _hash_of(path[:start]) if start else None,
                _tokens_of(path)[start * SIZE :],
                SIZE,
                tier=tier,
                group=group,
                kind=kind,
                window_tokens=window_tokens,
            )
            for group, blocks, kind, window_tokens in groups
        ]


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
                self.groups.clear()
                self.rows.clear()
        for each in update.rows:
            rows = self.rows[each.group]
            rows.update({row.engine_hash: row for row in each.rows()})
            for gone in each.gone:
                rows.pop(gone, None)
        self.facts = update.facts or self.facts
        self.seq = update.seq

    def all_rows(self) -> set[tuple[int, BlockRow]]:
        return {(group, row) for group, each in self.rows.items() for row in each.values()}


def _rows_and_keys(
    blocks: RankBlocks,
) -> tuple[set[tuple[int, BlockRow]], set[tuple[int, Tier, int]]]:
    """Every row and every key that the index should have."""
    parts = list(blocks.snapshot(0, 0))
    held = [change for part in parts for change in part.changes if isinstance(change, BlocksHeld)]
    rows = {(each.group, row) for part in parts for each in part.rows for row in each.rows()}
    return rows, {(each.group, each.tier, key) for each in held for key in each.keys}


class Life:
    """One rank: its engine, the network, and our stream and tables, which write to an index."""

    def __init__(self, at: int, write: Callable[[RankUpdate], None], *, shares_tables: bool):
        self.rank = RankId(InstanceId(f"http://engine-{at}:8000"), 0)
        self.model = MODELS[at]
        self.engine = Engine(is_hybrid=at == HYBRID)
        self.epoch = 1
        self.is_known = False
        """The index has heard of this epoch."""
        self.batches: list[bytes] = []
        """Payloads of the engine's present life; all of them can be replayed."""
        self._can_replay = at != WITHOUT_REPLAY
        self._has_lost = False
        """Not all of the engine's present life has come, or in order, and it can't be asked for."""
        self._clock_ahead = 0
        self.stream = self._new_stream()
        self.is_connected = False
        self._write_to_index = write
        self._shares_tables = shares_tables
        self._contents: dict[bytes, EventBatch] = {}
        """Of all lives; payloads are a number of their own and the time at which they were published."""
        # The network.
        self._delayed: list[tuple[int, bytes]] = []
        self._answers: list[int] = []
        """Numbers that the replay under way has yet to deliver."""
        self._ticket = 0
        self._is_silenced = False
        """Some question was never answered, so something may have been given up."""
        self._begin_tables()

    def _begin_tables(self) -> None:
        self.blocks, self.kept = self._new_blocks(), KeptRows()
        self.applied: list[bytes] = []
        """Payloads applied in the present epoch."""

    def _new_blocks(self) -> RankBlocks:
        return RankBlocks(
            rank=self.rank,
            model=self.model,
            epoch=self.epoch,
            keeps_rows=True,
            tree=BlockTree(is_read=self._shares_tables),
        )

    def begin_epoch(self) -> None:
        """The tables are empty, whatever the engine holds."""
        self.epoch += 1
        self.is_known = False
        self._begin_tables()

    def follow_anew(self) -> None:
        """Over new sockets: what was on its way to the old ones is lost."""
        self.stream, self.is_connected = self._new_stream(), False
        self._has_lost = not self._can_replay and bool(self.batches)
        self._answers.clear()
        self._delayed.clear()

    def resume(self, groups: Sequence[GroupSpec], rows: Mapping[int, Sequence[BlockRow]]) -> None:
        """Our process ends; another goes on with what the backend kept. Orphans aren't."""
        restored = self._new_blocks()
        assert restored.restore(groups, rows, self.kept.facts)
        assert _rows_and_keys(restored) == _rows_and_keys(self.blocks)
        if self.blocks.orphans:
            return
        self.blocks = restored
        if self.applied:
            has_lost = self._has_lost
            self.follow_anew()
            self._has_lost = has_lost or (self._has_lost and not self.is_settled)
            digest = payload_digest(self.applied[-1])
            self.stream.resume(len(self.applied) - 1, digest, Trust.EXACT)

    @property
    def is_settled(self) -> bool:
        """All of the engine's present life was applied, in order, and nothing else."""
        return self.applied == self.batches

    def keeps_what_tables_have(self) -> bool:
        return _rows_and_keys(self.blocks)[0] == self.kept.all_rows()

    # What engines and the network do.

    def send(self, events: Sequence[Event], fate: str = "sent") -> None:
        """The engine publishes: as long as it lives its clock and its count of batches only rise."""
        published = len(self._contents) + 1
        payload = b"%d:%d" % (published, published + self._clock_ahead)
        self._contents[payload] = EventBatch(float(published), 0, list(events))
        self.batches.append(payload)
        batch = (len(self.batches) - 1, payload)
        self.connect()
        if fate in {"overtaken", "lost"} and not self._can_replay:
            self._has_lost = True
        if fate == "overtaken":
            self._delayed.append(batch)
        elif fate != "lost":
            for _ in range(2 if fate == "twice" else 1):
                self._perform(self.stream.on_live(*batch))

    def deliver(self, pick: int) -> None:
        """A batch that was overtaken arrives at last."""
        if self._delayed:
            self._perform(self.stream.on_live(*self._delayed.pop(pick % len(self._delayed))))

    def answer(self, messages: int) -> None:
        """So much of a replay arrives."""
        for _ in range(messages):
            if not self.stream.replaying:
                return
            if self._answers:
                seq = self._answers.pop(0)
                self._perform(self.stream.on_replayed(self._ticket, seq, self.batches[seq]))
            else:
                self._perform(self.stream.on_replay_end(self._ticket))

    def silence(self) -> None:
        """A replay stops without its end."""
        if self.stream.replaying:
            self._is_silenced = True
            self._perform(self.stream.on_replay_failed(self._ticket))

    def restart(self, clock_ahead: int = 0) -> None:
        """Empty caches, numbers from 0, another clock. What is on its way may still arrive."""
        self._clock_ahead = clock_ahead
        self._has_lost = False
        self.engine.clear()
        self.batches.clear()
        self._answers.clear()
        if self.is_connected:
            self._perform(self.stream.on_disconnected())
            self.is_connected = False

    def connect(self) -> None:
        """To the present process; what another had sent came before, or never does."""
        if not self.is_connected:
            self.is_connected = True
            self._delayed = [batch for batch in self._delayed if batch[1] in self.batches]
            self._perform(self.stream.on_connected())

    def settle(self) -> None:
        """Everything arrives and every question is answered: all is as the engine says.

        An engine that was restarted and has published nothing need not publish for that.
        """
        if self.is_connected and not self.batches and self._can_replay:
            self._delayed.clear()
            self._answer_all()
        else:
            self.settle_with_a_batch()
        assert self.is_settled or self._has_lost

    def settle_with_a_batch(self) -> None:
        """The engine publishes once more, so that what is missing shows."""
        for batch in self._delayed:
            self._perform(self.stream.on_live(*batch))
        self._delayed.clear()
        self.send(())
        self._answer_all()
        assert self.is_settled or self._has_lost

    def _answer_all(self) -> None:
        """And what was given up in silence is asked for anew, as the subscriber does after a while."""
        self.answer(10_000)
        if self._is_silenced and self.stream.wants_rebuild:
            self._perform(self.stream.on_rebuild_wanted())
            self.answer(10_000)
        self._is_silenced = False

    def _perform(self, effects: Sequence[Effect]) -> None:
        """In order, as the subscriber does; what a batch showed goes back to the stream."""
        for effect in effects:
            match effect:
                case ApplyBatch(seq=seq, payload=payload):
                    batch = self._contents[payload]
                    self._write(self.blocks.apply(seq, batch, payload_digest(payload)))
                    self.applied.append(payload)
                    outcome = BatchOutcome(orphans=self.blocks.orphans)
                    self._perform(self.stream.on_applied(seq, outcome))
                case RequestReplay(from_seq=from_seq, ticket=ticket):
                    self._ticket = ticket
                    self._answers = list(range(from_seq, len(self.batches)))
                case OpenEpoch():
                    self.begin_epoch()
                    self._write(self.blocks.apply(-1, EventBatch(0.0, 0, [])))
                case _:
                    pass

    def _write(self, update: RankUpdate) -> None:
        self.kept.take(update)
        self._write_to_index(update)
        self.is_known = True

    def _new_stream(self) -> RankStream:
        return RankStream(can_replay=self._can_replay, ts_of=_time_of, limits=StreamLimits())


def _time_of(payload: bytes) -> float | None:
    return float(payload.partition(b":")[2]) if payload else None


@pytest.fixture(scope="session")
def new_lives() -> Callable[..., list[Life]]:
    """One rank of each engine; with `shares_tables` the index reads their tables."""

    def begin(write: Callable[[RankUpdate], None], *, shares_tables: bool) -> list[Life]:
        return [Life(at, write, shares_tables=shares_tables) for at in range(len(MODELS))]

    return begin
