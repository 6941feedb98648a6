"""Between a rank's tables and Redis: batches written together, and what waits for what."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from structlog.testing import capture_logs

from indexer.config import RankSource
from indexer.core.events import BlockRemoved, BlockStored, Event, EventBatch
from indexer.core.hashing import Namespace, block_keys, pack_tokens, root_key
from indexer.core.index import BlocksHeld, Prompt, RankUpdate
from indexer.core.rank_blocks import RankBlocks
from indexer.core.types import EngineHash, InstanceId, RankId, Tier, Trust
from indexer.memory_index import MemoryIndex
from indexer.rank_keeper import RankKeeper
from indexer.redis_index.connection import RedisConnection
from indexer.redis_index.redis_index import RedisIndex
from indexer.turns import Turns

SIZE = 4
R0 = RankId(InstanceId("http://e0:8000"), 0)
SOURCE = RankSource(rank=R0, alias="e0", model="tiny", events="", replay=None)
KEYS = block_keys(root_key(Namespace(model="tiny")), pack_tokens(range(2 * SIZE)), SIZE)
PROMPT = Prompt(Namespace(model="tiny"), range(100 * SIZE))


def stored(number: int) -> BlockStored:
    """Block `number` of the prompt, counted from one."""
    parent = EngineHash(number - 1) if number > 1 else None
    tokens = list(range((number - 1) * SIZE, number * SIZE))
    return BlockStored([EngineHash(number)], parent, tokens, SIZE, kind="full_attention")


def removed(number: int) -> BlockRemoved:
    return BlockRemoved([EngineHash(number)])


class Kept:
    """A rank, its keeper and its Redis. The keeper writes by itself only inside `running`."""

    def __init__(self, server: Any, **settings: object) -> None:
        self.server = server
        self.index = RedisIndex(RedisConnection(server.settings(**settings)))
        self.faults: Counter[str] = Counter()
        self.keeper = self.new_keeper()
        self.blocks = self.new_life(1)
        self._seq = 0

    def new_keeper(self) -> RankKeeper:
        return RankKeeper(
            index=self.index,
            journal=self.index,
            source=SOURCE,
            faults=self.faults,
            on_progress=lambda: None,
            turns=Turns(),
        )

    def new_life(self, epoch: int) -> RankBlocks:
        self.blocks = RankBlocks(rank=R0, model="tiny", epoch=epoch, keeps_rows=True)
        return self.blocks

    async def apply(self, *events: Event, payload: bytes = b"") -> None:
        batch = EventBatch(1.0, 0, list(events))
        await self.keeper.apply(self.blocks, self._seq, batch, payload)
        self._seq += 1

    async def held(self) -> int:
        """Blocks that readers are told of: none while the rank is being written anew."""
        match = (await self.index.match(PROMPT)).get(R0)
        return 0 if match is None else match.tokens // SIZE

    async def is_written(self) -> None:
        async with asyncio.timeout(20):
            while True:
                if not self.keeper.has_unwritten:
                    return
                await asyncio.sleep(0.005)

    async def is_level(self) -> None:
        async with asyncio.timeout(20):
            while True:
                if not self.keeper.is_behind:
                    return
                await asyncio.sleep(0.005)


@pytest.fixture
async def keeping(own_redis: Any) -> AsyncIterator[Callable[..., Awaitable[Kept]]]:
    """Begin a rank's first epoch, with nothing stored, over a Redis with these settings."""
    server = own_redis()
    server.start()
    async with AsyncExitStack() as stack:

        async def begin(**settings: object) -> Kept:
            kept = Kept(server, **settings)
            stack.push_async_callback(kept.index.aclose)
            await kept.keeper.open(kept.blocks)
            return kept

        yield begin


@pytest.fixture
async def kept(keeping: Callable[..., Awaitable[Kept]]) -> Kept:
    return await keeping()


