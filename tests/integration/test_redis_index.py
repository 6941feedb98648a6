"""What only the index in Redis has: keys, fences, outdated readers, and what it costs others."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from msgspec.structs import replace
from redis.crc import key_slot

from balancer.core.fleet.snapshot import Fleet, Instance, Role
from balancer.core.load.local_ledger import LocalLedger
from balancer.core.request import Endpoint, GenerateRequest, PromptView
from balancer.core.routing.policies import named_policy
from balancer.core.settings.routing import RoutingSettings
from balancer.routing.router import Router
from indexer.core.block_rows import BlockRow, GroupRows, RankFacts
from indexer.core.hashing import Namespace
from indexer.core.index import (
    BlocksDropped,
    BlocksHeld,
    Change,
    GroupKind,
    GroupSpec,
    IndexLostError,
    IndexUnavailableError,
    NotOwnerError,
    Prompt,
    RankUpdate,
    StaleEpochError,
)
from indexer.core.model_cards import ServedModels
from indexer.core.types import BlockKey, EngineHash, InstanceId, RankId, Tier, Trust
from indexer.redis_index.connection import RedisConnection
from indexer.redis_index.keys import model_keys
from indexer.redis_index.packing import pack_rows, unpack_row
from indexer.redis_index.reader import RedisIndexReader
from indexer.redis_index.redis_index import RedisIndex
from indexer.redis_index.settings import RedisSettings

SIZE = 4
MODEL = "secret-model-name"
E0, E1 = (RankId(InstanceId(f"http://engine-{each}:8000"), 0) for each in range(2))
FULL = GroupSpec(group=0, kind=GroupKind.FULL, block_size=SIZE)
PROMPT = Prompt(Namespace(model=MODEL, lora="sql", cache_salt="tenant"), range(41))
KEYS = PROMPT.keys(SIZE)


def update(rank: RankId, *changes: Change, epoch: int = 1, seq: int = 0) -> RankUpdate:
    return RankUpdate(rank=rank, model=MODEL, epoch=epoch, seq=seq, changes=changes)


def held(blocks: Sequence[BlockKey]) -> BlocksHeld:
    return BlocksHeld(0, Tier.GPU, blocks)


@pytest.fixture
def settings(redis_server: Any) -> RedisSettings:
    chosen: RedisSettings = redis_server.settings()
    return chosen


@pytest.fixture
async def index(settings: RedisSettings) -> AsyncIterator[RedisIndex]:
    index = RedisIndex(RedisConnection(settings))
    yield index
    await index.aclose()


@pytest.fixture
async def other(settings: RedisSettings) -> AsyncIterator[RedisIndex]:
    """Another process on the same Redis."""
    index = RedisIndex(RedisConnection(settings))
    yield index
    await index.aclose()


@pytest.fixture
async def reader(settings: RedisSettings) -> AsyncIterator[RedisIndexReader]:
    """A balancer's."""
    connection = RedisConnection(settings)
    yield RedisIndexReader(connection)
    await connection.aclose()


async def overlap(reader: RedisIndexReader | RedisIndex) -> dict[RankId, int]:
    return {rank: match.tokens for rank, match in (await reader.match(PROMPT)).items()}


def keys_under(redis_server: Any, settings: RedisSettings) -> list[str]:
    found: str = redis_server.command("--scan", "--pattern", f"{settings.prefix}:*")
    return found.split()


# Keys.


