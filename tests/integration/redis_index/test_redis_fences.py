"""Fences: of two who write a rank one is refused, and what is half written isn't seen."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from indexer.core.block_rows import BlockRow, GroupRows, RankFacts
from indexer.core.hashing import Namespace
from indexer.core.index import (
    BlocksHeld,
    GroupKind,
    GroupSpec,
    IndexLostError,
    IndexUnavailableError,
    NotOwnerError,
    Prompt,
    RankUpdate,
    StaleEpochError,
)
from indexer.core.types import BlockKey, EngineHash, InstanceId, RankId, Tier, Trust
from indexer.redis_index.connection import RedisConnection
from indexer.redis_index.keys import model_keys
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


async def test_later_owner_is_never_overwritten(
    index: RedisIndex, other: RedisIndex, update: Update, overlap: Overlap, held: Held
) -> None:
    """The earlier one is refused, whatever it tries, and changes nothing."""
    await index.apply(update(E0, FULL, held(KEYS[:2])))
    await other.restore(E0, MODEL)

    with pytest.raises(NotOwnerError):
        await index.apply(update(E0, held(KEYS[2:5]), seq=1))
    with pytest.raises(NotOwnerError):
        await index.apply(update(E0, FULL, epoch=2))
    with pytest.raises(NotOwnerError):
        await index.restore(E0, MODEL)
    await index.retire(E0)
    await other.apply(update(E0, held(KEYS[2:3]), seq=1))
    assert await overlap(other) == {E0: 12}


async def test_owner_that_retires_a_rank_it_lost_removes_nothing(
    index: RedisIndex, other: RedisIndex, update: Update, overlap: Overlap, held: Held
) -> None:
    """It hasn't noticed yet that another has it."""
    await index.apply(update(E0, FULL, held(KEYS[:2])))
    await other.restore(E0, MODEL)

    await index.retire(E0)
    assert await overlap(other) == {E0: 8}


async def test_older_epoch_of_another_process_is_refused(
    index: RedisIndex, other: RedisIndex, update: Update, held: Held
) -> None:
    """By Redis, not only by memory."""
    await index.apply(update(E0, FULL, held(KEYS[:2]), epoch=5))

    with pytest.raises(StaleEpochError):
        await other.apply(update(E0, FULL, epoch=4))
    assert await other.last_epoch(E0, MODEL) == 5


async def test_what_another_hand_changed_is_noticed(
    index: RedisIndex,
    settings: RedisSettings,
    redis_server: Any,
    update: Update,
    overlap: Overlap,
    held: Held,
) -> None:
    """A lost key, or a server that came back with an older state: the rank is written anew."""
    await index.apply(update(E0, FULL, held(KEYS[:2])))
    state = model_keys(settings.prefix, MODEL).rank(E0).state
    redis_server.command("HSET", state, "seq", "17")

    with pytest.raises(IndexLostError):
        await index.renew(E0)
    with pytest.raises(IndexLostError):
        await index.apply(update(E0, held(KEYS[2:3]), seq=1))
    await index.rewrite(MODEL, Trust.DEGRADED, [update(E0, FULL, held(KEYS[:3]), seq=1)])
    assert await overlap(index) == {E0: 12}
    assert (await index.match(PROMPT))[E0].trust is Trust.DEGRADED


async def test_lost_change_of_trust_is_noticed(
    index: RedisIndex, settings: RedisSettings, redis_server: Any, update: Update, held: Held
) -> None:
    """It has no number of its own: a replica that lagged by just that looks whole otherwise."""
    await index.apply(update(E0, FULL, held(KEYS[:2])))
    keys = model_keys(settings.prefix, MODEL)
    connection = RedisConnection(settings)
    before = await connection.ask("HGETALL", keys.ranks)
    await index.set_trust(E0, Trust.DEGRADED)
    await index.renew(E0)
    await connection.ask("HSET", keys.ranks, *before)
    await connection.aclose()

    with pytest.raises(IndexLostError):
        await index.renew(E0)


async def test_server_that_takes_no_writes_is_noticed_by_a_renewal(
    own_redis: Any, update: Update
) -> None:
    """Without any event: the next heartbeat tells."""
    server = own_redis()
    server.start()
    connection = RedisConnection(server.settings())
    index = RedisIndex(connection)
    await index.apply(update(E0, FULL))
    await index.renew(E0)
    server.command("REPLICAOF", "127.0.0.1", "1")

    with pytest.raises(IndexUnavailableError, match="READONLY"):
        await index.renew(E0)
    await connection.aclose()


