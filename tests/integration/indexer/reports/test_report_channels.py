"""Channels of reports, within one process and over Redis: once, in order, bounded."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from indexer.core.index import IndexFullError, IndexUnavailableError
from indexer.core.reports import CacheReport, RankTally, Report
from indexer.core.types import InstanceId, RankId
from indexer.local_reports import LocalReports
from indexer.redis_index.connection import RedisConnection
from indexer.redis_index.keys import model_keys
from indexer.redis_index.reports import RedisReports

Contradiction = Callable[..., CacheReport]

E0 = "http://e0:8000"
R0 = RankId(InstanceId(E0), 0)

Channel = LocalReports | RedisReports


@pytest.fixture(params=["local", "redis"])
async def channel(request: pytest.FixtureRequest, redis_server: Any) -> AsyncIterator[Channel]:
    """Both ends of each way there is."""
    if request.param == "local":
        yield LocalReports()
        return
    connection = RedisConnection(redis_server.settings())
    yield RedisReports(connection)
    await connection.aclose()


async def test_reports_come_once_in_order_and_by_model(
    channel: Channel, contradiction: Contradiction
) -> None:
    """Whatever kind they are of, and older by their wait."""
    sent: list[Report] = [contradiction(3), RankTally(rank=R0, epoch=5, agreed=2, age_s=1.5)]
    await channel.send("tiny", sent)
    await channel.send("tiny", [contradiction(4)])
    await channel.send("other", [contradiction(5)])
    await asyncio.sleep(0.02)

    taken = await channel.take("tiny")

    assert [msgspec.structs.replace(each, age_s=0.0) for each in taken] == [
        msgspec.structs.replace(each, age_s=0.0) for each in [*sent, contradiction(4)]
    ]
    assert 0.015 < taken[0].age_s < 5
    assert 1.515 < taken[1].age_s < 6
    assert list(await channel.take("tiny")) == []
    assert len(await channel.take("other")) == 1


async def test_waiting_ends_when_something_may_have_come(
    channel: Channel, contradiction: Contradiction
) -> None:
    """And after a while anyway."""
    async with asyncio.timeout(20):
        await channel.wait()
        await channel.send("tiny", [contradiction()])
        await channel.wait()


async def test_local_reports_are_bounded(contradiction: Contradiction) -> None:
    """Those for which there is no room are lost, and whoever sends them hears of it."""
    channel = LocalReports()
    await channel.send("tiny", [contradiction()] * 4096)

    with pytest.raises(IndexFullError):
        await channel.send("tiny", [contradiction()])
    for number in range(255):
        await channel.send(f"model-{number}", [contradiction()])
    with pytest.raises(IndexFullError):
        await channel.send("one too many", [contradiction()])

    assert len(await channel.take("tiny")) == 4096


async def test_reports_in_redis_are_bounded_and_leave_by_themselves(
    redis_server: Any, contradiction: Contradiction
) -> None:
    """An indexer that is gone takes none; a balancer goes on."""
    settings = redis_server.settings()
    connection = RedisConnection(settings)
    channel = RedisReports(connection)
    for number in range(1100):
        await channel.send("tiny", [contradiction(number % 90)])
    key = model_keys(settings.prefix, "tiny").reports

    assert redis_server.command("LLEN", key) == "1024"
    assert 0 < int(redis_server.command("PTTL", key)) <= 10_000

    taken = await channel.take("tiny")
    assert isinstance(taken[0], CacheReport)
    assert taken[0].key == contradiction(76).key
    await connection.aclose()


async def test_what_another_version_wrote_is_passed_over(
    redis_server: Any, contradiction: Contradiction
) -> None:
    """One message, not those beside it."""
    settings = redis_server.settings()
    connection = RedisConnection(settings)
    channel = RedisReports(connection)
    key = model_keys(settings.prefix, "tiny").reports
    for junk in ("junk", "123 junk", ""):
        redis_server.command("RPUSH", key, junk)
    await channel.send("tiny", [contradiction()])

    assert len(await channel.take("tiny")) == 1
    await connection.aclose()


async def test_redis_that_is_down_loses_reports_and_nothing_else(
    own_redis: Any, contradiction: Contradiction
) -> None:
    """Both ends hear of it."""
    server = own_redis()
    connection = RedisConnection(server.settings())
    channel = RedisReports(connection)

    with pytest.raises(IndexUnavailableError):
        await channel.send("tiny", [contradiction()])
    with pytest.raises(IndexUnavailableError):
        await channel.take("tiny")
    await connection.aclose()
