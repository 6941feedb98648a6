"""An indexer over a real Redis: it ends and another goes on, two run at once, Redis fails (X1)."""

import asyncio
import gzip
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from structlog.testing import capture_logs

from indexer.config import InstanceSource
from indexer.core.hashing import Namespace
from indexer.core.index import (
    BlockIndex,
    IndexUnavailableError,
    NotOwnerError,
    Prompt,
    RankUpdate,
)
from indexer.core.rank_status import RankStatus
from indexer.core.types import InstanceId, RankId, Trust
from indexer.redis_index.connection import RedisConnection
from indexer.redis_index.reader import RedisIndexReader
from indexer.redis_index.redis_index import RedisIndex
from indexer.redis_index.settings import RedisSettings
from indexer.status import IndexerCollector
from kvlb.index_backend import open_index

CAPTURES = Path(__file__).parent.parent / "captures"
BLOCK_SIZE = 4
E0 = "http://e0:8000"
R0 = RankId(InstanceId(E0), 0)
PROMPT = Prompt(Namespace(model="tiny"), range(100 * BLOCK_SIZE))

Opening = Callable[[RedisSettings], AbstractAsyncContextManager[RedisIndex]]
Eventually = Callable[[Callable[[], object]], Awaitable[None]]


@pytest.fixture
def opening() -> Opening:
    """Make an index that is closed when its block ends."""

    @asynccontextmanager
    async def run(settings: RedisSettings) -> Any:
        index = RedisIndex(RedisConnection(settings))
        try:
            yield index
        finally:
            await index.aclose()

    return run


def stored(*hashes: int, parent: int | None = None, first: int = 0) -> dict[str, Any]:
    """Blocks number `first` and on of the one prompt that all tests use."""
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": list(range(first * BLOCK_SIZE, (first + len(hashes)) * BLOCK_SIZE)),
        "block_size": BLOCK_SIZE,
    }


def removed(*hashes: int) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU"}


def source(publisher: Any, *, replay: bool = True, model: str = "tiny") -> InstanceSource:
    return InstanceSource(
        url=E0,
        events=publisher.events,
        replay=publisher.replay if replay else None,
        model=model,
        ranks=1,
    )


async def held(index: BlockIndex | RedisIndexReader) -> int | None:
    """Blocks of the prompt that the rank is credited with; None: it isn't there."""
    match = (await index.match(PROMPT)).get(R0)
    return None if match is None else match.tokens // BLOCK_SIZE


@pytest.fixture
def becomes() -> Callable[[RedisIndex, int | None], Awaitable[None]]:
    """Wait, with a deadline, until the prompt's overlap is so many blocks."""

    async def wait(index: RedisIndex, blocks: int | None) -> None:
        async with asyncio.timeout(20):
            while True:
                try:
                    if await held(index) == blocks:
                        return
                except IndexUnavailableError:
                    pass
                await asyncio.sleep(0.01)

    return wait


# An indexer ends, another goes on.


def frames_of(capture: str) -> Iterator[bytes]:
    """As far as the cache is well filled: the recording ends with a reset."""
    with gzip.open(CAPTURES / f"{capture}.events.jsonl.gz", "rt") as lines:
        for line in islice(lines, 106):
            yield bytes.fromhex(json.loads(line)["frames"][2])


def prompts_of(capture: str) -> list[Prompt]:
    """The first hundred prompts that were sent as token ids."""
    prompts = []
    with gzip.open(CAPTURES / f"{capture}.requests.jsonl.gz", "rt") as lines:
        for line in lines:
            ids = (json.loads(line).get("body") or {}).get("prompt")
            if isinstance(ids, list) and ids and isinstance(ids[0], int):
                prompts.append(Prompt(Namespace(model="tiny"), ids))
    return prompts[:100]


