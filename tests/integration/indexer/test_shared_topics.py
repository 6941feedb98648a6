"""Engines that connect to one port of ours and publish under one topic: nobody can tell whose is whose."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from indexer.config import InstanceSource
from indexer.core.rank_status import RankStatus
from indexer.core.types import InstanceId, RankId, Trust

Event = Callable[..., dict[str, Any]]
Held = Callable[..., Awaitable[int | None]]
R0 = RankId(InstanceId("http://e0:8000"), 0)


def listed(publisher: Any, bound: str, topic: str) -> dict[str, Any]:
    """What an engine that connects to `bound` says in `/kv_event_sources`."""
    return {"0": {"endpoint": bound, "replay_endpoint": publisher.replay, "topic": topic}}


def is_shared(now: RankStatus) -> bool:
    """Nothing of it is believed, because another publishes under its topic."""
    return (now.trust, now.trust_reason) == (Trust.LOAD_ONLY, "topic_shared")


def is_exact(now: RankStatus) -> bool:
    """All that it published is known."""
    return now.trust is Trust.EXACT


def is_joined(now: RankStatus) -> bool:
    """What it published is known, though it may not have been heard on the port."""
    return now.last_seq is not None


@pytest.mark.parametrize("topic", ["kv-events", ""])
async def test_engines_that_share_a_topic_are_both_out_of_every_answer_until_they_differ(
    publishing: Any, indexing: Any, engine_http: Any, stored: Event, held: Held, topic: str
) -> None:
    """Discovered: no configuration could refuse them. Each says what to change, and no rank fails."""
    async with publishing() as spare:
        bound = spare.events
    own_topic = topic.encode()
    async with (
        engine_http() as first,
        engine_http() as second,
        publishing(connect_to=bound, topic=own_topic) as own,
        publishing(connect_to=bound, topic=own_topic) as other,
        publishing(connect_to=bound, topic=b"its own") as changed,
    ):
        first.sources = listed(own, bound, topic)
        second.sources = listed(other, bound, topic)
        ranks = [RankId(InstanceId(each.url), 0) for each in (first, second)]
        engines = [InstanceSource(url=each.url) for each in (first, second)]
        own.publish(stored(1, 2))
        other.publish(stored(1, 2, 3))
        async with indexing(engines[0]) as (service, index):
            await service.until(ranks[0], is_exact)
            assert await held(index, ranks[0]) == 2

            service.set_sources(engines)
            for rank, rival in ((ranks[0], second.url), (ranks[1], first.url)):
                async with asyncio.timeout(10):
                    status = await service.until(rank, is_shared)
                assert await held(index, rank) is None
                for part in (bound, repr(topic), rival, "--kv-events-config"):
                    assert part in status.problem

            changed.publish(stored(1, 2, 3, 4))
            second.sources = listed(changed, bound, "its own")
            for rank, blocks in ((ranks[0], 2), (ranks[1], 4)):
                status = await service.until(rank, is_joined)
                assert await held(index, rank) == blocks
                assert (status.problem, status.counts.failures) == (None, 0)


async def test_engine_without_a_topic_shares_its_port_with_nobody(
    publishing: Any, indexing: Any, stored: Event, held: Held, source: Callable[..., InstanceSource]
) -> None:
    """It would take whatever comes; once the other one leaves it is alone, and believed."""
    async with publishing() as spare:
        bound = spare.events
    async with publishing(connect_to=bound, topic=b"a") as engine:
        engines = [
            source(engine, url=url, events=bound, direction="bind", topic=topic)
            for url, topic in (("http://e0:8000", None), ("http://e1:8000", "a"))
        ]
        ranks = [RankId(each.instance, 0) for each in engines]
        async with indexing(*engines) as (service, index):
            for rank in ranks:
                await service.until(rank, is_shared)

            service.set_sources(engines[:1])
            engine.publish(stored(1))
            await service.until(ranks[0], is_exact)
            assert await held(index, ranks[0]) == 1


@pytest.mark.parametrize("replay", [True, False], ids=["replay", "no-replay"])
async def test_stranger_that_publishes_under_a_rank_s_topic_ends_its_credit(
    publishing: Any,
    indexing: Any,
    stored: Event,
    source: Callable[..., InstanceSource],
    replay: bool,
) -> None:
    """Nobody told of it: lives that end each other while no connection was lost give it away."""
    async with publishing() as spare:
        bound = spare.events
    async with (
        publishing(connect_to=bound, topic=b"a") as engine,
        publishing(connect_to=bound, topic=b"a") as stranger,
    ):
        known = source(engine, replay=replay, events=bound, direction="bind", topic="a")
        async with indexing(known) as (service, _):
            await engine.subscribed()
            await stranger.subscribed()
            for number in range(4):
                for each, first in ((engine, 10), (stranger, 50)):
                    before = service.rank_status(R0).counts.batches
                    each.publish(stored(first + number, first=number))
                    await service.until(R0, lambda now, before=before: now.counts.batches > before)

            async with asyncio.timeout(10):
                status = await service.until(R0, lambda now: now.trust_reason == "interleaved")
            assert status.trust is Trust.LOAD_ONLY