async def test_keys_tell_no_names_and_live_in_one_slot(
    index: RedisIndex, settings: RedisSettings, redis_server: Any
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
    index: RedisIndex, settings: RedisSettings, redis_server: Any
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


# Readers.


async def test_reader_sees_every_change_with_its_next_lookup(
    index: RedisIndex, reader: RedisIndexReader
) -> None:
    """It keeps the table of ranks between lookups, and is told when that is outdated."""
    assert await overlap(reader) == {}
    await index.apply(update(E0, FULL, held(KEYS[:3])))
    assert await overlap(reader) == {E0: 12}
    await index.apply(update(E1, FULL, held(KEYS[:1])))
    assert await overlap(reader) == {E0: 12, E1: 4}
    await index.apply(update(E0, epoch=2))
    assert await overlap(reader) == {E0: 0, E1: 4}
    await index.set_trust(E1, Trust.DEGRADED)
    assert (await reader.match(PROMPT))[E1].trust is Trust.DEGRADED
    await index.retire(E1)
    assert await overlap(reader) == {E0: 0}


async def test_lookup_is_one_command(
    index: RedisIndex, reader: RedisIndexReader, own_redis: Any
) -> None:
    """However many ranks and blocks; changes of blocks don't make it two."""
    server = own_redis()
    server.start()
    connection = RedisConnection(server.settings())
    index, reader = RedisIndex(connection), RedisIndexReader(connection)
    for rank in (E0, E1):
        await index.apply(update(rank, FULL, held(KEYS[:3])))
    await reader.match(PROMPT)
    server.command("CONFIG", "RESETSTAT")
    for seq in range(1, 6):
        await index.apply(update(E0, held(KEYS[seq : seq + 2]), seq=seq))
        await reader.match(PROMPT)
    stats = server.command("INFO", "commandstats")
    await connection.aclose()

    assert "cmdstat_evalsha:calls=10," in stats
    assert "cmdstat_eval:" not in stats


async def test_forgotten_scripts_are_sent_again(index: RedisIndex, redis_server: Any) -> None:
    """A restarted Redis has none."""
    await index.apply(update(E0, FULL))
    assert await overlap(index) == {E0: 0}
    redis_server.command("SCRIPT", "FLUSH")

    await index.apply(update(E0, held(KEYS[:3]), seq=1))
    assert await overlap(index) == {E0: 12}


async def test_dead_connections_cost_no_lookup(
    index: RedisIndex, reader: RedisIndexReader, redis_server: Any
) -> None:
    """Redis closes what is idle; each round several connections, noticed or not yet noticed."""
    await index.apply(update(E0, FULL, held(KEYS[:3])))
    answers = []
    for _ in range(20):
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(overlap(reader)) for _ in range(8)]
        answers += [task.result() for task in asked]
        redis_server.command("CLIENT", "KILL", "TYPE", "normal")
        answers.append(await overlap(reader))

    assert answers == 180 * [{E0: 12}]


async def test_connection_that_breaks_under_a_write_costs_no_rewrite(
    index: RedisIndex, redis_server: Any
) -> None:
    """It is sent again, and the fence would tell if it had been applied."""
    await index.apply(update(E0, FULL))
    for seq in range(1, 10):
        redis_server.command("CLIENT", "KILL", "TYPE", "normal")
        await index.apply(update(E0, held(KEYS[seq - 1 : seq]), seq=seq))

    assert await overlap(index) == {E0: 36}


async def test_cancelled_lookups_leave_no_answer_behind(
    index: RedisIndex, reader: RedisIndexReader
) -> None:
    """A deadline that cuts a lookup short never gives its answer to the next one."""
    other = Prompt(Namespace(model="other"), range(41))
    await index.apply(update(E0, FULL, held(KEYS[:3])))
    draw = random.Random(1)  # noqa: S311 - a test's dice
    for _ in range(300):
        try:
            async with asyncio.timeout(draw.random() * 0.001):
                await reader.match(other if draw.random() < 0.5 else PROMPT)
        except TimeoutError:
            pass

    assert await overlap(reader) == {E0: 12}
    assert await reader.match(other) == {}


async def test_rank_that_no_one_renews_is_swept_out_of_the_table(
    other: RedisIndex, redis_server: Any
) -> None:
    """Another rank's owner does it; the reader doesn't show it even before."""
    settings = redis_server.settings(lease_s=2.0, heartbeat_s=0.1)
    connection = RedisConnection(settings)
    now_s = 0.0
    index = RedisIndex(connection, clock=lambda: now_s)
    await index.apply(update(E0, FULL))
    await index.apply(update(E1, FULL))
    async with asyncio.timeout(20):
        while E1 in await overlap(index):
            await index.renew(E0)
            await asyncio.sleep(0.02)
    table = model_keys(settings.prefix, MODEL).ranks
    before = redis_server.command("HLEN", table)
    now_s = 10.0
    await index.renew(E0)
    after = redis_server.command("HLEN", table)
    await connection.aclose()

    assert (before, after) == ("2", "1")


async def test_table_of_a_version_that_cannot_be_read_is_left_out(
    index: RedisIndex, reader: RedisIndexReader, settings: RedisSettings, redis_server: Any
) -> None:
    """An entry of something else costs nobody a lookup."""
    table = model_keys(settings.prefix, MODEL).ranks
    redis_server.command("HSET", table, "ffff", "not a description")
    await index.apply(update(E0, FULL, held(KEYS[:1])))

    assert await overlap(reader) == {E0: 4}


async def test_only_so_many_models_are_kept_in_mind(
    index: RedisIndex, reader: RedisIndexReader
) -> None:
    """Names that no rank serves aren't, whoever asks for them."""
    await index.apply(update(E0, FULL, held(KEYS[:1])))
    await reader.match(PROMPT)
    for number in range(300):
        await reader.match(Prompt(Namespace(model=f"model-{number}"), range(5)))

    assert len(reader._layouts) == 1