async def test_restarted_indexer_knows_what_the_old_one_knew(
    publishing: Any, indexing: Any, opening: Opening, redis_server: Any
) -> None:
    """A hundred recorded prompts of a hybrid model: the same overlaps, with no traffic between."""
    settings = redis_server.settings()
    prompts = prompts_of("i-hybrid-swa")
    answers: list[list[dict[RankId, int]]] = []
    statuses: list[RankStatus] = []
    async with publishing() as engine:
        for payload in frames_of("i-hybrid-swa"):
            engine.publish_payload(payload, drop=True)
        last = engine.next_seq - 1
        for _ in range(2):
            async with (
                opening(settings) as index,
                indexing(source(engine), index=index) as (service, _),
            ):
                statuses.append(await service.caught_up(R0, last))
                answers.append(
                    [
                        {rank: match.tokens for rank, match in (await index.match(each)).items()}
                        for each in prompts
                    ]
                )

    assert len(prompts) == 100
    assert answers[0] == answers[1]
    assert sum(answer[R0] > 0 for answer in answers[0]) > 20
    assert [each.epoch_reason for each in statuses] == ["started", "resumed"]
    assert statuses[1].trust is Trust.EXACT


async def test_resumed_rank_goes_on_in_its_epoch(
    publishing: Any, indexing: Any, opening: Opening, redis_server: Any
) -> None:
    """What was published meanwhile comes by replay; copies and parents are as they were."""
    settings = redis_server.settings()
    async with publishing() as engine:
        async with (
            opening(settings) as index,
            indexing(source(engine), index=index) as (service, _),
        ):
            await engine.subscribed()
            engine.publish(stored(1, 2))
            engine.publish(stored(1, 2))
            before = await service.caught_up(R0, 1)
        engine.publish(removed(2))
        engine.publish(stored(3, parent=2, first=2))
        async with (
            opening(settings) as index,
            indexing(source(engine), index=index) as (service, _),
        ):
            after = await service.caught_up(R0, 3)
            assert await held(index) == 3
            engine.publish(removed(2))
            await service.caught_up(R0, 4)
            assert await held(index) == 1

    assert (after.epoch, after.epoch_reason) == (before.epoch, "resumed")
    assert engine.asked[-1] == 1


async def test_resumed_rank_of_a_restarted_engine_begins_anew(
    publishing: Any, indexing: Any, opening: Opening, redis_server: Any
) -> None:
    """Replay contradicts what was kept: nothing of it counts."""
    settings = redis_server.settings()
    async with publishing() as engine:
        async with (
            opening(settings) as index,
            indexing(source(engine), index=index) as (service, _),
        ):
            await engine.subscribed()
            engine.publish(stored(1, 2, 3))
            # What nobody may believe yet isn't gone on with.
            before = await service.until(
                R0, lambda now: now.last_seq == 0 and now.trust is Trust.EXACT
            )
        await engine.restart()
        engine.publish(stored(1), drop=True)
        async with (
            opening(settings) as index,
            indexing(source(engine), index=index) as (service, _),
        ):
            after = await service.until(
                R0, lambda now: now.epoch_reason == "resume_contradicted" and now.last_seq == 0
            )
            assert await held(index) == 1

    assert after.epoch > before.epoch


async def test_resumed_rank_that_nothing_vouches_for_is_degraded(
    publishing: Any, indexing: Any, opening: Opening, redis_server: Any
) -> None:
    """An engine without a replay endpoint: it keeps its blocks, and says so."""
    settings = redis_server.settings()
    async with publishing() as engine:
        async with (
            opening(settings) as index,
            indexing(source(engine, replay=False), index=index) as (service, _),
        ):
            await engine.subscribed()
            engine.publish(stored(1, 2))
            await service.caught_up(R0, 0)
        async with (
            opening(settings) as index,
            indexing(source(engine, replay=False), index=index) as (service, _),
        ):
            status = await service.until(R0, lambda now: now.trust is Trust.DEGRADED)
            assert await held(index) == 2

    assert (status.trust, status.trust_reason) == (Trust.DEGRADED, "resume_unverified")


async def test_epoch_that_opened_after_a_restart_is_newer(
    publishing: Any, indexing: Any, opening: Opening, redis_server: Any
) -> None:
    """An engine whose events nobody had seen yet: nothing to resume, no stale epoch."""
    settings = redis_server.settings()
    async with publishing() as engine:
        statuses = []
        for _ in range(2):
            async with (
                opening(settings) as index,
                indexing(source(engine), index=index) as (service, _),
            ):
                statuses.append(await service.until(R0, lambda now: now.trust is Trust.EXACT))

    assert statuses[1].epoch > statuses[0].epoch
    assert statuses[1].counts.failures == 0


