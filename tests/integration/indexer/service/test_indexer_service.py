"""The indexer while instances come, change and leave, and its status."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx
import msgspec
from fastapi import HTTPException, Request
from prometheus_client import CollectorRegistry, generate_latest
from structlog.testing import capture_logs

from indexer.config import IndexerConfig, InstanceSource
from indexer.core.types import RankId, Trust
from indexer.memory_index import MemoryIndex
from indexer.service import IndexerService
from indexer.status import IndexerCollector, indexer_status_app

Followed = Callable[..., AbstractAsyncContextManager[Any]]
Stored = Callable[..., dict[str, Any]]
Published = Callable[..., dict[str, Any]]
RankOf = Callable[..., RankId]
Held = Callable[..., Awaitable[int | None]]
Find = Callable[..., Awaitable[Any]]


async def test_configured_streams_need_no_answer(unused_url: str, find: Find) -> None:
    """The event socket may be up before the HTTP server is."""
    found = await find(InstanceSource(url=unused_url, events="tcp://*:5557", model="tiny"))

    assert len(found.ranks) == 1


async def test_engine_that_comes_up_later_is_found(
    engine_http: Any,
    publishing: Any,
    indexing: Any,
    unused_url: str,
    eventually: Any,
    stored: Stored,
    published: Published,
    rank_of: RankOf,
) -> None:
    """Discovery goes on; the indexer is ready meanwhile."""
    async with publishing() as publisher, indexing(InstanceSource(url=unused_url)) as (service, _):
        await eventually(lambda: [each.state for each in service.instances()] == ["unreachable"])
        assert service.is_ready
        assert service.instances()[0].problem

        async with engine_http(int(unused_url.rpartition(":")[2])) as engine:
            engine.sources = {"0": published(publisher)}
            publisher.publish(stored(1))
            await service.caught_up(rank_of(engine), 0)


async def test_another_model_at_the_same_address_inherits_nothing(
    followed: Followed, stored: Stored, rank_of: RankOf, held: Held
) -> None:
    """F56: rows of the old model are gone, the stream begins anew under the new name."""
    async with followed(stored(1)) as (engine, _, service, index):
        rank = rank_of(engine)
        await service.caught_up(rank, 0)

        engine.model = "other"
        await service.until(rank, lambda now: now.model == "other" and now.last_seq == 0)

        assert await held(index, rank) is None
        assert await held(index, rank, "other") == 1


async def test_rank_that_is_no_longer_published_is_forgotten(
    engine_http: Any,
    publishing: Any,
    indexing: Any,
    eventually: Any,
    stored: Stored,
    published: Published,
    rank_of: RankOf,
    held: Held,
) -> None:
    """The engine says so itself."""
    async with engine_http() as engine, publishing() as first, publishing() as second:
        engine.sources = {"0": published(first), "1": published(second)}
        second.publish(stored(1))
        async with indexing(InstanceSource(url=engine.url)) as (service, index):
            await service.caught_up(rank_of(engine, 1), 0)

            engine.sources = {"0": published(first)}
            await eventually(lambda: len(service.status()) == 1)

            assert await held(index, rank_of(engine, 1)) is None


class ForgetfulIndex(MemoryIndex):
    """Fails once while it forgets, as a bug would."""

    failures = 1

    async def retire(self, rank: RankId) -> None:
        if self.failures:
            self.failures -= 1
            raise RuntimeError("broken on purpose")
        await super().retire(rank)


async def test_engine_whose_discovery_fails_begins_anew(
    followed: Followed, stored: Stored, rank_of: RankOf, held: Held
) -> None:
    """A bug costs that engine a second."""
    async with followed(stored(1), index=ForgetfulIndex()) as (engine, _, service, index):
        rank = rank_of(engine)
        await service.caught_up(rank, 0)

        engine.model = "other"
        await service.until(rank, lambda now: now.model == "other" and now.last_seq == 0)

        assert await held(index, rank, "other") == 1


async def test_engine_that_leaves_takes_its_series_along(
    followed: Followed, eventually: Any, stored: Stored, rank_of: RankOf, held: Held
) -> None:
    """F58: metrics are bounded by the present fleet."""
    unknown = {"type": "NewInSomeRelease"}
    async with followed(stored(1, 2), unknown, alias="gpu-0") as (engine, _, service, index):
        registry = CollectorRegistry()
        registry.register(IndexerCollector(service))
        await service.caught_up(rank_of(engine), 0)
        await service.until(rank_of(engine), lambda now: now.trust is Trust.EXACT)
        await service.measure()
        lines = generate_latest(registry).decode().splitlines()

        labels = '{instance="gpu-0",rank="0"'
        assert f"kvlb_events_applied_total{labels}}} 1.0" in lines
        assert f'kvlb_events_rejected_total{labels},reason="unknown_event"}} 1.0' in lines
        assert f'kvlb_rank_trust{labels},trust="exact"}} 1.0' in lines
        assert f'kvlb_epochs_total{labels},reason="started"}} 1.0' in lines
        assert f"kvlb_index_rank_entries{labels}}} 2.0" in lines

        service.set_sources([])
        await eventually(lambda: not service.instances())
        await service.measure()
        text = generate_latest(registry).decode()

        assert "gpu-0" not in text
        assert "kvlb_index_entries 0.0" in text.splitlines()
        assert await held(index, rank_of(engine)) is None


async def test_status_app_answers(followed: Followed, stored: Stored, rank_of: RankOf) -> None:
    """Health, readiness, metrics and the whole state."""
    async with followed(stored(1)) as (engine, _, service, _):
        registry = CollectorRegistry()
        registry.register(IndexerCollector(service))
        app = indexer_status_app(service, registry)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://i") as client:
            unready = (await client.get("/ready")).status_code
            await service.caught_up(rank_of(engine), 0)
            ready = (await client.get("/ready")).status_code
            status = msgspec.json.decode((await client.get("/status")).content)
            metrics = await client.get("/metrics")

            assert (await client.get("/health")).json() == {"status": "ok"}
            assert (unready, ready) == (503, 200)
            assert status["ranks"][0]["last_seq"] == 0
            assert status["ranks"][0]["block_sizes"] == {"0": 16}
            assert status["instances"][0]["state"] == "following"
            assert "kvlb_index_entries 1.0" in metrics.text.splitlines()


async def test_new_key_does_not_start_an_instance_anew(
    followed: Followed, eventually: Any, stored: Stored, rank_of: RankOf, held: Held
) -> None:
    """What is known of its cache stays; the engine is asked with the new key."""
    async with followed(api_key="k1") as (engine, publisher, service, index):
        await publisher.subscribed()
        publisher.publish(stored(1))
        await service.caught_up(rank_of(engine), 0)
        service.set_sources([InstanceSource(url=engine.url, api_key="k2")])
        await eventually(lambda: engine.keys_seen[-1:] == ["Bearer k2"])

        assert service.status()[0].epoch_reason == "started"
        assert service.status()[0].counts.connections == 1
        assert await held(index, rank_of(engine)) is not None


async def test_new_name_does_not_start_an_instance_anew(
    followed: Followed, stored: Stored, rank_of: RankOf, held: Held
) -> None:
    """Epoch, connection and blocks stay; status, metrics and log say the new name."""
    async with followed(alias="old") as (engine, publisher, service, index):
        registry = CollectorRegistry()
        registry.register(IndexerCollector(service))
        await publisher.subscribed()
        publisher.publish(stored(1))
        before = await service.caught_up(rank_of(engine), 0)
        service.set_sources([InstanceSource(url=engine.url, alias="new")])
        renamed = await service.until(rank_of(engine), lambda now: now.alias == "new")
        with capture_logs() as log:
            publisher.publish({"type": "NewInSomeRelease"})
            await service.caught_up(rank_of(engine), 1)
        metrics = generate_latest(registry).decode()

        assert renamed.epoch == before.epoch
        assert renamed.counts.connections == 1
        assert await held(index, rank_of(engine)) == 1
        assert [each.alias for each in service.instances()] == ["new"]
        refused = [each for each in log if each["event"] == "events_rejected"]
        assert [each["instance"] for each in refused] == ["new"]
        assert 'instance="old"' not in metrics


async def test_rank_found_while_its_instance_is_renamed_has_the_new_name(
    publishing: Any, eventually: Any, published: Published
) -> None:
    """The engine was asked under the old one."""
    asked, may_answer = asyncio.Event(), asyncio.Event()

    async def answer(request: httpx.Request) -> httpx.Response:
        asked.set()
        await may_answer.wait()
        body = {"data": [{"id": "tiny", "root": "tiny", "parent": None}]}
        return httpx.Response(200, json=body if request.url.path == "/v1/models" else sources)

    async with (
        publishing() as publisher,
        httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http,
        asyncio.TaskGroup() as group,
        asyncio.timeout(20),
    ):
        sources = {"0": published(publisher)}
        old, new = (InstanceSource(url="http://127.0.0.1:1", alias=name) for name in ("old", "new"))
        service = IndexerService(
            config=IndexerConfig(), sources=[old], index=MemoryIndex(), http=http
        )
        running = group.create_task(service.run())
        await asked.wait()
        service.set_sources([new])
        await eventually(lambda: service.instances()[0].alias == "new")
        may_answer.set()
        status = await service.until(RankId(old.instance, 0), lambda _: True)
        running.cancel()

    assert status.alias == "new"


async def test_status_can_be_guarded(indexing: Any) -> None:
    """It tells addresses; health, readiness and metrics stay open."""

    async def refuse(request: Request) -> None:
        raise HTTPException(status_code=403)

    async with indexing() as (service, _):
        app = indexer_status_app(service, CollectorRegistry(), refuse)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://i") as client:
            answers = {
                path: (await client.get(path)).status_code
                for path in ("/health", "/metrics", "/status")
            }

    assert answers == {"/health": 200, "/metrics": 200, "/status": 403}
