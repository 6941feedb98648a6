"""Readers of the index in Redis: what a lookup costs, and what it is told."""

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from balancer.core.fleet.snapshot import Fleet, Instance, Role
from balancer.core.load.local_ledger import LocalLedger
from balancer.core.request import Endpoint, GenerateRequest, PromptView
from balancer.core.routing.policies import named_policy
from balancer.core.settings.routing import RoutingSettings
from balancer.routing.router import Router
from indexer.core.hashing import Namespace
from indexer.core.index import BlocksHeld, GroupKind, GroupSpec, Prompt, RankUpdate
from indexer.core.model_cards import ServedModels
from indexer.core.types import BlockKey, InstanceId, RankId, Trust
from indexer.redis_index.connection import RedisConnection
from indexer.redis_index.keys import model_keys
from indexer.redis_index.reader import RedisIndexReader
from indexer.redis_index.redis_index import RedisIndex
from indexer.redis_index.settings import RedisSettings

Update = Callable[..., RankUpdate]
Overlap = Callable[..., Coroutine[Any, Any, dict[RankId, int]]]
Held = Callable[[Sequence[BlockKey]], BlocksHeld]

SIZE = 4
MODEL = "secret-model-name"
E0, E1 = (RankId(InstanceId(f"http://engine-{each}:8000"), 0) for each in range(2))
FULL = GroupSpec(group=0, kind=GroupKind.FULL, block_size=SIZE)
PROMPT = Prompt(Namespace(model=MODEL, lora="sql", cache_salt="tenant"), range(41))
KEYS = PROMPT.keys(SIZE)


async def test_reader_sees_every_change_with_its_next_lookup(
    index: RedisIndex, reader: RedisIndexReader, update: Update, overlap: Overlap, held: Held
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
    index: RedisIndex, reader: RedisIndexReader, own_redis: Any, update: Update, held: Held
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


async def test_forgotten_scripts_are_sent_again(
    index: RedisIndex, redis_server: Any, update: Update, overlap: Overlap, held: Held
) -> None:
    """A restarted Redis has none."""
    await index.apply(update(E0, FULL))
    assert await overlap(index) == {E0: 0}
    redis_server.command("SCRIPT", "FLUSH")

    await index.apply(update(E0, held(KEYS[:3]), seq=1))
    assert await overlap(index) == {E0: 12}


async def test_dead_connections_cost_no_lookup(
    index: RedisIndex,
    reader: RedisIndexReader,
    redis_server: Any,
    update: Update,
    overlap: Overlap,
    held: Held,
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
    index: RedisIndex, redis_server: Any, update: Update, overlap: Overlap, held: Held
) -> None:
    """It is sent again, and the fence would tell if it had been applied."""
    await index.apply(update(E0, FULL))
    for seq in range(1, 10):
        redis_server.command("CLIENT", "KILL", "TYPE", "normal")
        await index.apply(update(E0, held(KEYS[seq - 1 : seq]), seq=seq))

    assert await overlap(index) == {E0: 36}


async def test_cancelled_lookups_leave_no_answer_behind(
    index: RedisIndex, reader: RedisIndexReader, update: Update, overlap: Overlap, held: Held
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
    other: RedisIndex, redis_server: Any, update: Update, overlap: Overlap
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
    index: RedisIndex,
    reader: RedisIndexReader,
    settings: RedisSettings,
    redis_server: Any,
    update: Update,
    overlap: Overlap,
    held: Held,
) -> None:
    """An entry of something else costs nobody a lookup."""
    table = model_keys(settings.prefix, MODEL).ranks
    redis_server.command("HSET", table, "ffff", "not a description")
    await index.apply(update(E0, FULL, held(KEYS[:1])))

    assert await overlap(reader) == {E0: 4}


async def test_only_so_many_models_are_kept_in_mind(
    index: RedisIndex, reader: RedisIndexReader, update: Update, held: Held
) -> None:
    """Names that no rank serves aren't, whoever asks for them."""
    await index.apply(update(E0, FULL, held(KEYS[:1])))
    await reader.match(PROMPT)
    for number in range(300):
        await reader.match(Prompt(Namespace(model=f"model-{number}"), range(5)))

    assert len(reader._layouts) == 1


async def test_f27_ranks_that_the_fleet_does_not_have_are_ignored_and_counted(
    index: RedisIndex,
    update: Update,
    held: Held,
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