# Two indexers.


async def test_later_of_two_indexers_writes_and_the_earlier_says_so(
    publishing: Any, indexing: Any, opening: Opening, redis_server: Any
) -> None:
    """Nothing is counted twice: one removal takes the block."""
    settings = redis_server.settings(heartbeat_s=0.05)
    async with (
        publishing() as engine,
        opening(settings) as first,
        opening(settings) as second,
        indexing(source(engine), index=first) as (early, _),
    ):
        await engine.subscribed()
        engine.publish(stored(1, 2))
        await early.caught_up(R0, 0)
        with capture_logs() as logs:
            async with indexing(source(engine), index=second) as (late, _):
                await late.caught_up(R0, 0)
                refused = await early.until(R0, lambda now: now.problem is not None)
                engine.publish(stored(3, parent=2, first=2))
                engine.publish(removed(3))
                await late.caught_up(R0, 2)
                assert await held(second) == 2

    assert "another indexer" in refused.problem
    assert [each["event"] for each in logs].count("rank_taken_over") == 1
    assert refused.counts.failures == 0


async def test_earlier_indexer_takes_a_rank_back_when_the_later_is_gone(
    publishing: Any, indexing: Any, opening: Opening, redis_server: Any
) -> None:
    """Its lease ends, and the one that stood back goes on."""
    settings = redis_server.settings(heartbeat_s=0.05, lease_s=2.0)
    async with (
        publishing() as engine,
        opening(settings) as first,
        opening(settings) as second,
        indexing(source(engine), index=first) as (early, _),
    ):
        await engine.subscribed()
        engine.publish(stored(1, 2))
        await early.caught_up(R0, 0)
        async with indexing(source(engine), index=second) as (late, _):
            await late.caught_up(R0, 0)
            await early.until(R0, lambda now: now.problem is not None)
        await early.until(R0, lambda now: now.problem is None and now.last_seq == 0)

        assert await held(first) == 2


async def test_indexer_that_ends_on_purpose_lets_the_other_go_on_at_once(
    publishing: Any, indexing: Any, redis_server: Any
) -> None:
    """No waiting for its lease, the same epoch, and nothing counted twice."""
    settings = redis_server.settings(heartbeat_s=0.05)
    async with (
        publishing() as engine,
        open_index(settings) as first,
        indexing(source(engine), index=first.index) as (early, _),
    ):
        await engine.subscribed()
        engine.publish(stored(1, 2))
        before = await early.caught_up(R0, 0)
        registry = CollectorRegistry()
        registry.register(IndexerCollector(early))
        async with (
            open_index(settings) as second,
            indexing(source(engine), index=second.index) as (late, _),
        ):
            await late.caught_up(R0, 0)
            waiting = await early.until(R0, lambda now: now.is_standing_by)
            shown = generate_latest(registry).decode().splitlines()
            engine.publish(stored(3, parent=2, first=2))
            await late.caught_up(R0, 1)
        after = await early.until(R0, lambda now: not now.is_standing_by and now.last_seq == 1)
        held_then = await held(first.index)
        engine.publish(removed(3))
        await early.caught_up(R0, 2)

        assert (held_then, await held(first.index)) == (3, 2)
    assert waiting.problem == "standing by: another indexer writes this rank"
    assert f'kvlb_rank_standby{{instance="{E0}",rank="0"}} 1.0' in shown
    assert not any(line.startswith("kvlb_rank_trust{") for line in shown)
    assert (after.problem, after.epoch, after.epoch_reason) == (None, before.epoch, "resumed")
    assert settings.lease_s == 120


async def test_only_what_is_owned_is_released(opening: Opening, redis_server: Any) -> None:
    """Of three indexers the second ends, whose ranks the third took before: nothing is free."""
    settings = redis_server.settings()
    async with opening(settings) as first, opening(settings) as second, opening(settings) as third:
        await first.restore(R0, "tiny")
        await second.restore(R0, "tiny")
        await third.restore(R0, "tiny")
        opened = RankUpdate(rank=R0, model="tiny", epoch=1, seq=-1, changes=())
        with pytest.raises(NotOwnerError):
            await first.apply(opened)
        await second.release()
        with pytest.raises(NotOwnerError):
            await first.restore(R0, "tiny")

        await third.release()
        await first.apply(opened)
        assert await held(first) == 0