async def test_f27_ranks_that_the_fleet_does_not_have_are_ignored_and_counted(
    index: RedisIndex,
) -> None:
    """F27 (b): rows owned by a ghost."""
    ghost = RankId(InstanceId("http://ghost:1"), 0)
    await index.apply(update(ghost, FULL, held(KEYS[:9])))
    await index.apply(update(E0, FULL))
    router = Router(
        index=index,
        ledger=LocalLedger(lambda: 0.0),
        policy=named_policy("kvlb"),
        settings=RoutingSettings(lookup_timeout_s=5.0),
        random=lambda: 0.5,
        clock=lambda: 0.0,
    )
    models = ServedModels(base=MODEL, aliases=frozenset({MODEL}), adapters=frozenset(), cards=())
    known = Instance(
        id=E0.instance, alias="m0", role=Role.MIXED, models=models, connector="none", healthy=True
    )
    asked = GenerateRequest(
        request_id="r",
        endpoint=Endpoint.COMPLETIONS,
        model=MODEL,
        base_model=MODEL,
        lora=None,
        body={},
        raw_body=b"",
        headers=(),
    )
    view = PromptView(prompts=(PROMPT,))
    with await router.route(Fleet(instances=(known,)), asked, view) as route:
        chosen = route.plan.decode.candidate.rank

    assert (chosen, router.unknown_ranks) == (E0, 1)


# Fences.


async def test_later_owner_is_never_overwritten(index: RedisIndex, other: RedisIndex) -> None:
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
    index: RedisIndex, other: RedisIndex
) -> None:
    """It hasn't noticed yet that another has it."""
    await index.apply(update(E0, FULL, held(KEYS[:2])))
    await other.restore(E0, MODEL)

    await index.retire(E0)
    assert await overlap(other) == {E0: 8}


async def test_older_epoch_of_another_process_is_refused(
    index: RedisIndex, other: RedisIndex
) -> None:
    """By Redis, not only by memory."""
    await index.apply(update(E0, FULL, held(KEYS[:2]), epoch=5))

    with pytest.raises(StaleEpochError):
        await other.apply(update(E0, FULL, epoch=4))
    assert await other.last_epoch(E0, MODEL) == 5


async def test_what_another_hand_changed_is_noticed(
    index: RedisIndex, settings: RedisSettings, redis_server: Any
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
    index: RedisIndex, settings: RedisSettings, redis_server: Any
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


async def test_server_that_takes_no_writes_is_noticed_by_a_renewal(own_redis: Any) -> None:
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
    index: RedisIndex, settings: RedisSettings, redis_server: Any
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
    index: RedisIndex, settings: RedisSettings, redis_server: Any
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
    index: RedisIndex, reader: RedisIndexReader, settings: RedisSettings, redis_server: Any
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
    index: RedisIndex, reader: RedisIndexReader
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


async def test_half_written_rank_is_not_gone_on_with(index: RedisIndex, other: RedisIndex) -> None:
    """The next process begins anew."""
    parts = [update(E0, FULL), update(E0, held(KEYS[3:5]))]
    with pytest.raises(asyncio.CancelledError):
        await index.rewrite(MODEL, Trust.EXACT, _cut(parts, 2))

    assert await other.restore(E0, MODEL) is None
    await other.apply(update(E0, FULL, held(KEYS[:1]), epoch=2))
    assert await overlap(other) == {E0: 4}


async def test_withdrawn_rank_gives_no_credit_until_rewritten(index: RedisIndex) -> None:
    """What couldn't be kept up to date makes room."""
    await index.apply(update(E0, FULL, held(KEYS[:2])))
    await index.withdraw(E0)
    await index.withdraw(E1)
    assert await overlap(index) == {}

    await index.rewrite(MODEL, Trust.EXACT, [update(E0, FULL, held(KEYS[:2]))])
    assert await overlap(index) == {E0: 8}


async def test_write_taken_for_failed_is_sorted_out(redis_server: Any, own_redis: Any) -> None:
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


async def test_restored_record_is_what_was_written(index: RedisIndex, other: RedisIndex) -> None:
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
    index: RedisIndex, other: RedisIndex, settings: RedisSettings, redis_server: Any
) -> None:
    """Rows of another version, or damaged ones."""
    await index.apply(update(E0, FULL, held(KEYS[:1])))
    rows = model_keys(settings.prefix, MODEL).rank(E0).rows(1, 0)
    redis_server.command("HSET", rows, "hash", "short")

    assert await other.restore(E0, MODEL) is None


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
    redis_server: Any, other: RedisIndex
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
    index: RedisIndex, other: RedisIndex
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
async def test_f16_clearing_a_rank_blocks_nobody(own_redis: Any) -> None:
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
