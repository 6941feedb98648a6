"""Two indexers over one Redis: the later writes, and ranks change hands."""

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from structlog.testing import capture_logs

from indexer.config import InstanceSource
from indexer.core.index import NotOwnerError, RankUpdate
from indexer.core.types import InstanceId, RankId, Trust
from indexer.redis_index.redis_index import RedisIndex
from indexer.redis_index.settings import RedisSettings
from indexer.status import IndexerCollector
from kvlb.index_backend import open_index

Event = Callable[..., dict[str, Any]]
Held = Callable[..., Awaitable[int | None]]
Source = Callable[..., InstanceSource]

E0 = "http://e0:8000"
R0 = RankId(InstanceId(E0), 0)

Opening = Callable[[RedisSettings], AbstractAsyncContextManager[RedisIndex]]


async def test_later_of_two_indexers_writes_and_the_earlier_says_so(
    following: Any, writing: Any, redis_server: Any, stored: Event, removed: Event, held: Held
) -> None:
    """Nothing is counted twice: one removal takes the block."""
    settings = redis_server.settings(heartbeat_s=0.05)
    async with writing(settings) as (engine, _, early):
        with capture_logs() as logs:
            async with following(engine, settings) as (second, late):
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
    following: Any, writing: Any, redis_server: Any, held: Held
) -> None:
    """Its lease ends, and the one that stood back goes on."""
    settings = redis_server.settings(heartbeat_s=0.05, lease_s=2.0)
    async with writing(settings) as (engine, first, early):
        async with following(engine, settings) as (_, late):
            await late.caught_up(R0, 0)
            await early.until(R0, lambda now: now.problem is not None)
        await early.until(R0, lambda now: now.problem is None and now.last_seq == 0)

        assert await held(first) == 2


async def test_indexer_that_ends_on_purpose_lets_the_other_go_on_at_once(
    publishing: Any,
    indexing: Any,
    redis_server: Any,
    stored: Event,
    removed: Event,
    held: Held,
    source: Source,
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
            assert (waiting.trust, waiting.trust_reason) == (Trust.LOAD_ONLY, "standing_by")
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


async def test_only_what_is_owned_is_released(
    opening: Opening, redis_server: Any, held: Held
) -> None:
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