async def test_ranks_that_cannot_be_released_wait_for_the_lease(own_redis: Any) -> None:
    """Redis is gone when the indexer ends: it ends all the same, and says so."""
    server = own_redis()
    server.start()
    with capture_logs() as logs:
        async with open_index(server.settings()) as opened:
            assert opened.journal
            await opened.journal.restore(R0, "tiny")
            server.stop()

    assert "ranks_not_released" in [each["event"] for each in logs]


# Redis fails.


async def test_x1_redis_back_empty_is_written_anew(
    publishing: Any, indexing: Any, opening: Opening, own_redis: Any, becomes: Any
) -> None:
    """What was published while it was gone is there too, without any new event."""
    server = own_redis()
    server.start()
    async with (
        publishing() as engine,
        opening(server.settings(heartbeat_s=0.05)) as index,
        indexing(source(engine), index=index) as (service, _),
    ):
        await engine.subscribed()
        engine.publish(stored(1, 2))
        await service.caught_up(R0, 0)
        server.stop()
        engine.publish(stored(3, parent=2, first=2))
        status = await service.caught_up(R0, 1)
        assert "is it running" in status.problem
        with pytest.raises(IndexUnavailableError):
            await held(index)
        server.start()
        await becomes(index, 3)
        engine.publish(removed(3))
        await becomes(index, 2)

    assert status.counts.failures == 0
    assert status.counts.index_faults["unavailable"] >= 1
    assert status.counts.gaps == {}


async def test_x1_idle_rank_notices_an_emptied_redis(
    publishing: Any, indexing: Any, opening: Opening, own_redis: Any, becomes: Any
) -> None:
    """Emptied between two heartbeats, with no event of the rank before or after."""
    server = own_redis()
    server.start()
    async with (
        publishing() as engine,
        opening(server.settings(heartbeat_s=0.05)) as index,
        indexing(source(engine), index=index) as (service, _),
    ):
        await engine.subscribed()
        engine.publish(stored(1, 2))
        await service.caught_up(R0, 0)
        server.command("FLUSHALL")
        await becomes(index, 2)
        status = service.rank_status(R0)

    assert status.counts.index_faults == {"lost": 1}


async def test_x1_slow_redis_costs_the_index_not_the_stream(
    publishing: Any, indexing: Any, opening: Opening, own_redis: Any, becomes: Any
) -> None:
    """It hangs: batches are taken in all the same, and written when it is back."""
    server = own_redis()
    server.start()
    settings = server.settings(heartbeat_s=0.05, write_timeout_s=0.2, read_timeout_s=0.1)
    async with (
        publishing() as engine,
        opening(settings) as index,
        indexing(source(engine), index=index) as (service, _),
    ):
        await engine.subscribed()
        engine.publish(stored(1))
        await service.caught_up(R0, 0)
        server.pause()
        for number in range(1, 30):
            engine.publish(stored(number + 1, parent=number, first=number))
        status = await service.caught_up(R0, 29)
        with pytest.raises(IndexUnavailableError):
            await held(index)
        server.resume()
        await becomes(index, 30)

    assert (status.trust, status.counts.gaps) == (Trust.EXACT, {})


async def test_x1_redis_that_starts_later_is_filled(
    publishing: Any, indexing: Any, opening: Opening, own_redis: Any, becomes: Any
) -> None:
    """An indexer may be up before its Redis."""
    server = own_redis()
    async with (
        publishing() as engine,
        opening(server.settings(heartbeat_s=0.05)) as index,
        indexing(source(engine), index=index) as (service, _),
    ):
        await engine.subscribed()
        engine.publish(stored(1, 2))
        await service.caught_up(R0, 0)
        server.start()
        await becomes(index, 2)