async def test_batches_that_wait_are_written_as_one(kept: Kept) -> None:
    """Net: what came and went among them is not written at all."""
    for number in range(1, 6):
        await kept.apply(stored(number))
    await kept.apply(removed(5))
    before = await kept.held()
    kept.server.command("CONFIG", "RESETSTAT")
    async with asyncio.TaskGroup() as group:
        running = group.create_task(kept.keeper.run())
        await kept.is_written()
        running.cancel()
    stats = kept.server.command("INFO", "commandstats")

    assert (before, await kept.held(), kept.keeper.written_seq) == (0, 4, 5)
    assert "cmdstat_sadd:calls=1," in stats
    assert "cmdstat_srem" not in stats


async def test_long_batch_is_never_written_in_part(kept: Kept) -> None:
    """It is taken in piece by piece, and the one before is due meanwhile.

    A part under the earlier number would be counted again by an indexer that resumes from there.
    """
    blocks = 1500
    hashes = [EngineHash(number) for number in range(2, blocks + 2)]
    tokens = list(range(SIZE, (blocks + 1) * SIZE))
    long = BlockStored(hashes, EngineHash(1), tokens, SIZE, kind="full_attention")
    written: list[int] = []
    kept.keeper.on_changes = lambda changes: written.append(
        sum(len(each.keys) for each in changes if isinstance(each, BlocksHeld))
    )
    async with asyncio.TaskGroup() as group:
        running = group.create_task(kept.keeper.run())
        await asyncio.sleep(0)
        await kept.apply(stored(1))
        await kept.apply(long, payload=b"a" * 9 * blocks)
        await kept.is_written()
        running.cancel()

    assert sum(written) == blocks + 1
    assert set(written) <= {1, blocks, blocks + 1}


async def test_batch_of_few_blocks_is_taken_in_at_once(kept: Kept) -> None:
    """Its tokens alone make it long. Giving way after each such batch would write each by itself."""
    taken_in = kept.apply(stored(1), payload=bytes(5000))
    with pytest.raises(StopIteration):
        taken_in.send(None)


async def test_log_has_the_name_of_now(kept: Kept) -> None:
    """An instance can be renamed while it is followed."""
    kept.keeper.rename("new")
    kept.server.stop()
    await kept.apply(stored(1))
    with capture_logs() as log:
        await kept.keeper.set_trust(Trust.EXACT)

    assert [(each["event"], each["instance"]) for each in log] == [("rank_behind", "new")]


async def test_trust_is_told_after_what_it_speaks_of(kept: Kept) -> None:
    """Whoever reads that a rank is exact finds its blocks there."""
    await kept.apply(stored(1), stored(2))
    await kept.keeper.set_trust(Trust.EXACT)

    assert await kept.held() == 2
    assert not kept.keeper.has_unwritten


async def test_new_epoch_drops_what_the_old_one_left_unwritten(kept: Kept) -> None:
    """It never comes back, not even with the next batch."""
    await kept.apply(stored(1), stored(2))
    await kept.keeper.open(kept.new_life(2))
    assert await kept.held() == 0

    await kept.apply(stored(1))
    await kept.keeper.set_trust(Trust.EXACT)
    assert await kept.held() == 1


async def test_only_so_much_waits_to_be_written(kept: Kept) -> None:
    """Else one script would hold up every lookup: the stream waits for Redis then."""
    large = bytes(65 * 1024)
    await kept.apply(stored(1), payload=large)
    async with asyncio.TaskGroup() as group:
        second = group.create_task(kept.apply(stored(2), payload=large))
        done, _ = await asyncio.wait((second,), timeout=0.05)
        running = group.create_task(kept.keeper.run())
        await second
        await kept.is_written()
        running.cancel()

    assert done == set()
    assert await kept.held() == 2
    assert kept.faults == {}


async def test_broken_redis_holds_nobody_up(kept: Kept) -> None:
    """However much comes: the tables have it, and it is written anew."""
    kept.server.stop()
    large = bytes(65 * 1024)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(kept.keeper.run())
        for number in range(1, 9):
            await kept.apply(stored(number), payload=large)
        await kept.is_written()
        problem = kept.keeper.problem
        kept.server.start()
        async with asyncio.timeout(20):
            while True:
                if not kept.keeper.is_behind:
                    break
                await asyncio.sleep(0.02)
        running.cancel()

    assert "is it running" in (problem or "")
    assert await kept.held() == 8
    assert kept.keeper.problem is None