async def test_lease_is_extended_once_a_quarter_has_passed(
    index: RedisIndex,
    settings: RedisSettings,
    redis_server: Any,
    update: Update,
    keys_under: KeysUnder,
    held: Held,
) -> None:
    """Each key of the rank, whichever was written to last."""
    await index.apply(update(E0, FULL, held(KEYS[:2])))
    keys = keys_under(redis_server, settings)
    for key in keys:
        redis_server.command("EXPIRE", key, str(int(settings.lease_s * 0.74)))
    await index.renew(E0)

    ttls = [int(redis_server.command("TTL", key)) for key in keys]
    assert all(settings.lease_s - 5 <= ttl <= settings.lease_s for ttl in ttls)


async def test_shorter_lease_reaches_every_key_of_a_rank(
    index: RedisIndex,
    settings: RedisSettings,
    redis_server: Any,
    update: Update,
    keys_under: KeysUnder,
    held: Held,
) -> None:
    """An indexer goes on with less patience; nothing is written, then it is killed."""
    await index.apply(update(E0, FULL, held(KEYS[:2])))
    connection = RedisConnection(replace(settings, lease_s=settings.lease_s - 20))
    assert await RedisIndex(connection).restore(E0, MODEL)
    await connection.aclose()

    ttls = [int(redis_server.command("TTL", key)) for key in keys_under(redis_server, settings)]
    assert ttls
    assert max(ttls) <= settings.lease_s - 20


async def test_key_of_another_type_is_told_and_can_be_deleted(
    index: RedisIndex,
    reader: RedisIndexReader,
    settings: RedisSettings,
    redis_server: Any,
    update: Update,
    held: Held,
) -> None:
    """Somebody else's program uses our prefix."""
    await index.apply(update(E0, FULL, held(KEYS[:2])))
    table = model_keys(settings.prefix, MODEL).ranks
    redis_server.command("SET", table, "theirs")
    with pytest.raises(IndexUnavailableError, match=r"redis\.prefix"):
        await reader.match(PROMPT)
    with pytest.raises(IndexUnavailableError, match=r"redis\.prefix"):
        await index.renew(E0)
    redis_server.command("DEL", table)
    with pytest.raises(IndexLostError):
        await index.renew(E0)
    await index.rewrite(MODEL, Trust.EXACT, [update(E0, FULL, held(KEYS[:2]))])

    assert (await reader.match(PROMPT))[E0].tokens == 2 * SIZE


async def test_rank_is_out_of_sight_while_it_is_written_anew(
    index: RedisIndex, reader: RedisIndexReader, update: Update, overlap: Overlap, held: Held
) -> None:
    """Half a rank would be searched as if it were whole."""
    await index.apply(update(E0, FULL, held(KEYS[:2])))
    seen = []
    parts = [update(E0, FULL), update(E0, held(KEYS[3:5])), update(E0, held(KEYS[:3]))]
    for number in range(1, len(parts) + 1):
        with pytest.raises(asyncio.CancelledError):
            await index.rewrite(MODEL, Trust.EXACT, _cut(parts, number))
        seen.append(await overlap(reader))
    await index.rewrite(MODEL, Trust.EXACT, parts)

    assert seen == [{}, {}, {}]
    assert await overlap(reader) == {E0: 20}


def _cut(parts: Sequence[RankUpdate], number: int) -> Any:
    """The first parts; then the process ends."""
    yield from parts[:number]
    raise asyncio.CancelledError


async def test_half_written_rank_is_not_gone_on_with(
    index: RedisIndex, other: RedisIndex, update: Update, overlap: Overlap, held: Held
) -> None:
    """The next process begins anew."""
    parts = [update(E0, FULL), update(E0, held(KEYS[3:5]))]
    with pytest.raises(asyncio.CancelledError):
        await index.rewrite(MODEL, Trust.EXACT, _cut(parts, 2))

    assert await other.restore(E0, MODEL) is None
    await other.apply(update(E0, FULL, held(KEYS[:1]), epoch=2))
    assert await overlap(other) == {E0: 4}