async def test_x1_read_only_redis_is_written_when_it_may_be(
    publishing: Any, indexing: Any, opening: Opening, own_redis: Any, becomes: Any
) -> None:
    """It became somebody's replica, and is promoted again; lookups go on meanwhile."""
    server = own_redis()
    server.start()
    async with (
        publishing() as engine,
        opening(server.settings(heartbeat_s=0.05)) as index,
        indexing(source(engine), index=index) as (service, _),
    ):
        await engine.subscribed()
        engine.publish(stored(1, 2))
        await service.caught_up(R0, 0)
        server.command("REPLICAOF", "127.0.0.1", "1")
        engine.publish(stored(3, parent=2, first=2))
        status = await service.caught_up(R0, 1)
        assert "READONLY" in status.problem
        assert "READONLY" in service.index_problem
        assert await held(index) == 2
        server.command("REPLICAOF", "NO", "ONE")
        await becomes(index, 3)
        # Readers see what is written before the answer to it is here.
        await service.until(R0, lambda now: now.problem is None)
        assert service.index_problem is None

    assert status.counts.index_faults["unavailable"] >= 1


async def test_x1_full_redis_drops_what_is_out_of_date(
    publishing: Any, indexing: Any, opening: Opening, own_redis: Any, becomes: Any
) -> None:
    """A rank that can't be written any more gives no credit until there is room."""
    server = own_redis("--maxmemory-policy", "noeviction")
    server.start()
    async with (
        publishing() as engine,
        opening(server.settings(heartbeat_s=0.05)) as index,
        indexing(source(engine), index=index) as (service, _),
    ):
        await engine.subscribed()
        engine.publish(stored(1, 2))
        await service.caught_up(R0, 0)
        server.command("CONFIG", "SET", "maxmemory", "1")
        engine.publish(stored(3, parent=2, first=2))
        status = await service.caught_up(R0, 1)
        assert "maxmemory" in status.problem
        await becomes(index, None)
        server.command("CONFIG", "SET", "maxmemory", "0")
        await becomes(index, 3)

    assert status.counts.index_faults["full"] >= 1


async def test_x1_wrong_password_is_an_outage_that_names_no_secret(
    opening: Opening, own_redis: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The password is not in the message; with the right one all is well."""
    server = own_redis("--requirepass", "right-secret")
    server.start()
    monkeypatch.setenv("KVLB_TEST_PASSWORD", "wrong-secret")
    settings = server.settings(password_env="KVLB_TEST_PASSWORD")  # noqa: S106 - a name
    async with opening(settings) as index:
        with pytest.raises(IndexUnavailableError) as caught:
            await index.match(PROMPT)
    assert "WRONGPASS" in str(caught.value)
    assert "redis.password_env" in str(caught.value)
    monkeypatch.setenv("KVLB_TEST_PASSWORD", "right-secret")
    async with opening(settings) as index:
        assert await index.match(PROMPT) == {}

    assert "secret" not in str(caught.value)


async def test_dead_indexers_rank_leaves_with_its_lease(
    publishing: Any, indexing: Any, opening: Opening, redis_server: Any, becomes: Any
) -> None:
    """Nobody renews it."""
    settings = redis_server.settings(heartbeat_s=0.05, lease_s=2.0)
    async with publishing() as engine, opening(settings) as index:
        async with indexing(source(engine), index=index) as (service, _):
            await engine.subscribed()
            engine.publish(stored(1, 2))
            await service.caught_up(R0, 0)
        assert await held(index) == 2
        await becomes(index, None)

        keys = redis_server.command("--scan", "--pattern", f"{settings.prefix}:*").split()
        assert [key for key in keys if redis_server.command("TTL", key) == "-1"] == []


async def test_rank_that_left_the_fleet_leaves_redis(
    publishing: Any, indexing: Any, opening: Opening, redis_server: Any, becomes: Any
) -> None:
    """Not one of its keys stays."""
    settings = redis_server.settings()
    async with (
        publishing() as engine,
        opening(settings) as index,
        indexing(source(engine), index=index) as (service, _),
    ):
        await engine.subscribed()
        engine.publish(stored(1, 2))
        await service.caught_up(R0, 0)
        service.set_sources(())
        await becomes(index, None)

        keys = redis_server.command("--scan", "--pattern", f"{settings.prefix}:*").split()
        assert [key for key in keys if not key.endswith(":gen")] == []
