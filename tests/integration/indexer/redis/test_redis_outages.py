"""Redis fails (X1): empty, slow, absent, read-only, full, or with another password."""

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from indexer.core.hashing import Namespace
from indexer.core.index import IndexUnavailableError, Prompt
from indexer.core.types import InstanceId, RankId, Trust
from indexer.redis_index.redis_index import RedisIndex
from indexer.redis_index.settings import RedisSettings

Event = Callable[..., dict[str, Any]]
Held = Callable[..., Awaitable[int | None]]

BLOCK_SIZE = 4
E0 = "http://e0:8000"
R0 = RankId(InstanceId(E0), 0)
PROMPT = Prompt(Namespace(model="tiny"), range(100 * BLOCK_SIZE))

Opening = Callable[[RedisSettings], AbstractAsyncContextManager[RedisIndex]]


async def test_x1_redis_back_empty_is_written_anew(
    writing: Any, own_redis: Any, becomes: Any, stored: Event, removed: Event, held: Held
) -> None:
    """What was published while it was gone is there too, without any new event."""
    server = own_redis()
    server.start()
    async with writing(server.settings(heartbeat_s=0.05)) as (engine, index, service):
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
    writing: Any, own_redis: Any, becomes: Any
) -> None:
    """Emptied between two heartbeats, with no event of the rank before or after."""
    server = own_redis()
    server.start()
    async with writing(server.settings(heartbeat_s=0.05)) as (_, index, service):
        server.command("FLUSHALL")
        await becomes(index, 2)
        status = service.rank_status(R0)

    assert status.counts.index_faults == {"lost": 1}


async def test_x1_slow_redis_costs_the_index_not_the_stream(
    writing: Any, own_redis: Any, becomes: Any, stored: Event, held: Held
) -> None:
    """It hangs: batches are taken in all the same, and written when it is back."""
    server = own_redis()
    server.start()
    settings = server.settings(heartbeat_s=0.05, write_timeout_s=0.2, read_timeout_s=0.1)
    async with writing(settings) as (engine, index, service):
        server.pause()
        for number in range(2, 30):
            engine.publish(stored(number + 1, parent=number, first=number))
        status = await service.caught_up(R0, 28)
        with pytest.raises(IndexUnavailableError):
            await held(index)
        server.resume()
        await becomes(index, 30)

    assert (status.trust, status.counts.gaps) == (Trust.EXACT, {})


async def test_x1_redis_that_starts_later_is_filled(
    writing: Any, own_redis: Any, becomes: Any
) -> None:
    """An indexer may be up before its Redis."""
    server = own_redis()
    async with writing(server.settings(heartbeat_s=0.05)) as (_, index, _):
        server.start()
        await becomes(index, 2)


async def test_x1_read_only_redis_is_written_when_it_may_be(
    writing: Any, own_redis: Any, becomes: Any, stored: Event, held: Held
) -> None:
    """It became somebody's replica, and is promoted again; lookups go on meanwhile."""
    server = own_redis()
    server.start()
    async with writing(server.settings(heartbeat_s=0.05)) as (engine, index, service):
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
    writing: Any, own_redis: Any, becomes: Any, stored: Event
) -> None:
    """A rank that can't be written any more gives no credit until there is room."""
    server = own_redis("--maxmemory-policy", "noeviction")
    server.start()
    async with writing(server.settings(heartbeat_s=0.05)) as (engine, index, service):
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
    writing: Any, opening: Opening, redis_server: Any, becomes: Any, held: Held
) -> None:
    """Nobody renews it."""
    settings = redis_server.settings(heartbeat_s=0.05, lease_s=2.0)
    async with opening(settings) as index:
        async with writing(settings):
            pass
        assert await held(index) == 2
        await becomes(index, None)

        keys = redis_server.command("--scan", "--pattern", f"{settings.prefix}:*").split()
        assert [key for key in keys if redis_server.command("TTL", key) == "-1"] == []


async def test_rank_that_left_the_fleet_leaves_redis(
    writing: Any, redis_server: Any, becomes: Any
) -> None:
    """Not one of its keys stays."""
    settings = redis_server.settings()
    async with writing(settings) as (_, index, service):
        service.set_sources(())
        await becomes(index, None)

        keys = redis_server.command("--scan", "--pattern", f"{settings.prefix}:*").split()
        assert [key for key in keys if not key.endswith(":gen")] == []