async def test_index_that_gives_what_was_never_written_is_written_anew(
    keeping: Callable[..., Awaitable[Kept]],
) -> None:
    """Somebody has changed Redis: the tables are right, and all of them goes out again at once."""
    kept = await keeping(heartbeat_s=30.0)  # which would find it, too
    await kept.apply(stored(1))
    async with asyncio.TaskGroup() as group:
        running = group.create_task(kept.keeper.run())
        await kept.is_written()
        stranger = BlocksHeld(group=0, tier=Tier.GPU, keys=[KEYS[1]])
        strange = RankUpdate(rank=R0, model="tiny", epoch=1, seq=1, changes=(stranger,))
        await kept.index.apply(strange)
        promised = await kept.held()

        kept.keeper.doubt()
        kept.keeper.doubt()
        await kept.is_level()
        running.cancel()

    assert (promised, await kept.held(), kept.faults["differs"]) == (2, 1, 1)


async def test_loss_that_a_write_has_found_is_counted_once(
    keeping: Callable[..., Awaitable[Kept]],
) -> None:
    """The heartbeat that waited for that write finds the rank behind, and leaves it to repair."""
    heartbeat_s = 0.05
    kept = await keeping(heartbeat_s=heartbeat_s)
    await kept.apply(stored(1))
    async with asyncio.TaskGroup() as group:
        running = group.create_task(kept.keeper.run())
        await kept.is_written()
        kept.server.command("FLUSHALL")
        kept.server.pause()
        writing = group.create_task(kept.keeper.set_trust(Trust.DEGRADED))
        await asyncio.wait((writing,), timeout=4 * heartbeat_s)
        kept.server.resume()
        await writing
        await kept.is_level()
        running.cancel()

    assert kept.faults == {"lost": 1}


@pytest.mark.parametrize("is_readable", [True, False])
async def test_rank_that_is_still_being_read_is_held_against_nothing(
    keeping: Callable[..., Awaitable[Kept]], is_readable: bool
) -> None:
    """A heartbeat may be due between the claim of a large rank and the tables that are built of it."""
    heartbeat_s = 0.05
    kept = await keeping(heartbeat_s=heartbeat_s)
    await kept.apply(stored(1), stored(2))
    await kept.keeper.set_trust(Trust.EXACT)
    if not is_readable:
        state = kept.server.command("--scan", "--pattern", "*:state").strip()
        kept.server.command("HSET", state, "facts", "abc")
    later = kept.new_keeper()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(later.run())
        record = await later.restore()
        await asyncio.wait((running,), timeout=4 * heartbeat_s)
        running.cancel()

    assert (record is not None) == is_readable
    assert kept.faults == ({} if is_readable else {"lost": 1})


async def test_keys_that_went_missing_are_written_anew(kept: Kept) -> None:
    """Somebody has deleted a set; life and state are there, so only the count tells."""
    await kept.apply(stored(1), stored(2))
    await kept.keeper.set_trust(Trust.EXACT)  # writes what waits
    name = kept.server.command("--scan", "--pattern", f"*:0:{SIZE}:0").strip()
    assert kept.server.command("DEL", name) == "1"
    lost = await kept.held()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(kept.keeper.run())
        async with asyncio.timeout(20):
            while True:
                if await kept.held() == 2:
                    break
                await asyncio.sleep(0.02)
        running.cancel()

    assert (lost, kept.faults["differs"]) == (0, 1)


async def test_index_in_memory_is_never_doubted() -> None:
    """Readers read the tables: there is nothing to write anew."""
    faults: Counter[str] = Counter()
    keeper = RankKeeper(
        index=MemoryIndex(),
        journal=None,
        source=SOURCE,
        faults=faults,
        on_progress=lambda: None,
        turns=Turns(),
    )

    keeper.doubt()

    assert (keeper.is_behind, faults) == (False, {})
