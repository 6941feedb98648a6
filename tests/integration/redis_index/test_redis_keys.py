"""Keys of the index in Redis: what they tell, how long they live, and what they cost others."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
from redis.crc import key_slot

from indexer.core.block_rows import BlockRow, GroupRows
from indexer.core.hashing import Namespace
from indexer.core.index import (
    BlocksDropped,
    BlocksHeld,
    GroupKind,
    GroupSpec,
    NotOwnerError,
    Prompt,
    RankUpdate,
)
from indexer.core.types import BlockKey, EngineHash, InstanceId, RankId, Tier, Trust
from indexer.redis_index.connection import RedisConnection
from indexer.redis_index.packing import pack_rows, unpack_row
from indexer.redis_index.reader import RedisIndexReader
from indexer.redis_index.redis_index import RedisIndex
from indexer.redis_index.settings import RedisSettings

Update = Callable[..., RankUpdate]
Overlap = Callable[..., Coroutine[Any, Any, dict[RankId, int]]]
KeysUnder = Callable[[Any, RedisSettings], list[str]]
Held = Callable[[Sequence[BlockKey]], BlocksHeld]

SIZE = 4
MODEL = "secret-model-name"
E0, E1 = (RankId(InstanceId(f"http://engine-{each}:8000"), 0) for each in range(2))
FULL = GroupSpec(group=0, kind=GroupKind.FULL, block_size=SIZE)
PROMPT = Prompt(Namespace(model=MODEL, lora="sql", cache_salt="tenant"), range(41))
KEYS = PROMPT.keys(SIZE)


# Keys.


async def test_keys_tell_no_names_and_live_in_one_slot(
    index: RedisIndex, settings: RedisSettings, redis_server: Any, keys_under: KeysUnder, held: Held
) -> None:
    """Neither model, adapter, salt nor address; one slot per model, so that scripts may run."""
    row = BlockRow(EngineHash(1), KEYS[0], KEYS[1], True, (1, 0, 0))
    rows = [GroupRows(0, [row], [])]
    change = RankUpdate(
        rank=E0, model=MODEL, epoch=1, seq=0, changes=[FULL, held(KEYS[:2])], rows=rows
    )
    await index.apply(change)

    keys = keys_under(redis_server, settings)
    assert len(keys) == 6
    assert all(key.startswith(f"{settings.prefix}:1:{{") for key in keys)
    assert not any(word in key for key in keys for word in ("secret", "sql", "tenant", "engine"))
    assert len({key_slot(key.encode()) for key in keys}) == 1


async def test_every_key_has_a_lease(
    index: RedisIndex,
    settings: RedisSettings,
    redis_server: Any,
    update: Update,
    keys_under: KeysUnder,
    held: Held,
) -> None:
    """What a dead indexer leaves behind leaves by itself."""
    await index.apply(update(E0, FULL, held(KEYS[:2])))
    await index.set_trust(E0, Trust.DEGRADED)
    await index.renew(E0)

    ttls = [int(redis_server.command("TTL", key)) for key in keys_under(redis_server, settings)]
    assert ttls
    assert all(settings.lease_s - 5 <= ttl <= settings.lease_s for ttl in ttls)


@pytest.mark.parametrize(
    "row",
    [
        BlockRow(EngineHash(2**64 - 1), BlockKey(2**64 - 1), BlockKey(0), True, (1, 0, 65_535)),
        BlockRow(EngineHash(0), BlockKey(1), BlockKey(2), False, (0, 0, 0)),
        BlockRow(EngineHash(5), None, None, False, (3, 2, 1)),
    ],
)
def test_rows_come_back_as_they_were(row: BlockRow) -> None:
    """Whatever is in them."""
    packed = pack_rows([row])

    assert unpack_row(packed[:8], packed[8:]) == row


def test_more_copies_than_fit_are_many() -> None:
    """No engine has as many; a row never fails for it."""
    row = BlockRow(EngineHash(5), None, None, False, (70_000, 0, 0))
    packed = pack_rows([row])

    assert unpack_row(packed[:8], packed[8:]).copies == (65_535, 0, 0)


# Settings.


@pytest.mark.parametrize(
    ("chosen", "word"),
    [
        pytest.param({"url": "http://127.0.0.1"}, "url", id="scheme"),
        pytest.param({"url": "redis://:secret@127.0.0.1"}, "password_env", id="secret-in-url"),
        pytest.param({"lease_s": 2.0}, "lease_s", id="lease-too-short"),
    ],
)
def test_settings_that_cannot_work_are_refused(chosen: dict[str, Any], word: str) -> None:
    """By the key to change."""
    with pytest.raises(ValueError, match=word):
        RedisSettings(**chosen)


def test_missing_password_names_its_variable() -> None:
    """Before anything connects."""
    with pytest.raises(ValueError, match="KVLB_NOT_SET"):
        RedisConnection(RedisSettings(password_env="KVLB_NOT_SET"))  # noqa: S106 - a name


# Many ranks.


@pytest.mark.timeout(60)
async def test_256_ranks_of_a_dead_indexer_leave_with_their_lease(
    redis_server: Any,
    other: RedisIndex,
    update: Update,
    overlap: Overlap,
    keys_under: KeysUnder,
    held: Held,
) -> None:
    """Every key of every rank; a lookup shows none of them from then on."""
    settings = redis_server.settings(lease_s=5, heartbeat_s=0.5)
    connection = RedisConnection(settings)
    index, reader = RedisIndex(connection), RedisIndexReader(connection)
    ranks = [RankId(E0.instance, number) for number in range(256)]
    async with asyncio.TaskGroup() as group:
        for rank in ranks:
            group.create_task(index.apply(update(rank, FULL, held(KEYS[:3]))))
    before = await overlap(reader)
    async with asyncio.timeout(20):
        while True:
            if not keys_under(redis_server, settings):
                break
            await asyncio.sleep(0.1)
    after = await overlap(reader)
    await connection.aclose()

    assert before == dict.fromkeys(ranks, 12)
    assert after == {}


async def test_256_ranks_change_hands_without_counting_twice(
    index: RedisIndex, other: RedisIndex, update: Update, overlap: Overlap, held: Held
) -> None:
    """Another indexer takes them all, the first lets go, and takes them back."""
    ranks = [RankId(E0.instance, number) for number in range(256)]
    for rank in ranks:
        await index.apply(update(rank, FULL, held(KEYS[:3])))
    for rank in ranks:
        assert await other.last_epoch(rank, MODEL) == 1
    for rank in ranks:
        with pytest.raises(NotOwnerError):
            await index.apply(update(rank, held(KEYS[3:5]), seq=1))
    await other.release()
    for rank in ranks:
        assert await index.restore(rank, MODEL)
        await index.apply(update(rank, BlocksDropped(0, Tier.GPU, KEYS[2:3]), seq=1))

    assert await overlap(index) == dict.fromkeys(ranks, 8)


# Others on the same server.


@pytest.mark.timeout(60)
async def test_f16_clearing_a_rank_blocks_nobody(
    own_redis: Any, update: Update, overlap: Overlap, held: Held
) -> None:
    """F16: half a million rows over eight ranks; one is cleared while lookups go on."""
    server = own_redis()
    server.start()
    connection = RedisConnection(server.settings())
    index = RedisIndex(connection)
    server.command("SET", "somebody-elses", "1")
    ranks = [RankId(InstanceId("http://engine:8000"), each) for each in range(8)]
    blocks = 62_500
    for rank in ranks:
        await index.apply(update(rank, FULL, held(KEYS[:5])))
        for part in range(10):
            keys = [BlockKey(part * 10_000 + each) for each in range(blocks // 10)]
            await index.apply(update(rank, held(keys)))
    # The clock on the wall: a busy machine must not fail this. Who frees is asked below.
    server.command("CONFIG", "SET", "slowlog-log-slower-than", "500000")
    server.command("SLOWLOG", "RESET")
    server.command("CONFIG", "RESETSTAT")
    async with asyncio.TaskGroup() as group:
        group.create_task(index.retire(ranks[0]))
        for _ in range(50):
            await index.match(PROMPT)
    stats = server.command("INFO", "commandstats")
    slow = server.command("SLOWLOG", "LEN")
    freed = server.command("INFO", "stats")
    left = await overlap(index)
    kept = server.command("GET", "somebody-elses")
    await connection.aclose()

    assert set(left) == set(ranks[1:])
    assert (slow, kept) == ("0", "1")
    assert "lazyfreed_objects:0" not in freed  # by another thread
    commands = {line.split(":")[0] for line in stats.split() if line.startswith("cmdstat_")}
    slow_ones = ("keys", "flushdb", "flushall", "scan", "del")
    assert not commands & {f"cmdstat_{each}" for each in slow_ones}
