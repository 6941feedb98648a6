"""Somebody else writes keys of ours: what can't be ours is lost, counted, and written anew."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from indexer.core.types import InstanceId, RankId, Trust
from indexer.redis_index.settings import RedisSettings

Event = Callable[..., dict[str, Any]]
Held = Callable[..., Awaitable[int | None]]

R0 = RankId(InstanceId("http://e0:8000"), 0)


def key_of(server: Any, settings: RedisSettings, end: str) -> str:
    """The one key under this index's prefix that ends so."""
    found: str = server.command("--scan", "--pattern", f"{settings.prefix}:1:*:{end}")
    (name,) = found.split()
    return name


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epoch", "abc"),
        ("epoch", "1e30"),
        ("owner", "abc"),
        ("owner", "99999999999999999999"),
        ("seq", "abc"),
        ("seq", "99999999999999999999999"),
        ("digest", "abc"),
        ("digest", "18446744073709551616"),
        ("facts", "abc"),
    ],
)
async def test_state_that_reads_as_nobodys_is_lost(
    following: Any,
    publishing: Any,
    redis_server: Any,
    stored: Event,
    held: Held,
    field: str,
    value: str,
) -> None:
    """The next indexer begins the rank anew, says so, and the old entries give no credit."""
    settings = redis_server.settings(heartbeat_s=0.05)
    async with publishing() as engine:
        async with following(engine, settings) as (index, service):
            await engine.subscribed()
            engine.publish(stored(1, 2))
            engine.publish(stored(3, parent=2, first=2))
            before = await service.caught_up(R0, 1)
        engine.ring = engine.ring[:1]  # that the third block was dropped meanwhile nobody tells
        redis_server.command("HSET", key_of(redis_server, settings, "state"), field, value)
        async with following(engine, settings) as (index, service):
            after = await service.caught_up(R0, 0)
            assert await held(index) == 2

    assert (after.counts.failures, after.problem) == (0, None)
    assert after.counts.index_faults["lost"] == 1
    assert after.epoch > before.epoch
    assert after.epoch_reason == "started"


@pytest.mark.parametrize("ahead", [3_600_000, 2**52, 10**30])
async def test_epoch_ahead_of_its_owner_s_is_lost(
    eventually: Any, writing: Any, redis_server: Any, becomes: Any, stored: Event, ahead: int
) -> None:
    """Nobody but who claims a rank opens its epochs: found at the next heartbeat, without a batch."""
    settings = redis_server.settings(heartbeat_s=0.05)
    async with writing(settings) as (engine, index, service):
        name = key_of(redis_server, settings, "state")
        epoch = service.rank_status(R0).epoch
        redis_server.command("HSET", name, "epoch", str(epoch + ahead))

        await eventually(lambda: redis_server.command("HGET", name, "epoch") == str(epoch))
        engine.publish(stored(3, parent=2, first=2))
        await becomes(index, 3)

    status = service.rank_status(R0)
    assert (status.counts.index_faults, status.counts.failures) == ({"lost": 1}, 0)


async def test_newer_epoch_of_a_rank_that_is_nobody_s_is_passed(
    eventually: Any, writing: Any, redis_server: Any, becomes: Any
) -> None:
    """Its writer claims it anew, and begins an epoch above what it finds."""
    settings = redis_server.settings(heartbeat_s=0.05)
    async with writing(settings) as (_, index, service):
        name = key_of(redis_server, settings, "state")
        ahead = service.rank_status(R0).epoch + 3_600_000
        tampered = (
            f"redis.call('HDEL', KEYS[1], 'owner') redis.call('HSET', KEYS[1], 'epoch', {ahead})"
        )
        redis_server.command("EVAL", tampered, "1", name)

        await eventually(lambda: service.rank_status(R0).epoch > ahead)
        await becomes(index, 2)


@pytest.mark.parametrize(
    ("end", "kind"),
    [
        ("gen", "string"),
        ("ranks", "hash"),
        ("life", "string"),
        ("state", "hash"),
        ("4:0", "set"),
        ("rows", "hash"),
    ],
)
async def test_key_of_another_type_is_replaced(
    eventually: Any,
    writing: Any,
    redis_server: Any,
    becomes: Any,
    stored: Event,
    end: str,
    kind: str,
) -> None:
    """Every command on it fails until it is gone: nobody has to delete it."""
    settings = redis_server.settings(heartbeat_s=0.05)
    async with writing(settings) as (engine, index, service):
        name = key_of(redis_server, settings, end)
        redis_server.command("DEL", name)
        redis_server.command("LPUSH", name, "x")

        engine.publish(stored(3, parent=2, first=2))

        await eventually(lambda: redis_server.command("TYPE", name).strip() == kind)
        await becomes(index, 3)
        status = service.rank_status(R0)
        assert status.counts.index_faults["lost"] >= 1
        assert status.trust is Trust.EXACT


async def test_generation_that_is_no_number_is_another_generation(
    eventually: Any, writing: Any, redis_server: Any, becomes: Any
) -> None:
    """What bumps it goes on from the clock."""
    settings = redis_server.settings(heartbeat_s=0.05)
    async with writing(settings) as (engine, index, service):
        name = key_of(redis_server, settings, "gen")
        redis_server.command("SET", name, "x")

        engine.publish(
            {
                "type": "BlockStored",
                "block_hashes": [1],
                "medium": "CPU",
                "token_ids": [],
                "parent_block_hash": None,
                "block_size": 4,
            }
        )

        await becomes(index, 2)
        await eventually(lambda: redis_server.command("GET", name).strip().isdigit())
        assert service.rank_status(R0).counts.index_faults == {}


@pytest.mark.parametrize("end", ["ranks", "life", "state"])
async def test_key_of_another_type_is_replaced_by_the_next_indexer(
    following: Any, publishing: Any, redis_server: Any, stored: Event, held: Held, end: str
) -> None:
    """It was written while no indexer ran."""
    settings = redis_server.settings(heartbeat_s=0.05)
    async with publishing() as engine:
        async with following(engine, settings) as (index, service):
            await engine.subscribed()
            engine.publish(stored(1, 2))
            await service.caught_up(R0, 0)
        name = key_of(redis_server, settings, end)
        redis_server.command("DEL", name)
        redis_server.command("LPUSH", name, "x")
        async with following(engine, settings) as (index, service):
            status = await service.caught_up(R0, 0)
            assert await held(index) == 2

    assert (status.counts.failures, status.problem) == (0, None)
    assert status.counts.index_faults["lost"] == 1