async def test_withdrawn_rank_gives_no_credit_until_rewritten(
    index: RedisIndex, update: Update, overlap: Overlap, held: Held
) -> None:
    """What couldn't be kept up to date makes room."""
    await index.apply(update(E0, FULL, held(KEYS[:2])))
    await index.withdraw(E0)
    await index.withdraw(E1)
    assert await overlap(index) == {}

    await index.rewrite(MODEL, Trust.EXACT, [update(E0, FULL, held(KEYS[:2]))])
    assert await overlap(index) == {E0: 8}


async def test_write_taken_for_failed_is_sorted_out(
    redis_server: Any, own_redis: Any, update: Update, held: Held
) -> None:
    """It timed out and was applied all the same: written anew, nothing is left of it."""
    server = own_redis()
    server.start()
    connection = RedisConnection(server.settings(write_timeout_s=1.0))
    index = RedisIndex(connection)
    await index.apply(update(E0, FULL, held(KEYS[:2])))
    server.pause()
    with pytest.raises(IndexUnavailableError):
        await index.apply(update(E0, BlocksHeld(0, Tier.CPU, KEYS[:9]), seq=1))
    server.resume()
    with pytest.raises(IndexLostError):
        await index.apply(update(E0, held(KEYS[2:3]), seq=2))
    await index.rewrite(MODEL, Trust.EXACT, [update(E0, FULL, held(KEYS[:3]), seq=2)])
    answer = (await index.match(PROMPT))[E0].tokens_by_tier
    await connection.aclose()

    assert answer == {Tier.GPU: 12}


async def test_restored_record_is_what_was_written(
    index: RedisIndex, other: RedisIndex, held: Held
) -> None:
    """With the last batch's number and digest, and what is known beside the rows."""
    facts = RankFacts(masked=(3,), sized_by_gpu=(0,), orphans=2)
    row = BlockRow(EngineHash(1), KEYS[0], BlockKey(9), True, (1, 0, 0))
    await index.apply(
        RankUpdate(
            rank=E0,
            model=MODEL,
            epoch=4,
            seq=6,
            changes=[FULL, held(KEYS[:1])],
            digest=2**64 - 1,
            rows=[GroupRows(0, [row], [])],
            facts=facts,
        )
    )
    await index.set_trust(E0, Trust.DEGRADED)

    record = await other.restore(E0, MODEL)
    assert record
    assert (record.epoch, record.seq, record.digest) == (4, 6, 2**64 - 1)
    assert (record.trust, record.facts) == (Trust.DEGRADED, facts)
    assert (record.groups, record.rows) == ([FULL], {0: [row]})


async def test_record_that_cannot_be_read_is_begun_anew(
    index: RedisIndex,
    other: RedisIndex,
    settings: RedisSettings,
    redis_server: Any,
    update: Update,
    held: Held,
) -> None:
    """Rows of another version, or damaged ones."""
    await index.apply(update(E0, FULL, held(KEYS[:1])))
    rows = model_keys(settings.prefix, MODEL).rank(E0).rows(1, 0)
    redis_server.command("HSET", rows, "hash", "short")

    with pytest.raises(IndexLostError):
        await other.restore(E0, MODEL)


async def test_facts_are_written_when_they_change(
    index: RedisIndex,
    settings: RedisSettings,
    redis_server: Any,
    update: Update,
    held: Held,
) -> None:
    """Not with every batch: of a rank with many adapters they are long."""
    state = model_keys(settings.prefix, MODEL).rank(E0).state

    def are_written() -> bool:
        length: str = redis_server.command("HSTRLEN", state, "facts")
        redis_server.command("HSET", state, "facts", "x")
        return int(length) > 1

    known = RankFacts(adapters=((7, 1),))
    await index.apply(replace(update(E0, FULL, held(KEYS[:1])), facts=known))
    assert are_written()
    await index.apply(replace(update(E0, held(KEYS[1:2]), seq=1), facts=known))
    await index.apply(
        replace(update(E0, held(KEYS[2:3]), seq=2), facts=RankFacts(adapters=((7, 1),)))
    )
    assert not are_written()
    await index.apply(replace(update(E0, seq=3), facts=RankFacts(adapters=((7, 2),))))
    assert are_written()
    await index.apply(replace(update(E0, epoch=2), facts=RankFacts(adapters=((7, 2),))))
    assert are_written()
